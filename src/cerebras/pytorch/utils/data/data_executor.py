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

from ...backend import current_backend_impl
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
        self.writer = self._deprecated(cs_config, writer, micro_batch_size)
        if profiler_activities is not None:
            for activity in profiler_activities:
                if not (isinstance(activity, type) and issubclass(activity, Activity)):
                    raise TypeError(f"profiler_activities takes Activity classes, not {activity!r}")
        from ...core.closures import ClosureQueue

        self.closures = ClosureQueue()
        self.runs_closures = self.backend.is_e2e_execution
        self.profiler_activities = profiler_activities
        self._profiler: Profiler | None = None
        self._artifact_dir: Path | None = None
        self._iteration = 0
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
            try:
                num_steps = len(self.dataloader)
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

    def _deprecated(self, cs_config, writer, micro_batch_size):
        if cs_config is not None:
            warnings.warn(
                "DataExecutor(cs_config=...) is deprecated: pass cluster_config to cstorch.backend",
                DeprecationWarning,
                stacklevel=3,
            )
            from ..cs_config import CSConfig

            if not isinstance(cs_config, CSConfig) and type(cs_config).__name__ != "ClusterConfig":
                raise TypeError(f"cs_config must be a CSConfig or ClusterConfig, not {type(cs_config).__name__}")
            self.backend.use_cs_config(cs_config)
        if micro_batch_size is not _UNSET:
            warnings.warn(
                "DataExecutor(micro_batch_size=...) is deprecated: set cstorch.backends.csx.performance.micro_batch_size",
                DeprecationWarning,
                stacklevel=3,
            )
            from ... import backends

            backends.csx.performance.micro_batch_size = micro_batch_size
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise TypeError(f"writer must be a SummaryWriter, not {type(writer).__name__}")
        return writer

    # state of the loop
    @property
    def iteration(self) -> int:
        """0-based index of the current step."""
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
    def profiler(self) -> Profiler | None:
        """Rates and times of the run; `profiler.rate_tracker`."""
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
        if outer is not None and not backend.is_cpu:
            raise RuntimeError("Another DataExecutor is running on this backend; end its loop first")
        self._make_artifact_dir()
        self._profiler = Profiler(self.profiler_activities)
        self._iteration, self.finished = 0, False
        self.dataloader._executor = self
        backend.begin_execution(self)
        closures, profiler, end_step, send = self.closures, self._profiler, backend.end_step, backend.send_batch
        batches = self.dataloader.batches()
        size_of = _BatchSize()
        try:
            for iteration in range(self.num_steps):
                batch = next(batches)
                self.batch_size = size = size_of(batch)
                self._iteration = iteration
                self.in_step = True
                if iteration == 0:
                    self._write_track()
                try:
                    yield send(batch)
                except GeneratorExit:  # break: what the body queued belongs to a step that was done
                    end_step(self)
                    closures.flush()
                    raise
                end_step(self)
                profiler.step(size)
                closures.flush()
                self.in_step = False
            self.finished = True
        finally:
            self.in_step = False
            closures.clear()
            self.dataloader._executor = None
            self._profiler.save(self._artifact_dir / "performance.json")
            batches.close()
            backend.end_execution(self)
            backend.executor = outer

    def _write_track(self):
        seconds = round(time.monotonic() - self._setup_started, 6)
        (self._artifact_dir / "track.json").write_text(json.dumps({"Initialization": [seconds, {}]}))


class _BatchSize:
    """The size of the first dimension, found once by search and then by path."""

    def __init__(self):
        self.path: tuple | None = None

    def __call__(self, batch) -> int | None:
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
        return self(batch)

    def _find(self, value, path):
        if isinstance(value, torch.Tensor):
            return path if value.dim() else None
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
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
