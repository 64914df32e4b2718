"""Nothing in a file is executed, and no crash, damage or second writer costs a checkpoint."""

import contextlib
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import torch

from cerebras.appliance.storage import StorageError
from cerebras.appliance.storage.checksum import Seal
from cerebras.pytorch import storage
from cerebras.pytorch.storage.tree import leaf_spec_json


class Payload:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@contextlib.contextmanager
def edited(path):
    """The open file, without the checksums that would give the change away: a forger would make new ones."""
    with h5py.File(path, "r+") as file:
        del file.attrs["__cstorch_checksums__"]
        yield file
    data = path.read_bytes()
    if data.endswith(Seal.MAGIC):
        path.write_bytes(data[:-1])


def plant(path, key, metadata, spec_keys=None, **attributes):
    with edited(path) as file:
        old = json.loads(json.loads(file.attrs["__spec__"])[1])
        keys = json.loads(old[1]["context"]) + [key]
        leaf = {"type": None, "context": None, "children_spec": []}
        old[1] = {"type": "builtins.dict", "context": json.dumps(keys), "children_spec": [leaf] * len(keys)}
        file.attrs["__spec__"] = json.dumps([None, json.dumps(old)])
        whole = {"__spec__": leaf_spec_json(key), "__objects__": [key], f"{key}.__metadata__": metadata}
        file.attrs[f"{key}.__metadata__"] = json.dumps(whole)
        if attributes:
            dataset = file.create_dataset(key, data=h5py.Empty("f"))
            for name, value in attributes.items():
                dataset.attrs[name] = value


def test_a_pickle_in_an_attribute_is_refused_and_does_not_run(tmp_path):
    storage.save({"t": torch.ones(2)}, tmp_path / "a.mdl")
    payload = np.frombuffer(pickle.dumps(Payload(tmp_path / "ran")), "V1")
    plant(tmp_path / "a.mdl", "evil", {"__TYPE__": "ObjectSerializer", "__BYTES__": True}, __BYTES__=payload)
    for where in (None, "cpu"):
        with pytest.raises(RuntimeError, match="'evil'.*allow_pickle"):
            storage.load(tmp_path / "a.mdl", where)
    assert not (tmp_path / "ran").exists()
    storage.load(tmp_path / "a.mdl", allow_pickle=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "metadata",
    [
        {"__TYPE__": "ObjectSerializer", "__NUMPY__": True},
        {"__TYPE__": "ObjectSerializer"},
        {"__TYPE__": "DeferredGraphTensor", "jit_graph": "graph(): return ()", "shape": [2], "dtype": "torch.float32"},
        {"__TYPE__": "os.system", "value": "true"},
        {"__TYPE__": "cstorch.eval", "value": "1"},
        {"__TYPE__": "cstorch.dtype", "value": "torch.load"},
        {"__TYPE__": "LinkedObject", "key": "evil"},
        {"__TYPE__": "LinkedObject", "key": "not there"},
    ],
)
def test_unknown_kinds_are_refused_by_name(tmp_path, metadata):
    storage.save({"t": torch.ones(2)}, tmp_path / "a.mdl")
    plant(tmp_path / "a.mdl", "evil", metadata)
    with pytest.raises(StorageError, match="evil|not there"):
        storage.load(tmp_path / "a.mdl")


def test_a_pickle_in_a_torch_file_is_refused_and_does_not_run(tmp_path):
    torch.save({"t": Payload(tmp_path / "ran")}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(RuntimeError, match="allow_pickle|safely"):
            storage.load(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    storage.load(tmp_path / "a.pt", allow_pickle=True)
    assert (tmp_path / "ran").exists()


def test_data_outside_the_file_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"\1" * 8)
    storage.save({"t": torch.ones(2)}, tmp_path / "other.mdl")
    for kind in ("external data", "external link", "soft link"):
        path = tmp_path / f"{kind}.mdl"
        storage.save({"t": torch.ones(2)}, path)
        with edited(path) as file:
            del file["t"]
            if kind == "external data":
                file.create_dataset("t", (2,), "f4", external=[(str(tmp_path / "secret"), 0, 8)])
            elif kind == "external link":
                file["t"] = h5py.ExternalLink(str(tmp_path / "other.mdl"), "t")
            else:
                file["t"] = h5py.SoftLink("/nowhere")
        with pytest.raises(StorageError, match="'t'"):
            storage.load(path, "cpu")


def test_a_file_that_lies_about_its_tensors_is_refused(tmp_path):
    for index, change in enumerate(
        [{"shapes": [[3]]}, {"dtypes": ["torch.int32"]}, {"dtypes": ["torch.no"]}, {"shapes": 1}]
    ):
        path = tmp_path / f"{index}.mdl"
        storage.save({"t": torch.ones(2)}, path)
        with edited(path) as file:
            metadata = json.loads(file.attrs["t.__metadata__"])
            metadata["t.__metadata__"] |= change
            file.attrs["t.__metadata__"] = json.dumps(metadata)
        with pytest.raises(StorageError, match="'t'"):
            storage.load(path, "cpu")
    base = torch.arange(10.0)
    for index, change in enumerate(
        [{"shape": [1000]}, {"offset": 36}, {"offset": -4}, {"strides": [-1]}, {"key": "v"}]
    ):
        path = tmp_path / f"view{index}.mdl"
        storage.save({"t": base, "v": base[2:5]}, path)
        with edited(path) as file:
            metadata = json.loads(file.attrs["v.__metadata__"])
            metadata["v.__metadata__"] |= change
            file.attrs["v.__metadata__"] = json.dumps(metadata)
        for where in ("cpu", None):
            with pytest.raises(StorageError):
                storage.load(path, where)["v"].clone()


def test_an_incomplete_file_is_refused(tmp_path):
    storage.save({"t": torch.ones(2)}, tmp_path / "a.mdl")
    with edited(tmp_path / "a.mdl") as file:
        del file.attrs["__SUCCESS__"]
    with pytest.raises(StorageError, match="not written to its end"):
        storage.load(tmp_path / "a.mdl")


def test_what_is_no_checkpoint_is_a_runtime_error(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "garbage").write_bytes(random.Random(0).randbytes(1000))
    (tmp_path / "text").write_text("hello")
    (tmp_path / "pk").write_bytes(b"PK\3\4" + b"x" * 50)
    (tmp_path / "st").write_bytes((20).to_bytes(8, "little") + b"{" + b"x" * 50)
    (tmp_path / "h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"x" * 50)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    for name in ("empty", "garbage", "text", "pk", "st", "h5", "other.h5", "missing", "."):
        with pytest.raises(RuntimeError, match=name if name != "." else "directory"):
            storage.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        storage.load(tmp_path / "missing")


def test_flipped_bytes_and_cut_files_give_data_or_the_documented_error(tmp_path):
    path = tmp_path / "a.mdl"
    obj = {"t": torch.ones(64), (1, 2): b"bytes", "v": [1, "s", np.arange(3)], "i8": torch.ones(3, dtype=torch.int8)}
    storage.save(obj, path)
    whole = path.read_bytes()
    rng = random.Random(1)
    for index in range(150):
        damaged = bytearray(whole)
        if index % 3 == 0:
            damaged = damaged[: rng.randrange(len(damaged))]
        else:
            for _ in range(rng.randrange(1, 8)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        broken = tmp_path / "broken.mdl"
        broken.write_bytes(damaged)
        try:
            storage.load(broken, "cpu")
        except StorageError:
            pass
        broken.unlink()


def test_an_existing_file_is_kept(tmp_path):
    storage.save([1], tmp_path / "a.mdl")
    with pytest.raises(FileExistsError, match="a.mdl"):
        storage.save([2], tmp_path / "a.mdl")
    assert storage.load(tmp_path / "a.mdl") == [1] and len(list(tmp_path.iterdir())) == 1


def test_a_second_writer_does_not_replace_the_first(tmp_path):
    raced = tmp_path / "a.mdl"

    def race(tensor):
        if not raced.exists():
            storage.register_tensor_resolver(lambda t: None)()
            other = subprocess.run(
                [sys.executable, "-c", f"from cerebras.pytorch import storage; storage.save([1], {str(raced)!r})"]
            )
            assert other.returncode == 0
        return None

    undo = storage.register_tensor_resolver(race)
    try:
        with pytest.raises(FileExistsError):
            storage.save([torch.ones(1)], raced)
    finally:
        undo()
    assert storage.load(raced) == [1] and len(list(tmp_path.iterdir())) == 1


def test_missing_directory_and_wrong_targets(tmp_path):
    with pytest.raises(FileNotFoundError, match="create it first.*no"):
        storage.save([1], tmp_path / "no" / "a.mdl")
    with pytest.raises(IsADirectoryError):
        storage.save([1], tmp_path)
    with pytest.raises(ValueError, match="safetensors"):
        storage.save([1], tmp_path / "a.safetensors")
    with pytest.raises(TypeError, match="local path"):
        storage.save([1], "s3://bucket/a.mdl")


def test_a_full_disk_leaves_nothing_and_keeps_the_old_file(tmp_path):
    storage.save([1], tmp_path / "old_1.mdl")
    script = f"""
import resource, torch
from cerebras.pytorch import storage
storage.set_max_checkpoints(1)
storage.adopt({str(tmp_path / "old_1.mdl")!r})
for size in (10_000_000, 30_000):  # in the data, and in the metadata
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 4 - 4000, -1))
    try:
        storage.save({{"t": torch.ones(size)}}, {str(tmp_path / "old_2.mdl")!r})
    except OSError as error:
        print(error.errno)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split()[0] == "27" and len(out.stdout.split()) == 2, out.stdout + out.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["old_1.mdl"]
    assert storage.load(tmp_path / "old_1.mdl") == [1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 20 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("numel", [10_000_000, 3_240_000])  # full in the data, and about where the metadata follow
def test_a_full_file_system_gives_a_clear_error_and_keeps_the_old_file(small_disk, numel, background):
    storage.save({"t": torch.ones(2_000_000)}, small_disk / "c_1.mdl")
    with pytest.raises(OSError) as caught:
        storage.save({"t": torch.ones(numel)}, small_disk / "c_2.mdl", background=background)
        storage.wait_for_saves()
    assert caught.value.errno == 28 or "space" in str(caught.value)
    assert [path.name for path in small_disk.iterdir()] == ["c_1.mdl"]
    assert storage.load(small_disk / "c_1.mdl", "cpu")["t"].sum() == 2_000_000
    storage.save({"t": torch.ones(1000)}, small_disk / "c_2.mdl")


def test_a_read_only_directory_is_a_clear_error(small_disk):
    storage.save([1], small_disk / "c_1.mdl")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(OSError, match="Read-only file system"):
        storage.save([2], small_disk / "c_2.mdl")
    assert storage.load(small_disk / "c_1.mdl") == [1]


def test_a_reader_that_is_reading_while_the_next_is_written_sees_its_own_file(tmp_path):
    storage.save({"t": torch.ones(100_000)}, tmp_path / "a.mdl")
    reader = storage.load(tmp_path / "a.mdl")

    def read(tensor):
        assert reader["t"].sum() == 100_000
        return None

    undo = storage.register_tensor_resolver(read)
    try:
        storage.save({"t": torch.zeros(100_000)}, tmp_path / "b.mdl")
    finally:
        undo()
    assert storage.load(tmp_path / "b.mdl")["t"].sum() == 0


def test_an_error_while_writing_removes_the_temporary_file(tmp_path):
    def fail(tensor):
        raise KeyError("no such weight")

    undo = storage.register_tensor_resolver(fail)
    try:
        with pytest.raises(KeyError):
            storage.save([torch.ones(1)], tmp_path / "a.mdl")
    finally:
        undo()
    assert not list(tmp_path.iterdir())


def _wait_for_temporary(directory):
    until = time.monotonic() + 30
    before = set(directory.glob("*.tmp"))
    while set(directory.glob("*.tmp")) <= before and time.monotonic() < until:
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("kills", "numel"), [(2, 1_250_000), pytest.param(30, 5_000_000, marks=pytest.mark.slow)], ids=["50 MB", "200 MB"]
)
def test_kill_9_while_saving(tmp_path, caplog, kills, numel):
    """The earlier checkpoint stays, no final name is partial, the remains are named and removed by the next save."""
    storage.save({"step": 0, "t": torch.arange(1000)}, tmp_path / "ckpt_0.mdl")
    script = """
import itertools, sys, torch
from cerebras.pytorch import storage
state = {f"w{i}": torch.full((int(sys.argv[3]),), float(i)) for i in range(10)}
print("ready", flush=True)
for step in itertools.count(int(sys.argv[2])):
    storage.save(state | {"step": step}, f"{sys.argv[1]}/ckpt_{step}.mdl")
    print(step, flush=True)
"""
    rng = random.Random(5)
    stale = 0
    for round in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(1000 * (round + 1)), str(numel)], stdout=subprocess.PIPE
        )
        assert child.stdout.readline() == b"ready\n"
        if round % 2:
            _wait_for_temporary(tmp_path)  # at least every second kill falls into a save
            assert child.poll() is None
        time.sleep(rng.uniform(0.01, 0.2))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        stale += len(list(tmp_path.glob("*.tmp")))
        for path in tmp_path.glob("ckpt_*.mdl"):
            loaded = storage.load(path)
            assert loaded["step"] == int(path.stem.split("_")[1])
            if loaded["step"]:
                assert all(torch.equal(loaded[f"w{i}"], torch.full((numel,), float(i))) for i in range(10))
                path.unlink()
    assert storage.load(tmp_path / "ckpt_0.mdl")["t"].sum() == 499500
    assert stale, "no kill fell into a save"
    left = [path.name for path in tmp_path.glob("*.tmp")]
    with caplog.at_level(logging.WARNING):
        storage.save([1], tmp_path / "next.mdl")
    assert not list(tmp_path.glob("*.tmp"))
    assert all(name in caplog.text for name in left)


def test_temporary_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "notes.0123abcd.tmp").write_text("not an HDF5 file")
    (tmp_path / "a.mdl.tmp").write_bytes(b"\x89HDF\r\n\x1a\n")
    seen = []

    def inner(tensor):
        if not seen:
            seen.extend(tmp_path.glob("a.mdl.*.tmp"))
            storage.save([2], tmp_path / "b.mdl")  # cleans, and must not take the file being written
        return None

    undo = storage.register_tensor_resolver(inner)
    try:
        storage.save([torch.ones(1)], tmp_path / "a.mdl")
    finally:
        undo()
    assert len(seen) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"notes.0123abcd.tmp", "a.mdl.tmp", "a.mdl", "b.mdl"}
    assert float(storage.load(tmp_path / "a.mdl")[0]) == 1


def test_a_reader_of_a_file_that_is_open_for_writing_does_not_hang_and_says_so(tmp_path):
    storage.save([1], tmp_path / "a.mdl")
    script = "import h5py, sys; f = h5py.File(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "a.mdl")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(StorageError, match="open for writing"):
            storage.load(tmp_path / "a.mdl")
    assert storage.load(tmp_path / "a.mdl") == [1]
    with h5py.File(tmp_path / "a.mdl", "r"):  # the same process, with other lock settings
        assert storage.load(tmp_path / "a.mdl") == [1]
