"""Files of this package were read by cerebras-pytorch 2.10.0 (`data/oracle/`), and what is written today is laid out alike."""

import importlib.util
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from cerebras.pytorch import storage

ORACLE = Path(__file__).parent / "data" / "oracle"
READ = json.loads((ORACLE / "read.json").read_text())
_spec = importlib.util.spec_from_file_location("oracle_states", ORACLE / "states.py")
_states = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_states)
STATES = _states.states()


def same(value, read, where):
    """Compares a value with what the original said it read; a NamedTuple is a tuple to it, an int key a str."""
    kind = read["kind"]
    if kind in ("dict", "OrderedDict"):
        assert type(value).__name__ == kind and len(value) == len(read["items"]), where
        for (key, child), (read_key, read_child) in zip(value.items(), read["items"]):
            assert str(key) == str(read_key["value"]), where
            same(child, read_child, (*where, key))
    elif kind in ("list", "tuple"):
        assert isinstance(value, list if kind == "list" else tuple) and len(value) == len(read["items"]), where
        for index, (child, read_child) in enumerate(zip(value, read["items"])):
            same(child, read_child, (*where, index))
    elif kind == "set":
        assert value == {item["value"] for item in read["items"]}, where
    elif kind in ("tensor", "ndarray"):
        assert str(value.dtype).removeprefix("torch.") == read["dtype"], where
        assert list(value.shape) == read["shape"] and value.reshape(-1).tolist() == read["data"], where
    elif kind == "none":
        assert value is None, where
    else:
        assert type(value).__name__ == kind and value == read["value"], where


@pytest.mark.parametrize("name", [name for name in STATES if name != "extension"])
def test_the_original_read_what_was_saved(name):
    same(STATES[name][0], READ[f"{name}.mdl"], (name,))
    same(storage.load(ORACLE / f"{name}.mdl", "cpu"), READ[f"{name}.mdl"], (name,))


def test_the_original_tied_shared_tensors():
    assert READ["shared.mdl"]["tied"] is True
    assert "2.10.0" in READ["package"]


def test_the_original_refused_the_extension():
    assert READ["extension.mdl"]["kind"] == "error" and "cstorch.Tensor" in READ["extension.mdl"]["message"]


@pytest.mark.parametrize("name", STATES)
def test_files_written_today_are_laid_out_like_those(name, tmp_path):
    state, options = STATES[name]
    storage.save(state, tmp_path / "a.mdl", **options)
    with h5py.File(ORACLE / f"{name}.mdl") as read, h5py.File(tmp_path / "a.mdl") as written:
        version_dependent = {"__cstorch_version__"}
        assert set(read.attrs) == set(written.attrs)
        for attribute in set(read.attrs) - version_dependent:
            assert np.array_equal(read.attrs[attribute], written.attrs[attribute]), attribute

        def check(key, dataset):
            if isinstance(dataset, h5py.Dataset):
                now = written[key]
                assert (dataset.dtype, dataset.shape, dataset.chunks) == (now.dtype, now.shape, now.chunks)
                assert np.array_equal(dataset[()], now[()]) and set(dataset.attrs) == set(now.attrs)

        read.visititems(check)
