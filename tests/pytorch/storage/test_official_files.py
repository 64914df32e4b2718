"""Files written by cerebras-pytorch 2.10.0 load with the values they were written with."""

import collections
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cerebras.pytorch import storage

DATA = Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "expected.json").read_text())


def check(value, expected, where):
    kind = expected["kind"]
    if kind in ("dict", "OrderedDict"):
        assert type(value) is (dict if kind == "dict" else collections.OrderedDict), where
        keys = [item[0]["value"] for item in expected["items"]]
        assert list(value) == keys, where
        for key, (_, child) in zip(keys, expected["items"]):
            check(value[key], child, (*where, key))
    elif kind in ("list", "tuple"):
        assert type(value).__name__ == kind and len(value) == len(expected["items"]), where
        for index, child in enumerate(expected["items"]):
            check(value[index], child, (*where, index))
    elif kind == "tensor":
        assert isinstance(value, torch.Tensor), where
        assert str(value.dtype) == "torch." + expected["dtype"] and list(value.shape) == expected["shape"], where
        assert value.reshape(-1).tolist() == expected["data"], where
    elif kind == "ndarray":
        assert isinstance(value, np.ndarray), where
        assert str(value.dtype) == expected["dtype"] and list(value.shape) == expected["shape"], where
        assert value.reshape(-1).tolist() == expected["data"], where
    elif kind == "none":
        assert value is None, where
    elif kind == "set":
        assert value == {item["value"] for item in expected["items"]}, where
    elif kind == "object":
        assert repr(value) == expected["repr"], where
    else:
        assert type(value).__name__ == kind, where
        assert value == expected["value"] or math.isnan(value), where


@pytest.mark.parametrize("mode", [None, "cache", "cpu"])
@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "object.mdl"])
def test_values(name, mode):
    check(storage.load(DATA / name, mode), EXPECTED[name], (name,))


def test_linked_tensors_are_the_same_tensor():
    for mode in (None, "cpu"):
        loaded = storage.load(DATA / "shared.mdl", mode)
        assert loaded["embed"]["weight"] is loaded["head"]["weight"]


def test_fills_stay_deferred():
    loaded = storage.load(DATA / "lazyfill.mdl")
    assert all(isinstance(tensor, storage.DeferredFullTensor) for tensor in loaded.values())
    assert not any(isinstance(t, storage.DeferredTensor) for t in storage.load(DATA / "lazyfill.mdl", "cpu").values())


def test_rows_of_a_compressed_dataset():
    assert storage.load(DATA / "tensors.mdl")["f32"][1:].tolist() == [[0.75, 1.0, 1.25]]


def test_pickled_entries_are_refused_by_name_unless_allowed():
    with pytest.raises(RuntimeError, match=r"'dtype', 'bytes'.*allow_pickle=True"):
        storage.load(DATA / "object.mdl")
    check(storage.load(DATA / "object.mdl", allow_pickle=True), EXPECTED["object.mdl"], ("object.mdl",))


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "object.mdl"])
def test_saving_what_was_loaded_gives_the_same_metadata(name, tmp_path):
    import h5py

    storage.save(storage.load(DATA / name), tmp_path / name)
    with h5py.File(DATA / name) as theirs, h5py.File(tmp_path / name) as ours:
        assert "__cstorch_extension__" not in ours.attrs
        for key, value in theirs.attrs.items():
            if not key.endswith(".__metadata__") or '"__LINKED__"' in value:
                continue  # the original also links equal ints and strings, by their identity
            theirs_leaf, ours_leaf = json.loads(value), json.loads(ours.attrs[key])
            assert theirs_leaf.pop("__spec__")[1] == ours_leaf.pop("__spec__")[1]
            assert theirs_leaf == ours_leaf
        assert json.loads(theirs.attrs["__spec__"])[1] == json.loads(ours.attrs["__spec__"])[1]
        for key in ("f32", "bf16", "scalar0d", "np_arr", "sla/sh"):
            if key in theirs:
                assert set(theirs[key].attrs) == set(ours[key].attrs)
                for name in theirs[key].attrs:
                    assert np.array_equal(theirs[key].attrs[name], ours[key].attrs[name])
                    assert theirs[key].attrs.get_id(name).dtype == ours[key].attrs.get_id(name).dtype
