"""The data loader of the API: it takes the *function* that makes a loader."""

import inspect
import io
import itertools
import typing
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch

_ids = itertools.count()


@runtime_checkable
class RestartableDataLoader(Protocol):
    """The protocol of a loader whose position is saved in checkpoints and restored.

    API reference: cerebras.pytorch.utils.data.RestartableDataLoader.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of one worker at a checkpoint step."""

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restores what `deaggregate_state_dict` gave for this worker."""

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        """Combines the workers' states into the one that is saved."""

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """One worker's state out of the combined one."""


class DataLoader:
    """Wraps a function that returns a torch DataLoader or any iterable of batches.

    Args:
        input_fn: called with the other arguments, once for every pass over an iterable that can be read only once.
        *args, **kwargs: for `input_fn`.

    Attributes:
        id: unique within the process; a copy (`copy.copy`, which starts afresh) keeps it.

    Raises:
        TypeError: `input_fn` is not callable; later, it returns no iterable.
        API reference: cerebras.pytorch.utils.data.DataLoader.
    """

    def __init__(self, input_fn: Callable[..., "torch.utils.data.DataLoader | Iterable"], *args, **kwargs):
        if not callable(input_fn):
            raise TypeError(
                f"DataLoader takes the function that makes a loader, not {type(input_fn).__name__}: "
                "cstorch.utils.data.DataLoader(get_loader, *args)"
            )
        self.input_fn, self.args, self.kwargs = input_fn, args, kwargs
        self.id = next(_ids)
        self._loader = None
        self._restored: tuple[dict, bool] | None = None
        self._executor = None
        self._checkpointing = True

    def __copy__(self):
        copied = type(self)(self.input_fn, *self.args, **self.kwargs)
        copied.id, copied._checkpointing = self.id, self._checkpointing
        return copied

    def build(self):
        """Calls the input function."""
        loader = self.input_fn(*self.args, **self.kwargs)
        if not isinstance(loader, Iterable):
            name = getattr(self.input_fn, "__qualname__", repr(self.input_fn))
            raise TypeError(
                f"The input function {name} returned {type(loader).__name__}, which is no iterable.\n"
                "  Instead: return a torch.utils.data.DataLoader or an iterable of batches"
            )
        return loader

    @property
    def dataloader(self):
        """What the input function returned; it is called on first use."""
        if self._loader is None:
            self._loader = self.build()
        return self._loader

    def __len__(self) -> int:
        return len(self.dataloader)

    @property
    def is_restartable(self) -> bool:
        """True where the loader has the four methods of `RestartableDataLoader`."""
        return self._checkpointing and isinstance(self.dataloader, RestartableDataLoader)

    def disable_dataloader_checkpointing(self) -> None:
        """Release 2.0: treats the loader as one whose state is not saved, although it could be."""
        self._checkpointing = False

    def batches(self) -> typing.Iterator:
        """Batches without end: passes over the loader follow each other.

        Raises:
            RuntimeError: a pass yields nothing.
        """
        self._restore()
        name = getattr(self.input_fn, "__qualname__", repr(self.input_fn))
        loader = self.dataloader
        while True:
            empty = True
            iterator = iter(loader)
            for batch in iterator:
                empty = False
                yield batch
            if empty:
                raise RuntimeError(
                    f"The loader of {name} yields no batch.\n"
                    "  Instead: check its data set; with drop_last=True a batch size above the data set's size gives none"
                )
            if iterator is loader:  # a generator or another iterator: its next pass is a new one
                self._loader = loader = self.build()

    # the restart protocol, for one worker in this process
    def state_dict(self) -> dict[str, Any]:
        """The loader's state, at a checkpoint step of the executor that runs it.

        Raises:
            RuntimeError: the loader is not restartable, or this is no checkpoint step.
        """
        if not self.is_restartable:
            raise self._not_restartable()
        executor = self._executor
        if executor is None or not executor.on_checkpoint_step:
            raise RuntimeError(
                "A loader's state exists at checkpoint steps only.\n"
                "  Instead: call it in a @cstorch.checkpoint_closure, with checkpoint_steps given to the DataExecutor"
            )
        from ...distributed.worker_state import DataLoaderCheckpoint, worker_state_context

        step = executor.user_iteration
        state = DataLoaderCheckpoint(
            global_worker_id=0, local_worker_id=0, total_num_workers=1, num_workers_per_csx=1, num_csx=1, wse_id=0,
            appliance_step=step, worker_step=step, samples_streamed=step * (executor.batch_size or 0),
        )  # fmt: skip
        with worker_state_context(state):
            return self.dataloader.aggregate_state_dict([self.dataloader.state_dict()])

    def serialize_state_dict(self) -> bytes:
        """Release 2.0: `state_dict()` as bytes, which `torch.load(io.BytesIO(...))` reads."""
        buffer = io.BytesIO()
        torch.save(self.state_dict(), buffer)
        return buffer.getvalue()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restores a state before the first batch.

        Raises:
            RuntimeError: an executor is running this loader, or it is not restartable.
        """
        if self._executor is not None:
            raise RuntimeError("A loader's state can be restored only before its executor starts")
        if not self.is_restartable:
            raise self._not_restartable()
        self._restored = (state_dict, strict)

    def _not_restartable(self) -> RuntimeError:
        if not self._checkpointing:
            return RuntimeError("disable_dataloader_checkpointing() was called: this loader has no state")
        methods = ("state_dict", "load_state_dict", "aggregate_state_dict", "deaggregate_state_dict")
        missing = [m for m in methods if not callable(getattr(self.dataloader, m, None))]
        return RuntimeError(
            f"{type(self.dataloader).__name__} is not restartable: it lacks {', '.join(missing)}.\n"
            "  Instead: return a loader with the methods of cstorch.utils.data.RestartableDataLoader"
        )

    def _restore(self):
        if self._restored is None:
            return
        (state, strict), self._restored = self._restored, None
        loader = self.dataloader
        own = _call(loader.deaggregate_state_dict, state, strict)
        _call(loader.load_state_dict, own, strict)


def _call(method, state, strict):
    """Loaders may leave the `strict` argument out."""
    parameters = inspect.signature(method).parameters
    takes = "strict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return method(state, strict=strict) if takes else method(state)
