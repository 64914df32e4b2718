"""The loop over batches: `for batch in DataExecutor(...)`."""

import json
import logging
import math
import os
import time
import warnings
from pathlib import Path
from typing import Literal

import torch

from ... import backends
from ...backend import current_backend_impl
from ...core.closures import ClosureQueue, fetch
from ...storage.background import check_saves, wait_for_saves
from ..profiler import Activity, Profiler
from .dataloader import DataLoader
from .utils import Schedule, infer_batch_size

logger = logging.getLogger("cerebras.pytorch")

MbsSetting = None | int | Literal["explore", "auto"] | dict[str, dict[str, int]]

_UNSET = object()


class DataExecutor:
    """One run over a loader: yields `num_steps` batches on the backend's device.

    The part of an iteration between two batches is a step: closures called in it run at its end.

    Args:
        dataloader: a `cstorch.utils.data.DataLoader`.
        num_steps: steps to run; default: the loader's length. A shorter loader is repeated. With `compile_only` or
            `validate_only` one step is enough and one is done.
        checkpoint_steps: None, an interval (checkpoints at its multiples and at `num_steps`), or a `Schedule` over
            0-based steps.
        activation_steps: interval at which step closures may fetch; they do at every step here, so a value above 1 is
            reduced to a divisor of `checkpoint_steps` and recorded.
        profiler_activities: more `Activity` classes to track, available as `profiler.<name>`.
        cs_config: DEPRECATED, pass cluster_config to the backend.
        writer: DEPRECATED but honoured: the SummaryWriter for summarize_scalar and summarize_tensor.
        micro_batch_size: DEPRECATED, set cstorch.backends.csx.performance.micro_batch_size.
        additional_activities: DEPRECATED, release 2.0's name of profiler_activities.

    After the loop `iteration` is `num_steps`; after a break it is that of the last step. Closures of a step that ends
    with `break` run as well; an exception that one of them raises there is logged, since it cannot reach the loop. The
    first NaN that a step closure gets is logged with its step.

    Raises:
        TypeError, ValueError: wrong types or numbers. RuntimeError: no backend, an empty loader.
        API reference: cerebras.pytorch.utils.data.DataExecutor.
    """

    def __init__(
        self,
        dataloader: DataLoader,
        num_steps: int | None = None,
        checkpoint_steps: int | Schedule | None = None,
        activation_steps: int | None = None,
        profiler_activities: list[type[Activity]] | None = None,
        cs_config=None,
        writer=None,
        micro_batch_size: MbsSetting = _UNSET,
        additional_activities: list[type[Activity]] | None = None,
    ):
        if not isinstance(dataloader, DataLoader):
            raise TypeError(
                f"DataExecutor takes a cstorch.utils.data.DataLoader, not {type(dataloader).__name__}.\n"
                "  Instead: cstorch.utils.data.DataLoader(function_that_makes_the_loader, *args)"
            )
        self.backend = current_backend_impl()
        self.dataloader = dataloader
        self.num_steps = self._num_steps(num_steps)
        self.checkpoint_steps = self._checkpoint_steps(checkpoint_steps)
        self.activation_steps = self._activation_steps(activation_steps)
        self.profiler_activities = profiler_activities
        self.writer = writer
        self._deprecated(cs_config, writer, micro_batch_size, additional_activities)
        self._profiler = Profiler(self.profiler_activities)
        self.closures = _Closures(self)
        self.runs_closures = self.backend.is_e2e_execution
        self._artifact_dir: Path | None = None
        self._iteration = 0
        self._running = False
        self.in_step = False
        self.finished = False
        self.batch_size: int | None = None
        self._setup_started = time.monotonic()

    # arguments
    def _num_steps(self, num_steps):
        if num_steps is not None and (isinstance(num_steps, bool) or not isinstance(num_steps, int)):
            raise TypeError(f"num_steps must be a positive int or None, not {num_steps!r}")
        if num_steps is not None and num_steps <= 0:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if not self.backend.is_e2e_execution:
            if num_steps is not None and num_steps > 1:
                logger.info("One step is done instead of %d: the backend only validates or compiles", num_steps)
            return 1
        if num_steps is None:
            loader = self.dataloader.dataloader
            try:
                num_steps = len(loader)
            except TypeError:
                raise ValueError(
                    "num_steps is needed: the input function's loader has no length.\n"
                    "  Instead: DataExecutor(dataloader, num_steps=...)"
                ) from None
            if num_steps == 0:
                raise RuntimeError("The loader is empty: its length is 0")
        return num_steps

    def _checkpoint_steps(self, steps):
        if steps is None or isinstance(steps, Schedule):
            return steps
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"checkpoint_steps must be an int, a Schedule or None, not {steps!r}")
        if steps < 0:
            raise ValueError(f"checkpoint_steps must not be negative, got {steps}")
        return steps or None

    def _activation_steps(self, steps):
        if steps is None:
            return 1
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"activation_steps must be a positive int or None, not {steps!r}")
        if steps <= 0:
            raise ValueError(f"activation_steps must be at least 1, got {steps}")
        if isinstance(self.checkpoint_steps, int):
            reduced = math.gcd(steps, self.checkpoint_steps)
            if reduced != steps:
                logger.warning("activation_steps is reduced from %d to %d, to meet checkpoint_steps", steps, reduced)
            return reduced
        return steps

    def _deprecated(self, cs_config, writer, micro_batch_size, additional_activities):
        if cs_config is not None:
            _deprecation("cs_config", "pass cluster_config to cstorch.backend")
            self.backend.use_cs_config(cs_config)
        if micro_batch_size is not _UNSET:
            _deprecation("micro_batch_size", "set cstorch.backends.csx.performance.micro_batch_size")
            backends.csx.performance.micro_batch_size = micro_batch_size
        if writer is not None:
            if not hasattr(writer, "add_scalar"):
                raise TypeError(f"writer must be a SummaryWriter, not {type(writer).__name__}")
            _deprecation("writer", "it still works; new code calls writer.add_scalar in a @cstorch.step_closure")
        if additional_activities is not None:
            _deprecation("additional_activities", "pass profiler_activities")
            self.profiler_activities = [*(self.profiler_activities or ()), *additional_activities]

    # state of the loop
    @property
    def iteration(self) -> int:
        """0-based index of the current step; `num_steps` when the loop has ended."""
        return self._iteration

    @property
    def user_iteration(self) -> int:
        """1-based index of the current step."""
        return self._iteration + 1

    @property
    def is_initial_step(self) -> bool:
        return self._iteration == 0

    @property
    def on_final_iteration(self) -> bool:
        return self._iteration >= self.num_steps - 1

    @property
    def on_checkpoint_step(self) -> bool:
        """True at the steps whose checkpoint closures run."""
        steps = self.checkpoint_steps
        if steps is None or not self.in_step:
            return False
        if isinstance(steps, int):
            return (self._iteration + 1) % steps == 0 or self.on_final_iteration
        return steps.match(self._iteration)

    @property
    def artifact_dir(self) -> Path:
        """`<backend artifact_dir>/executors/00000N`; made when the run starts."""
        return self._artifact_dir if self._artifact_dir is not None else self.backend.artifact_dir

    @property
    def profiler(self) -> Profiler:
        """Rates and times of the run, without the steps that captured or compiled; `profiler.rate_tracker`."""
        return self._profiler

    def __len__(self):
        return self.num_steps

    def _make_artifact_dir(self):
        root = self.backend.artifact_dir / "executors"
        root.mkdir(parents=True, exist_ok=True)
        number = self.backend.num_executors = self.backend.num_executors + 1
        while True:
            path = root / f"{number:06d}"
            try:
                path.mkdir()
                break
            except FileExistsError:
                number += 1
        self._artifact_dir = path
        latest = root / "latest"
        link = root / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name, target_is_directory=True)
        link.replace(latest)

    def __iter__(self):
        backend = self.backend
        if backend is not current_backend_impl():
            raise RuntimeError("The backend of this DataExecutor was replaced by another; make a new executor")
        outer = backend.executor
        if self._running or outer is not None and backend.is_csx:
            which = "This" if self._running else "Another"
            raise RuntimeError(f"{which} DataExecutor is running on this backend; end its loop first")
        self._make_artifact_dir()
        self._profiler = profiler = Profiler(self.profiler_activities)
        self._iteration, self.finished, self._running = 0, False, True
        closures, end_step, send, clock = self.closures, backend.end_step, backend.send_batch, time.perf_counter
        closures.watching = True
        self.dataloader._executor = self
        batches = self.dataloader.batches()
        size_of = _BatchSize(static=backend.is_csx)
        try:
            backend.begin_execution(self)
            programs = backend.num_programs
            for iteration in range(self.num_steps):
                batch = next(batches)
                started = clock()
                self.batch_size = size = size_of(batch, iteration)
                self._iteration = iteration
                self.in_step = True
                if iteration == 0:
                    self._write_track()
                try:
                    yield send(batch)
                except GeneratorExit:  # break: what the body queued belongs to a step that was done
                    try:
                        end_step(self)
                        closures.flush()
                    except Exception:
                        logger.exception("A closure failed at step %d, with which the loop was left", iteration + 1)
                    raise
                end_step(self)
                profiler.step(size)
                if backend.num_programs != programs:
                    programs = backend.num_programs
                    profiler.skip(clock() - started, size)
                closures.flush()
                check_saves()
                self.in_step = False
            self._iteration, self.finished = self.num_steps, True
            wait_for_saves()
        finally:
            self._running = self.in_step = False
            closures.clear()
            self.dataloader._executor = None
            batches.close()
            try:
                backend.end_execution(self)
            finally:
                backend.executor = outer
                profiler.save(self._artifact_dir / "performance.json")

    def _write_track(self):
        seconds = round(time.monotonic() - self._setup_started, 6)
        (self._artifact_dir / "track.json").write_text(json.dumps({"Initialization": [seconds, {}]}))


def _deprecation(name: str, instead: str) -> None:
    warnings.warn(f"DataExecutor({name}=...) is deprecated: {instead}", DeprecationWarning, stacklevel=4)


class _Closures(ClosureQueue):
    """The queue of an executor; says once where a closure gets a NaN, which most often is the loss."""

    def __init__(self, executor: "DataExecutor"):
        super().__init__()
        self.executor = executor
        self.watching = True

    def flush(self) -> None:
        if self.watching:
            for fn, args, kwargs in self._waiting:
                if _has_nan(args) or kwargs and _has_nan(kwargs.values()):
                    self.watching = False
                    name = getattr(fn, "__qualname__", repr(fn))
                    logger.warning("NaN at step %d, among the arguments of %s", self.executor.user_iteration, name)
                    break
        super().flush()


def _has_nan(values) -> bool:
    """True where a float scalar among the values, or in a dict, list or tuple of them, is NaN."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 and value.is_floating_point():
                number = fetch(value).item()
                if number != number:
                    return True
        elif isinstance(value, (list, tuple)):
            if _has_nan(value):
                return True
        elif isinstance(value, dict):
            if _has_nan(value.values()):
                return True
        elif isinstance(value, float) and value != value:
            return True
    return False


class _BatchSize:
    """The size of the first dimension, found once by search and then by path.

    The eager backends take batches of any size; they say once that CSX (`static`), where shapes are part of the graph,
    does not.
    """

    def __init__(self, static: bool):
        self.path: tuple | None = None
        self.first: int | None = None
        self.silent = static

    def __call__(self, batch, iteration: int) -> int | None:
        size = self._size(batch)
        if size != self.first and not self.silent:
            if self.first is not None:
                self.silent = True
                logger.warning(
                    "The batch of step %d has %s samples, the first one %d; the CSX backend needs batches of one size "
                    "(drop_last=True)",
                    iteration + 1, size, self.first,
                )  # fmt: skip
            self.first = self.first or size
        return size

    def _size(self, batch) -> int | None:
        if self.path is not None:
            value = batch
            try:
                for key in self.path:
                    value = value[key]
                return value.shape[0]
            except (KeyError, IndexError, TypeError, AttributeError):
                self.path = None
        self.path = self._find(batch, ())
        if self.path is None:
            return infer_batch_size(batch)
        return self._size(batch)

    def _find(self, value, path):
        if isinstance(value, torch.Tensor):
            return path if value.dim() else None
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        for key, item in items:
            found = self._find(item, (*path, key))
            if found is not None:
                return found
        return None


def current_executor() -> DataExecutor:
    """The executor whose loop is running.

    Raises:
        RuntimeError: there is none.
    """
    backend = current_backend_impl()
    if backend.executor is None:
        raise RuntimeError("No DataExecutor is running: current_executor() is for the body of its loop")
    return backend.executor
