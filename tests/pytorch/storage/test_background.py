"""Background writing: the file holds the state at the call, and a failure is never silent."""

import subprocess
import sys
import threading

import pytest
import torch

from cerebras.pytorch import storage


@pytest.fixture(autouse=True)
def nothing_under_way():
    yield
    storage.wait_for_saves()


@pytest.fixture
def held():
    """Holds the writing thread at its first tensor until released."""
    release = threading.Event()

    def resolve(tensor):
        if threading.current_thread() is not threading.main_thread():
            release.wait(20)
        return None

    undo = storage.register_tensor_resolver(resolve)
    yield release
    release.set()
    undo()


def test_changes_after_the_call_are_not_in_the_file(tmp_path, held):
    weight, lazy = torch.ones(1000), storage.DeferredFullTensor((3,), torch.float32, 2.0)
    tied = torch.nn.Parameter(torch.arange(4.0))
    storage.save(
        {"w": weight, "part": weight[2:4], "lazy": lazy, "t": [tied, tied]}, tmp_path / "a.mdl", background=True
    )
    weight.zero_()
    lazy.add_(1)
    with torch.no_grad():
        tied.zero_()
    assert not (tmp_path / "a.mdl").exists()
    held.set()
    out = storage.load(tmp_path / "a.mdl", "cpu")
    assert out["w"].sum() == 1000 and out["part"].tolist() == [1, 1] and out["lazy"].tolist() == [2, 2, 2]
    assert out["t"][0] is out["t"][1] and out["t"][0].tolist() == [0, 1, 2, 3]


def test_loading_and_the_next_save_wait_for_the_file(tmp_path, held):
    storage.save({"w": torch.ones(10)}, tmp_path / "a.mdl", background=True)
    threading.Timer(0.1, held.set).start()
    assert storage.load(tmp_path / "a.mdl")["w"].sum() == 10
    for step in range(3):
        storage.save({"w": torch.full((10,), float(step))}, tmp_path / f"b_{step}.mdl", background=True)
    storage.wait_for_saves()
    assert [float(storage.load(tmp_path / f"b_{step}.mdl")["w"][0]) for step in range(3)] == [0, 1, 2]


def test_what_can_be_refused_at_once_is(tmp_path):
    with pytest.raises(TypeError, match="obj"):
        storage.save({"w": object()}, tmp_path / "a.mdl", background=True)
    with pytest.raises(FileNotFoundError):
        storage.save({"w": 1}, tmp_path / "no" / "a.mdl", background=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("heard_by", ["check", "wait", "save"])
def test_a_failure_is_raised_by_the_next_call(tmp_path, heard_by):
    def fail(tensor):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return None

    undo = storage.register_tensor_resolver(fail)
    try:
        storage.save({"w": torch.ones(10)}, tmp_path / "a.mdl", background=True)
        [thread.join() for thread in threading.enumerate() if thread.name == "cstorch-save"]
    finally:
        undo()
    with pytest.raises(OSError, match="No space") as caught:
        if heard_by == "save":
            storage.save([1], tmp_path / "b.mdl")
        else:
            {"check": storage.check_saves, "wait": storage.wait_for_saves}[heard_by]()
    assert "a.mdl in the background" in caught.value.__notes__[0]
    storage.check_saves()
    assert not list(tmp_path.iterdir())


def test_a_failure_that_nobody_heard_of_ends_the_process_with_an_error(tmp_path):
    script = f"""
import atexit, threading, torch
atexit.register(lambda: print("others ran", flush=True))
from cerebras.pytorch import storage
def fail(tensor):
    if threading.current_thread() is not threading.main_thread():
        raise OSError(28, "No space left on device")
storage.register_tensor_resolver(fail)
storage.save(dict(w=torch.ones(10)), {str(tmp_path / "a.mdl")!r}, background=True)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (
        out.returncode == 1 and "No space left" in out.stderr and "a.mdl" in out.stderr and "others ran" in out.stdout
    )
    fine = script.replace("raise OSError", "OSError")
    assert subprocess.run([sys.executable, "-c", fine]).returncode == 0
    assert storage.load(tmp_path / "a.mdl")["w"].sum() == 10
