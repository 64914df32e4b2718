"""What goes into a checkpoint comes out of it, or is refused by its tree path."""

import collections
import datetime
import enum
import math
import warnings

import h5py
import numpy as np
import pytest
import torch

from cerebras.pytorch import storage
from cerebras.pytorch.storage.constants import DTYPES

Point = collections.namedtuple("Point", "x y")


@pytest.fixture(params=[None, "cache", "cpu"])
def trip(request, tmp_path):
    def trip(obj):
        path = tmp_path / f"trip{len(list(tmp_path.iterdir()))}.mdl"
        storage.save(obj, path)
        return storage.load(path, request.param)

    return trip


def bits(tensor):
    tensor = tensor._materialize() if isinstance(tensor, storage.DeferredTensor) else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def assert_same(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert bits(a) == bits(b)


def extension_of(path):
    with h5py.File(path) as file:
        return file.attrs.get("__cstorch_extension__")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 6)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(trip, dtype, shape):
    warnings.filterwarnings("ignore", "ComplexHalf")
    generator = torch.Generator().manual_seed(3)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * size,), generator=generator)
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    assert_same(trip({"t": tensor})["t"], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(8.0).reshape(2, 2, 2).permute(2, 0, 1)[1:],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, requires_grad=True),
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.randn(3), requires_grad=False),
    ],
)
def test_strided_views_and_parameters_are_stored_as_their_values(trip, tensor):
    out = trip([tensor])[0]
    assert torch.equal(out, tensor.detach()) and not out.requires_grad


def test_nested_containers_and_scalars(trip):
    obj = {
        "a": [1, 2.5, True, None, "s", (), [], {}, (1, (2,))],
        "od": collections.OrderedDict(y=1, x=2),
        "nt": Point(x=Point(1, 2), y=[3]),
        "set": {1, 2},
        "inf": [math.inf, -math.inf, 10**30, -0.0],
        "uni-é": "ü✓\ud800",
        "bytes": b"\0abc",
        "bytearray": bytearray(b"x"),
        "empty bytes": b"",
        "complex": 1 - 2j,
        "size": torch.Size([2, 3]),
        "dtype": torch.float8_e4m3fn,
        "device": torch.device("cuda", 1),
        "date": [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.date(2026, 1, 2)],
        "delta": datetime.timedelta(1, 2, 3),
    }
    out = trip(obj)
    assert out == obj
    assert list(out) == list(obj)
    assert type(out["od"]) is collections.OrderedDict and list(out["od"]) == ["y", "x"]
    assert type(out["nt"]).__name__ == "Point" and out["nt"].y == [3]
    assert type(out["a"][2]) is bool and type(out["size"]) is torch.Size


def test_nan_and_the_sign_of_zero_survive(trip):
    nan, zero = trip([math.nan, -0.0])
    assert math.isnan(nan) and math.copysign(1, zero) == -1


def test_a_bare_leaf_at_the_top(trip):
    assert trip(3) == 3
    assert trip(None) is None
    assert torch.equal(trip(torch.arange(3)), torch.arange(3))


def test_numpy(trip):
    obj = {
        "f": np.arange(6.0).reshape(2, 3).T,
        "i8": np.arange(3, dtype=np.int8),
        "c": np.array([1 + 2j]),
        "b": np.array([True, False]),
        "0d": np.array(2.5),
        "empty": np.zeros((0, 2), np.int32),
        "big endian": np.arange(3, dtype=">f4"),
        "text": np.array(["a", "bcd"]),
        "text bytes": np.array([b"a", b"bcd"]),
        "when": np.array(["2026-01-01"], "datetime64[D]"),
        "empty text": np.array([], "U3"),
    }
    out = trip(obj)
    for key, array in obj.items():
        assert out[key].dtype == array.dtype and out[key].shape == array.shape, key
        assert np.array_equal(out[key], array), key
        assert out[key].flags.writeable
    for scalar in (
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.str_("é"),
        np.datetime64("2026-01-01"),
        np.float64(2),
    ):
        out = trip([scalar])[0]
        assert type(out) is type(scalar) and out == scalar


NASTY = [
    {"a.b": 1, "a": {"b": 2}},
    {1: "int", "1": "str", 1.5: "f", None: "none"} | {"None": 3},
    {(1, "a"): 1, (1, ("b", 2)): 2, b"k": 3, 2j: 4, torch.float32: 5, np.int64(7): 6, datetime.date(2026, 1, 1): 7},
    {"": 0, ".": 1, "..": 2, "/": 3, "a/": 4, "nul\0": 5, "sur\ud800": 6, " ": 7, "#1": 8},
    {"x.__metadata__": 1, "__spec__": 2, "__SUCCESS__": 3, "__version__": 4, "__cstorch_storage__0": 5},
    {"a": 0, "a/b": 1, "/a": 2, "a//b": 3, "./a": 4},
    {"fs": frozenset([1, 2])},
    {True: 0, "True": 1},
]


@pytest.mark.parametrize("obj", NASTY, ids=lambda obj: repr(obj)[:30])
def test_keys_that_collide_or_that_hdf5_would_change(trip, obj):
    assert trip(obj) == obj
    as_tensors = {key: torch.tensor(index) for index, key in enumerate(obj)}
    out = trip(as_tensors)
    assert list(out) == list(obj)
    assert [type(key) for key in out] == [type(key) for key in obj]
    assert [int(value) for value in out.values()] == list(range(len(obj)))


def test_what_version_05_holds_is_written_without_the_extension(tmp_path):
    obj = {"a.b": torch.ones(2), "c/d": [1, "s", None, np.arange(3)], 1: {True: 2.0}, "s": {1}}
    storage.save(obj, tmp_path / "a.mdl")
    assert extension_of(tmp_path / "a.mdl") is None
    storage.save({"a": torch.ones(1, dtype=torch.int8)}, tmp_path / "b.mdl")
    assert extension_of(tmp_path / "b.mdl") == 1


def test_datasets_are_contiguous_and_carry_the_original_attributes(tmp_path):
    storage.save({"w": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "a.mdl")
    with h5py.File(tmp_path / "a.mdl") as file:
        dataset = file["w"]
        assert dataset.chunks is None and dataset.dtype == np.int16
        assert dataset.attrs["rtfx_dtypes"].tolist() == [15] and dataset.attrs["shapes"].tolist() == [[2, 3]]
        assert list(dataset.attrs["dtypes"]) == ["torch.bfloat16"]
        assert file.attrs["__version__"] == 0.5 and file.attrs["__SUCCESS__"]


class Color(enum.IntEnum):
    RED = 1


class Unknown:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Unknown(),
        Unknown,
        lambda: 0,
        Color.RED,
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        torch.nn.UninitializedParameter(),
        np.array([object()]),
        np.zeros(2, [("a", "f4")]),
        np.ma.array([1]),
        collections.defaultdict(list),
        collections.deque(),
        {Unknown(): 1},
        10**5000,
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_named_by_path_and_nothing_is_written(tmp_path, value):
    with pytest.raises((TypeError, ValueError), match=r"obj\['a'\]\[1\]"):
        storage.save({"a": [torch.ones(3), value]}, tmp_path / "a.mdl")
    assert not list(tmp_path.iterdir())


def test_an_object_that_contains_itself(tmp_path):
    obj = {"a": []}
    obj["a"].append(obj)
    with pytest.raises(ValueError, match=r"obj\['a'\]\[0\] contains itself"):
        storage.save(obj, tmp_path / "a.mdl")
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="levels deep"):
        storage.save(deep, tmp_path / "a.mdl")


def test_str_subclasses_such_as_the_torch_version(trip):
    out = trip({"v": torch.__version__})["v"]
    assert out == str(torch.__version__) and type(out) is str


def test_tied_weights_are_stored_once_and_tied_again(tmp_path):
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(500, 100), "head": torch.nn.Linear(100, 500, bias=False)})
    model["head"].weight = model["emb"].weight
    storage.save(model.state_dict(), tmp_path / "a.mdl")
    assert (tmp_path / "a.mdl").stat().st_size < 230_000
    assert extension_of(tmp_path / "a.mdl") is None
    for where in ("cpu", None):
        state = storage.load(tmp_path / "a.mdl", where)
        assert state["emb.weight"] is state["head.weight"]
        expected = model["emb"].weight.detach().clone()
        with torch.no_grad():
            model["emb"].weight.zero_()
        model.load_state_dict(state)
        assert model["head"].weight is model["emb"].weight and torch.equal(model["head"].weight, expected)


def test_views_of_one_storage_are_stored_once_and_shared_again(tmp_path):
    flat = torch.arange(20_000.0)
    obj = {"whole": flat, "part": flat[5:10], "matrix": flat.view(100, 200).t(), "bits": flat.view(torch.int32)}
    storage.save(obj, tmp_path / "a.mdl")
    assert (tmp_path / "a.mdl").stat().st_size < 100_000
    for where in ("cpu", None, "cache"):
        out = storage.load(tmp_path / "a.mdl", where)
        assert all(torch.equal(out[key], obj[key]) for key in obj)
        out["whole"].fill_(7)
        assert out["part"].tolist() == [7] * 5
        out["part"].zero_()
        assert float(out["whole"][5]) == 0 and float(out["matrix"][5, 0]) == 0


def test_overlapping_views_without_a_covering_tensor(tmp_path):
    flat = torch.arange(30_000, dtype=torch.bfloat16)
    obj = {"a": flat[1:20_000], "b": flat[10_000:29_999]}
    storage.save(obj, tmp_path / "a.mdl")
    assert (tmp_path / "a.mdl").stat().st_size < 80_000
    for where in ("cpu", None):
        out = storage.load(tmp_path / "a.mdl", where)
        assert all(torch.equal(out[key], obj[key]) for key in obj)
        out["a"].zero_()
        assert float(out["b"][0]) == 0


def test_columns_of_a_large_matrix_do_not_store_the_matrix(tmp_path):
    matrix = torch.arange(1_000_000.0).view(1000, 1000)
    storage.save([matrix[:, 0], matrix[:, 1]], tmp_path / "a.mdl")
    assert (tmp_path / "a.mdl").stat().st_size < 50_000
    out = storage.load(tmp_path / "a.mdl")
    assert torch.equal(out[1], matrix[:, 1])


def test_optimizer_state_round_trip(trip):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = trip({"optimizer": optimizer.state_dict(), "model": model.state_dict()})
    other = torch.optim.AdamW(model.parameters(), lr=9)
    other.load_state_dict(state["optimizer"])
    for a, b in zip(other.state.values(), optimizer.state.values()):
        assert torch.equal(a["exp_avg"], b["exp_avg"]) and torch.equal(a["step"], b["step"])
    assert other.param_groups[0]["lr"] == 1e-3


def test_a_resolver_gives_the_values_just_before_they_are_written(tmp_path):
    stand_in = torch.empty(2, 3, device="meta")
    tied, constant = torch.empty(4, device="meta"), torch.empty(5, device="meta")
    calls = []

    def resolve(tensor):
        if not tensor.is_meta:
            return None
        calls.append(tuple(tensor.shape))
        if tensor is constant:
            return storage.DeferredFill(tensor.shape, tensor.dtype, 0.5)
        return torch.full(tensor.shape, float(len(calls)))

    def identity(tensor):
        return "tied" if tensor.is_meta and tensor.shape == (4,) else None

    undo = storage.register_tensor_resolver(resolve, identity)
    try:
        obj = {"a": stand_in, "b": tied, "c": tied.detach(), "d": constant, "e": torch.ones(1)}
        storage.save(obj, tmp_path / "a.mdl")
    finally:
        undo()
    out = storage.load(tmp_path / "a.mdl")
    assert calls == [(2, 3), (4,), (5,)]
    assert out["b"] is out["c"] and float(out["a"][0, 0]) == 1.0
    assert isinstance(out["d"], storage.DeferredFullTensor) and out["d"].fill_value == 0.5
