"""Writing a checkpoint while training goes on.

1. The caller waits for a copy of the state in memory only; a thread writes the copy. The memory of the copy is kept for
   the next save, so that memory is fresh once.
2. One save at a time: the next `save`, and a `load`, wait for the last.
3. A failure is raised by whatever comes first: `check_saves` (each step of an executor), `wait_for_saves`, the next `save`.
   If nothing comes, the process prints it at its end and exits with status 1.
"""

import atexit
import copy
import os
import sys
import threading
from collections.abc import Callable

import numpy as np
import torch

from .deferred import DeferredFill, DeferredTensor
from .memory import in_threads
from .resolve import resolve_tensor


class _Saver:
    """The thread of the save under way, and the failure that nobody has heard of yet."""

    def __init__(self):
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.path: str | None = None
        self.pool: dict[tuple, list[torch.Tensor]] = {}

    def start(self, path: str, write: Callable[[], None], lent: list[torch.Tensor]) -> None:
        def run():
            try:
                write()
            except BaseException as error:
                error.add_note(f"while writing {path} in the background")
                self.failure = error
            finally:
                for tensor in lent:
                    self.pool.setdefault((tensor.shape, tensor.dtype), []).append(tensor)

        self.path = path
        self.thread = threading.Thread(target=run, name="cstorch-save")
        self.thread.start()

    def take(self, shape, dtype: torch.dtype) -> torch.Tensor:
        free = self.pool.get((shape, dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype, device="cpu")

    def join(self) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
            self.thread = None

    def raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


_saver = _Saver()


def _forget() -> None:
    global _saver
    _saver = _Saver()  # a forked process has neither the thread nor its failures


os.register_at_fork(after_in_child=_forget)


def check_saves() -> None:
    """Raises the failure of a background save that has ended; does not wait for one that goes on."""
    if _saver.failure is not None:
        _saver.join()
        _saver.raise_failure()


def wait_for_saves() -> None:
    """Waits for the background save under way, raises its failure, and gives back the memory kept for the next one."""
    _saver.join()
    _saver.pool.clear()
    _saver.raise_failure()


def wait_before_next() -> None:
    """What a save does first: the last one has ended well, or its failure is raised."""
    _saver.join()
    _saver.raise_failure()


def wait_before_reading(path: str) -> None:
    """A file that is being written can be loaded after that; a failure stays for others to hear."""
    if _saver.path == os.path.abspath(path):
        _saver.join()


def snapshot(planned) -> list[torch.Tensor]:
    """Replaces all data in a plan by copies; returns the memory they are in.

    What is constant or still in a file is not copied.
    """
    lent: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for leaf in planned.leaves:
        value = leaf.value
        if leaf.key in planned.links or leaf.key in planned.views:
            continue
        if isinstance(value, (np.ndarray, bytearray)):
            leaf.value = copy.deepcopy(value)
        elif isinstance(value, DeferredTensor) and value.is_deferred:
            leaf.value = copy.deepcopy(value)
        elif isinstance(value, torch.Tensor):
            tensor = resolve_tensor(value)
            leaf.value = tensor if isinstance(tensor, DeferredFill) else _copy(tensor, lent, copies)
    for key, tensor in planned.buffers.items():
        planned.buffers[key] = _copy(tensor, lent, copies)
    with torch.no_grad():
        nbytes = sum(target.nbytes for target, _ in copies)
        in_threads(lambda target, tensor: target.copy_(tensor), copies, nbytes, min(4, os.cpu_count() or 1))
    return lent


def _copy(tensor, lent, copies) -> torch.Tensor:
    target = _saver.take(tensor.shape, tensor.dtype)
    lent.append(target)
    copies.append((target, tensor.detach()))
    return target


def start(path: str, write: Callable[[], None], lent: list[torch.Tensor]) -> None:
    """Runs `write` in the background thread; `lent` is the memory of its snapshot."""
    _saver.start(path, write, lent)


def _at_exit() -> None:
    _saver.join()
    failure, _saver.failure = _saver.failure, None
    if failure is None:
        return
    sys.excepthook(type(failure), failure, failure.__traceback__)
    atexit.unregister(_at_exit)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(1)  # the only way to tell the caller from here that the checkpoint is missing


atexit.register(_at_exit)
