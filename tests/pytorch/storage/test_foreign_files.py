"""Files of torch.save and safetensors load too."""

import io

import pytest
import torch

from cerebras.pytorch import storage


@pytest.fixture
def state():
    return {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.mark.parametrize("mode", [None, "cache", "cpu", {"cpu": "cpu"}])
@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files(tmp_path, state, mode, legacy):
    torch.save(state | {"step": 3}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    out = storage.load(tmp_path / "a.pt", mode)
    assert out["step"] == 3 and all(torch.equal(out[key], state[key]) for key in state)


def test_kwargs_go_to_torch_load_only(tmp_path, state):
    torch.save(state, tmp_path / "a.pt")
    storage.save(state, tmp_path / "a.mdl")
    storage.load(tmp_path / "a.mdl", no_such_option=1)
    with pytest.raises(RuntimeError, match="no_such_option"):
        storage.load(tmp_path / "a.pt", no_such_option=1)


@pytest.mark.parametrize("mode", [None, "cache", "cpu"])
def test_safetensors_files(tmp_path, state, mode):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, tmp_path / "a.safetensors")
    out = storage.load(tmp_path / "a.safetensors", mode)
    assert all(torch.equal(out[key], state[key]) for key in state)


def test_file_objects(tmp_path, state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.equal(storage.load(buffer)["w"], state["w"])
    storage.save(state, tmp_path / "a.mdl")
    with open(tmp_path / "a.mdl", "rb") as file:
        out = storage.load(file)
    assert torch.equal(out["w"], state["w"])
    with pytest.raises(TypeError, match="text mode"):
        storage.load(io.StringIO("x"))
    with pytest.raises(TypeError, match="path"):
        storage.load(3)
