"""Generated states come back as they were; damaged files give the right data or the documented error."""

import collections
import datetime
import os
import random
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cerebras.appliance.storage import StorageError, h5_storage
from cerebras.pytorch import storage
from cerebras.pytorch.storage.constants import DTYPES

Point = collections.namedtuple("Point", "x y")

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(shapes)
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = draw(st.binary(min_size=size, max_size=size))
    data = torch.tensor(list(raw), dtype=torch.uint8)
    if dtype == torch.bool:
        data = data % 2
    tensor = data.view(dtype).reshape(shape)
    change = draw(st.sampled_from(["none", "transpose", "slice", "parameter", "lazy"]))
    if change == "transpose" and tensor.dim() == 2:
        return tensor.t()
    if change == "slice" and tensor.dim() and tensor.shape[0] > 1:
        return tensor[::2]
    if change == "lazy":
        return storage.DeferredFullTensor(shape, torch.float32, draw(st.floats(width=32)))
    return tensor


arrays = hnp.arrays(
    st.one_of(hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"), hnp.boolean_dtypes()),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
text = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), text, st.binary(max_size=8), st.complex_numbers(),
    st.datetimes(), st.dates(), st.timedeltas(), st.sampled_from([torch.int8, torch.Size([1, 2])]),
)  # fmt: skip
keys = st.one_of(
    text, st.sampled_from(["a", "a.b", "b", "/", "a/b", ".", "", "__spec__", "x.__metadata__"]), st.integers(),
    st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(max_size=4), st.tuples(st.integers(), text),
)  # fmt: skip
states = st.recursive(
    st.one_of(scalars, tensors(), arrays),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(text, children, max_size=3).map(collections.OrderedDict),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.sets(st.one_of(st.integers(), text), max_size=3),
    ),
    max_leaves=12,
)


def bits(tensor):
    tensor = tensor._materialize() if isinstance(tensor, storage.DeferredTensor) else tensor
    tensor = tensor.detach().resolve_conj().contiguous()
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def check(value, expected):
    if isinstance(expected, torch.Tensor):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape) and bits(value) == bits(expected)
    elif isinstance(expected, np.ndarray):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert value.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert type(value) is type(expected) and list(map(repr, value)) == list(map(repr, expected))
        for got, wanted in zip(value.values(), expected.values()):
            check(got, wanted)
    elif isinstance(expected, (list, tuple)) and not isinstance(expected, torch.Size):
        assert type(value).__name__ == type(expected).__name__ and len(value) == len(expected)
        assert getattr(value, "_fields", None) == getattr(expected, "_fields", None)
        for got, wanted in zip(value, expected):
            check(got, wanted)
    else:
        assert type(value) is type(expected) and (value == expected or repr(value) == repr(expected))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=states, mode=st.sampled_from([None, "cache", "cpu"]), compression=st.sampled_from([None, None, "lz4"]))
def test_a_state_comes_back_as_it_was(tmp_path_factory, state, mode, compression):
    directory = tmp_path_factory.mktemp("trip")
    storage.save(state, directory / "a.mdl", compression=compression)
    check(storage.load(directory / "a.mdl", mode), state)
    storage.save(storage.load(directory / "a.mdl", mode), directory / "b.mdl")
    check(storage.load(directory / "b.mdl", "cpu"), state)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_views_of_one_storage_come_back_sharing_it(tmp_path_factory, data):
    base = torch.arange(64.0)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        offset, rows, columns = (data.draw(st.integers(0, 16)) for _ in range(3))
        strides = (data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1)))
        views.append(base.as_strided((rows, columns), strides, offset))
    path = tmp_path_factory.mktemp("views") / "a.mdl"
    storage.save(views, path)
    for mode in (None, "cpu"):
        for got, wanted in zip(storage.load(path, mode), views):
            assert torch.equal(got, wanted)


def damaged(whole, rng, index):
    data = bytearray(whole)
    if index % 4 == 0:
        return data[: rng.randrange(len(data))]
    if index % 4 == 1:  # one bit
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return data
    if index % 4 == 2:  # a lost page
        start = rng.randrange(len(data) // 512) * 512
        data[start : start + 512] = bytes(512)
        return data
    for _ in range(rng.randrange(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return data


SOUGHT = {
    "t": torch.arange(64.0),
    (1, 2): b"bytes",
    "v": [1, "s", np.arange(3)],
    "i8": torch.ones(3, dtype=torch.int8),
    "fill": storage.DeferredFullTensor((2, 3), torch.float32, 0.5),
}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("size", [64, 20_000])
def test_damage_never_gives_other_values(tmp_path, size, compression):
    """What the writer put into the file is covered by checksums, so a load that succeeds is right."""
    state = SOUGHT | {"t": torch.arange(float(size))}
    storage.save(state, tmp_path / "a.mdl", compression=compression)
    whole = (tmp_path / "a.mdl").read_bytes()
    rng = random.Random(1)
    outcomes = collections.Counter()
    for index in range(200):
        broken = tmp_path / f"{index}.mdl"
        broken.write_bytes(damaged(whole, rng, index))
        try:
            loaded = storage.load(broken, "cpu" if index % 2 else None, mmap=index % 3 == 0)
            check(loaded, state)
            outcomes["right"] += 1
        except StorageError:
            outcomes["refused"] += 1
        os.unlink(broken)
    assert outcomes["refused"] > 60 and sum(outcomes.values()) == 200


def test_a_damaged_file_of_the_original_loads_or_is_refused(tmp_path, probe):
    """Its files have no checksums: a flipped bit in the values cannot be noticed, everything else ends well."""
    rng = random.Random(2)
    for index in range(6):
        name = ("tensors.mdl", "shared.mdl", "structure.mdl")[index % 3]
        whole = (Path(__file__).parent / "data" / name).read_bytes()
        broken = tmp_path / f"{index}.mdl"
        broken.write_bytes(damaged(whole, rng, index))
        try:
            storage.load(broken, "cpu")
        except StorageError:
            pass


def test_a_file_on_which_hdf5_loops_for_ever_is_refused(tmp_path, monkeypatch, probe):
    """A page of zeros in a global heap: found by `test_damage_never_gives_other_values` before files had a seal."""
    monkeypatch.setattr(h5_storage, "PROBE_SECONDS", 2)
    storage.save({"t": torch.arange(64.0), "v": [1, "s"]}, tmp_path / "whole.mdl")
    data = bytearray((tmp_path / "whole.mdl").read_bytes()[:-1])  # without seal
    assert data.index(b"GCOL") < 512
    data[512:1024] = bytes(512)
    (tmp_path / "a.mdl").write_bytes(data)
    with pytest.raises(StorageError, match="did not end"):
        storage.load(tmp_path / "a.mdl")


def test_a_date_is_not_a_datetime(tmp_path):
    storage.save([datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1)], tmp_path / "a.mdl")
    assert list(map(type, storage.load(tmp_path / "a.mdl"))) == [datetime.date, datetime.datetime]
