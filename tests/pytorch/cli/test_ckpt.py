"""`cstorch ckpt`."""

import collections
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from cerebras.pytorch import storage
from cerebras.pytorch.cli import main

Point = collections.namedtuple("Point", "x y")


def cstorch(*args, status=0):
    result = CliRunner().invoke(main, ["ckpt", *map(str, args)])
    assert result.exit_code == status, result.output
    return json.loads(result.output) if "--json" in args else result.output


@pytest.fixture
def file(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": {"emb": weight, "head": weight, "scale": storage.DeferredFullTensor((4,), torch.bfloat16, 0.5)},
        "opt": [{"lr": 0.1, "p": Point(1, np.arange(3))}],
    }
    storage.save(state, tmp_path / "a.mdl")
    return tmp_path / "a.mdl"


def test_info(file):
    text = cstorch("info", file)
    assert "float32 [2, 3]  24 B" in text and "shared: model.emb, model.head" in text and "= 0.5" in text
    data = cstorch("info", file, "--json")
    assert data["tensors"] == 3 and data["shared"] == [["model.emb", "model.head"]]
    assert [entry["name"] for entry in data["entries"]][-2:] == ["opt.0.p.x", "opt.0.p.y"]


def test_diff(file, tmp_path):
    assert "0 differ" in cstorch("diff", file, file)
    state = storage.load(file, "cpu")
    state["model"]["emb"] = state["model"]["emb"] + 0.5
    state["opt"][0]["lr"] = 0.2
    del state["opt"][0]["p"]
    storage.save(state, tmp_path / "b.mdl")
    found = {
        entry["name"]: entry for entry in cstorch("diff", file, tmp_path / "b.mdl", "--json", status=1)["differences"]
    }
    assert found["model.emb"]["max_abs"] == 0.5 and found["model.emb"]["max_rel"] == 1.0
    assert "0.1 and 0.2" in found["opt.0.lr"]["reason"] and "only in" in found["opt.0.p.x"]["reason"]
    assert "max abs 0.5" in cstorch("diff", file, tmp_path / "b.mdl", status=1)


def test_diff_of_nan_and_of_dtypes(tmp_path):
    nan = torch.tensor([float("nan"), 1.0])
    storage.save([nan, torch.ones(2)], tmp_path / "a.mdl")
    storage.save([nan, torch.ones(2, dtype=torch.float64)], tmp_path / "b.mdl")
    (only,) = cstorch("diff", tmp_path / "a.mdl", tmp_path / "b.mdl", "--json", status=1)["differences"]
    assert only["name"] == "1" and "dtypes" in only["reason"] and only["max_abs"] == 0


def test_convert_there_and_back(file, tmp_path):
    cstorch("convert", file, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert loaded["model"]["emb"] is loaded["model"]["head"] and loaded["opt"][0]["lr"] == 0.1
    message = cstorch("convert", file, tmp_path / "a.safetensors", status=2)
    assert "opt.0.lr" in message and "--tensors-only" in message and not (tmp_path / "a.safetensors").exists()
    cstorch("convert", file, tmp_path / "a.safetensors", "--tensors-only")
    cstorch("convert", tmp_path / "a.safetensors", tmp_path / "b.mdl", "--compression", "zstd", "--json")
    out = storage.load(tmp_path / "b.mdl", "cpu")
    assert torch.equal(out["model.head"], torch.arange(6.0).reshape(2, 3)) and out["model.scale"].tolist() == [0.5] * 4
    assert "exists" in cstorch("convert", file, tmp_path / "b.mdl", status=2)
    assert "--to" in cstorch("convert", file, tmp_path / "x.unknown", status=2)


def test_verify(file, tmp_path):
    assert cstorch("verify", file, "--json") == {
        "ok": True, "tensors": 2, "checked": 2, "bytes": 48, "problems": [], "notes": [],
    }  # fmt: skip
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    (tmp_path / "b.mdl").write_bytes(data)
    assert "'model.emb' are damaged" in cstorch("verify", tmp_path / "b.mdl", status=1)
    (tmp_path / "c.mdl").write_bytes(data[:-100])
    assert cstorch("verify", tmp_path / "c.mdl", "--json", status=1)["problems"]
    storage.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "nan.mdl")
    assert "w: 1 values are NaN" in cstorch("verify", tmp_path / "nan.mdl")
    assert "no such" in cstorch("verify", tmp_path / "no.mdl", status=2)
    assert "error" in cstorch("info", tmp_path / "no.mdl", "--json", status=2)
