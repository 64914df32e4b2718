"""A deferred tensor is a tensor; it holds no memory before its values are used, and never returns another file's."""

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from cerebras.appliance.storage import H5Reader
from cerebras.pytorch import storage


@pytest.fixture
def values():
    return torch.arange(20.0).reshape(4, 5)


@pytest.fixture
def path(tmp_path, values):
    storage.save({"t": values, "n": torch.tensor(2.5)}, tmp_path / "a.mdl")
    return tmp_path / "a.mdl"


@pytest.fixture
def reads(monkeypatch):
    """The number of bytes of each read from a file."""
    counts = []
    original = H5Reader.read_into

    def read_into(self, key, out, rows=None):
        counts.append(out.nbytes)
        return original(self, key, out, rows)

    monkeypatch.setattr(H5Reader, "read_into", read_into)
    return counts


def test_loading_reads_no_tensor_and_metadata_need_none(path, reads):
    lazy = storage.load(path)["t"]
    assert isinstance(lazy, torch.Tensor) and type(lazy) is storage.DeferredFileTensor
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.numel(), len(lazy)) == (
        (4, 5),
        torch.float32,
        torch.device("cpu"),
        20,
        4,
    )
    assert "a.mdl" in repr(lazy) and "shape=(4, 5)" in str(lazy)
    assert torch.zeros_like(lazy).shape == (4, 5)
    assert reads == []


def test_none_reads_each_time_and_cache_once(path, reads, values):
    for mode, expected in ((None, [80, 80]), ("cache", [80])):
        reads.clear()
        lazy = storage.load(path, mode)["t"]
        assert torch.equal(lazy + 1, values + 1) and torch.equal(lazy * 2, values * 2)
        assert reads == expected
    reads.clear()
    with storage.serializers.cache_deferred_tensors(True):
        lazy = storage.load(path)["t"]
    assert lazy.sum() == lazy.sum() and reads == [80]


def test_slicing_reads_only_the_rows(path, reads, values):
    lazy = storage.load(path)["t"]
    for index in (np.s_[1:3], np.s_[2], np.s_[-1], np.s_[1:3, 2], np.s_[::2], np.s_[3:1], np.s_[-2:], np.s_[1, 2:]):
        assert torch.equal(lazy[index], values[index]), index
    assert max(reads) <= 80 and reads[:4] == [40, 20, 20, 40]
    for index in (np.s_[..., 1], np.s_[:, 1:3], [0, 2], None, torch.tensor([True, False, True, False])):
        assert torch.equal(lazy[index], values[index]), index
    with pytest.raises(IndexError):
        lazy[4]


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t @ t.t(),
        lambda t: torch.nn.functional.linear(torch.ones(2, 5), t),
        lambda t: torch.stack([t, t]),
        lambda t: t.to(torch.float64),
        lambda t: t.clone(),
        lambda t: t.view(-1).contiguous(),
        lambda t: torch.stack(list(t)),
        lambda t: torch.tensor(t.tolist()),
        lambda t: torch.from_numpy(t.numpy()),
        lambda t: torch.from_numpy(np.asarray(t)),
        lambda t: torch.tensor(t[0, 3].item()),
        lambda t: torch.from_dlpack(t),
        lambda t: copy.copy(t) + 0,
        lambda t: copy.deepcopy(t) + 0,
        lambda t: pickle.loads(pickle.dumps(t)),
        lambda t: torch.nn.Parameter(t).detach() + 0,
        lambda t: torch.zeros(4, 5).copy_(t),
    ],
)
def test_operations_equal_those_on_a_plain_tensor(path, values, operation):
    assert torch.equal(operation(storage.load(path)["t"]), operation(values))


def test_format_and_conversion_of_a_scalar(path):
    scalar = storage.load(path)["n"]
    assert f"{scalar:.2f}" == "2.50" and float(scalar) == 2.5 and bool(scalar > 2)


def test_a_write_is_never_lost(path, values):
    lazy = storage.load(path)["t"]
    alias = lazy.detach()
    assert lazy.add_(1) is lazy
    assert torch.equal(lazy, values + 1) and torch.equal(alias, values + 1)
    lazy[0] = 7
    assert torch.equal(lazy[0], torch.full((5,), 7.0))
    out = storage.load(path)["t"]
    torch.mul(values, 2, out=out)
    assert torch.equal(out, values * 2)
    with pytest.raises(NotImplementedError, match="Instead"):
        storage.load(path)["t"].t_()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_steps_a_deferred_parameter_like_a_plain_one(path, values, optimizer):
    got = []
    for data in (storage.load(path)["t"], values.clone()):
        parameter = torch.nn.Parameter(data)
        run = optimizer([parameter], lr=0.1)
        for _ in range(3):
            run.zero_grad()
            parameter.pow(2).sum().backward()
            run.step()
        got.append(parameter.detach() + 0)
    assert torch.equal(*got)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(tmp_path, assign):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    storage.save(model.state_dict(), tmp_path / "m.mdl")
    other.load_state_dict(storage.load(tmp_path / "m.mdl"), assign=assign)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), other(x))
    other(x).sum().backward()
    assert other.weight.grad is not None


def test_pickled_it_holds_the_values_and_needs_no_file(path, values, tmp_path):
    data = pickle.dumps(storage.load(path)["t"])
    torch.save(storage.load(path), tmp_path / "a.pt")
    path.unlink()
    script = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read()).sum().item())"
    out = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
    assert float(out.stdout) == values.sum()
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["t"], values)


def test_materialize_gives_a_plain_tensor(path, values):
    out = storage.load(path)["t"]._materialize()
    assert type(out) is torch.Tensor and torch.equal(out, values)


def test_a_replaced_file_is_noticed(path):
    lazy = storage.load(path)["t"]
    storage.save({"t": torch.zeros(4, 5)}, path.with_name("b.mdl"))
    os.replace(path.with_name("b.mdl"), path)
    with pytest.raises(RuntimeError, match="replaced.*load it again"):
        lazy.clone()
    with pytest.raises(RuntimeError, match="replaced"):
        lazy[1:2]


def test_a_changed_file_is_noticed(path):
    lazy = storage.load(path)["t"]
    with open(path, "r+b") as file:
        file.write(b"x")
    with pytest.raises(RuntimeError, match="changed.*load it again"):
        lazy + 1


def test_a_deleted_file_can_still_be_read(path, values):
    lazy = storage.load(path)["t"]
    path.unlink()
    assert torch.equal(lazy, values)


def test_a_saved_lazy_tensor_is_copied_to_the_new_file(path, values):
    storage.save(storage.load(path), path.with_name("b.mdl"))
    path.unlink()
    assert torch.equal(storage.load(path.with_name("b.mdl"))["t"], values)


def test_map_location(path, values):
    assert type(storage.load(path, "cpu")["t"]) is torch.Tensor
    assert storage.load(path, torch.device("meta"))["t"].is_meta
    assert storage.load(path, {"cpu": "meta"})["t"].is_meta
    assert torch.equal(storage.load(path, {"cuda:0": "cpu"})["t"], values)
    seen = []
    out = storage.load(path, lambda stored, location: seen.append(location))
    assert seen == ["cpu", "cpu"] and torch.equal(out["t"], values)
    with pytest.raises(TypeError, match="map_location"):
        storage.load(path, 1.5)


def test_a_constant_holds_no_memory_and_stays_one_through_the_file(tmp_path):
    huge = storage.DeferredFullTensor((1 << 20, 1 << 20), torch.bfloat16, 0.5)
    assert huge.shape == (1 << 20, 1 << 20)
    small = storage.DeferredFullTensor((3,), torch.int64, 7)
    touched = storage.DeferredFullTensor((2,), torch.float32, 1.0)
    touched.mul_(3)
    again = copy.deepcopy(huge)
    storage.save(
        {"huge": huge, "again": again, "small": small, "touched": touched, "tied": [small]}, tmp_path / "a.mdl"
    )
    assert (tmp_path / "a.mdl").stat().st_size < 20_000
    out = storage.load(tmp_path / "a.mdl")
    assert isinstance(out["huge"], storage.DeferredFullTensor) and out["huge"].fill_value == 0.5
    assert out["huge"].is_deferred and out["small"].tolist() == [7, 7, 7] and out["tied"][0] is out["small"]
    assert out["touched"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.bfloat16),
        (1 + 2j, torch.complex64),
        (True, torch.bool),
        (-3, torch.int8),
        (0.5, torch.float8_e4m3fn),
    ],
)
def test_fills_of_every_kind(tmp_path, value, dtype):
    storage.save([storage.DeferredFullTensor((2,), dtype, value)], tmp_path / "a.mdl")
    for where in (None, "cpu"):
        out = storage.load(tmp_path / "a.mdl", where)[0]
        assert out.dtype == dtype
        assert np.array_equal(out.tolist(), [value, value], equal_nan=True)
        assert isinstance(out, storage.DeferredFullTensor) == (where is None)


def test_creation_functions():
    plain = storage.full((2, 3), 1.5)
    assert type(plain) is torch.Tensor and torch.equal(plain, torch.full((2, 3), 1.5))
    storage.set_lazy_creation(lambda: True)
    try:
        like = torch.ones(2, dtype=torch.bfloat16)
        made = [
            (storage.full(3, 7), torch.full((3,), 7)),
            (storage.full(torch.Size([2]), 1, dtype=torch.int8), torch.ones(2, dtype=torch.int8)),
            (storage.ones((2, 2)), torch.ones(2, 2)),
            (storage.zeros([2], dtype=torch.bool), torch.zeros(2, dtype=torch.bool)),
            (storage.full_like(like, 2), torch.full_like(like, 2)),
            (storage.ones_like(like), torch.ones_like(like)),
            (storage.zeros_like(like, dtype=torch.float64), torch.zeros_like(like, dtype=torch.float64)),
        ]
        for lazy, eager in made:
            assert isinstance(lazy, storage.DeferredFullTensor) and lazy.dtype == eager.dtype
            assert torch.equal(lazy, eager)
        for shape in (-1, (2, -3)):
            with pytest.raises(ValueError, match="negative"):
                storage.zeros(shape)
        for value, dtype in ((1.5, torch.int32), (300, torch.uint8), (1j, torch.float32)):
            with pytest.raises(ValueError, match="does not fit"):
                storage.full((2,), value, dtype)
        with pytest.raises(TypeError, match="number"):
            storage.full((2,), "x")
    finally:
        storage.set_lazy_creation(None)


def test_a_factory_makes_what_it_wants_to():
    asked = []

    def factory(shape, value, dtype, device):
        asked.append((tuple(shape), value, dtype, device))
        return storage.DeferredFullTensor(shape, dtype, value) if value else None

    storage.set_full_factory(factory)
    try:
        assert isinstance(storage.ones((2,)), storage.DeferredFullTensor)
        assert type(storage.zeros_like(torch.ones(3, dtype=torch.int8))) is torch.Tensor
    finally:
        storage.set_full_factory(None)
    assert type(storage.ones(2)) is torch.Tensor
    assert asked == [((2,), 1, torch.float32, None), ((3,), 0, torch.int8, torch.device("cpu"))]


def test_loading_one_tensor_of_a_large_file_reads_its_bytes_and_the_metadata_only(tmp_path):
    """Measured by the system: /proc/self/io counts the bytes of all reads of a process."""
    state = {f"w{index}": torch.full((250_000,), float(index)) for index in range(50)}
    storage.save(state, tmp_path / "big.mdl")
    script = """
import sys
from cerebras.pytorch import storage
storage.load(sys.argv[2])["w"].clone()  # imports
def read():
    return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])
before = read()
lazy = storage.load(sys.argv[1])
opened = read()
assert float(lazy["w7"][3]) == 7
row = read()
assert lazy["w9"].sum() == 9 * 250_000
print(opened - before, row - opened, read() - row)
"""
    storage.save({"w": torch.ones(1)}, tmp_path / "small.mdl")
    command = [sys.executable, "-c", script, str(tmp_path / "big.mdl"), str(tmp_path / "small.mdl")]
    opening, row, tensor = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert opening < 300_000 and row < 20_000 and 1_000_000 <= tensor < 1_020_000


def test_mapped_tensors_are_private_and_checked(tmp_path):
    state = {
        "f": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "m": torch.tensor([True, False]),
        "s": torch.tensor(3.0),
        "e": torch.zeros(0),
    }
    storage.save(state, tmp_path / "a.mdl")
    whole = (tmp_path / "a.mdl").read_bytes()
    out = storage.load(tmp_path / "a.mdl", "cpu", mmap=True)
    assert all(type(out[key]) is torch.Tensor and torch.equal(out[key], state[key]) for key in state)
    assert out["b"].dtype == torch.bfloat16 and out["m"].dtype == torch.bool
    out["f"].zero_()
    assert (tmp_path / "a.mdl").read_bytes() == whole
    at = whole.index(state["f"].numpy().tobytes())
    (tmp_path / "b.mdl").write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    with pytest.raises(RuntimeError, match="'f' are damaged"):
        storage.load(tmp_path / "b.mdl", "cpu", mmap=True)
