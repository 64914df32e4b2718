"""Step closures: functions of the user's that run at the end of a step, with values.

Notes:
1. Closures run in the order in which they were called. Those called inside a traced step are part of the captured step:
   they are queued again at every iteration, at the place of the traced call.
2. Arguments may be nested in lists, tuples, dicts, NamedTuples and dataclasses; tensors in them arrive detached and on
   the CPU. A closure's exception is raised with its own traceback.
3. Without an executor a closure runs at once.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import tensor as tensor_module
from .tensor import CsxTensor

FETCHED = "the captured step"


@dataclass(frozen=True)
class Output:
    """Stands for the i-th fetched tensor of a captured step in the arguments of its closures."""

    index: int


@dataclass(frozen=True)
class Number:
    """Stands for the i-th lifted number."""

    index: int
    integer: bool


def map_leaves(fn: Callable, value):
    """Applies `fn` to the leaves of nested lists, tuples, dicts, NamedTuples and dataclasses."""
    if isinstance(value, (Output, Number)):
        return fn(value)
    if isinstance(value, tuple):
        mapped = [map_leaves(fn, v) for v in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, list):
        return type(value)(map_leaves(fn, v) for v in value)
    if isinstance(value, dict):
        mapped = {k: map_leaves(fn, v) for k, v in value.items()}
        if type(value) is dict:
            return mapped
        copied = value.copy()
        copied.update(mapped)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_leaves(fn, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return (
            dataclasses.replace(value, **fields) if any(fields[k] is not getattr(value, k) for k in fields) else value
        )
    return fn(value)


def fetch(value):
    """A closure's view of one leaf."""
    if isinstance(value, CsxTensor):
        cell = value._cell
        real = tensor_module.resolve(cell).detach()
        # what the step returned is the closure's own; state goes on being written
        return real.cpu() if cell.op == FETCHED else real.to("cpu", copy=True)
    if isinstance(value, torch.Tensor):
        return value.detach() if value.device.type == "cpu" else value.detach().cpu()
    return value


class ClosureQueue:
    """Closures waiting for the end of the step."""

    def __init__(self):
        self._waiting: list[tuple[Callable, tuple, dict]] = []
        self.running = False

    def add(self, fn: Callable, args: tuple, kwargs: dict) -> None:
        self._waiting.append((fn, args, kwargs))

    def flush(self) -> None:
        """Runs everything that waits. After an exception the rest of the step's closures are dropped."""
        if not self._waiting:
            return
        self.running = True
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                for fn, args, kwargs in waiting:
                    call(fn, args, kwargs)
        finally:
            self.running = False

    def clear(self) -> None:
        self._waiting.clear()


def call(fn: Callable, args: tuple, kwargs: dict):
    """Runs a closure with fetched arguments."""
    args = tuple(map_leaves(fetch, a) if not _plain(a) else fetch(a) for a in args)
    kwargs = {k: map_leaves(fetch, v) if not _plain(v) else fetch(v) for k, v in kwargs.items()}
    return fn(*args, **kwargs)


def _plain(value) -> bool:
    return isinstance(value, (torch.Tensor, int, float, str, type(None)))


# Closures called while a step's body is recorded; set by core.step.
recorded: list | None = None


def _dispatch(fn: Callable, args: tuple, kwargs: dict, checkpoint: bool):
    from ..backend import current_backend_impl

    backend = current_backend_impl(raise_exception=False)
    executor = backend.executor if backend is not None else None
    if tensor_module.active_recorder is not None and recorded is not None:
        recorded.append((fn, args, kwargs, checkpoint))
        return None
    if executor is None or not executor.in_step:
        return call(fn, args, kwargs)
    if not checkpoint or executor.on_checkpoint_step:
        if executor.runs_closures:
            executor.closures.add(fn, args, kwargs)
    return None


def step_closure(closure: Callable) -> Callable:
    """Makes calls of `closure` run at the end of the step, with the values of their tensor arguments.

    Works on functions and methods. Returns None when the call is queued; outside an executor the closure runs at once
    and its result is returned. API reference: cerebras.pytorch.step_closure.
    """

    @functools.wraps(closure)
    def wrapper(*args, **kwargs):
        return _dispatch(closure, args, kwargs, checkpoint=False)

    return wrapper


def checkpoint_closure(closure: Callable) -> Callable:
    """Like `step_closure`, but the closure runs only on checkpoint steps of the executor (`checkpoint_steps`).

    Outside an executor it runs at once. API reference: cerebras.pytorch.checkpoint_closure.
    """

    @functools.wraps(closure)
    def wrapper(*args, **kwargs):
        return _dispatch(closure, args, kwargs, checkpoint=True)

    return wrapper
