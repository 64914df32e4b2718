"""SummaryWriter: torch's, with tensors stored in files beside the event file.

Layout: for the event file `<dir>/events.out.tfevents.<...>`, the directory `<dir>/events.out.csevents.<...>` holds
`__metadata__` (JSON) and `tensors/<name>/<step>.<UTC time, ISO 8601>.pt`, each written by `torch.save`.
"""

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter as _TorchSummaryWriter

TENSORS = "tensors"
METADATA = "__metadata__"
EVENTS_MARK = "tfevents"
CS_EVENTS_MARK = "csevents"
FORMAT_VERSION = 1


def utc_text(ns_since_epoch: int) -> str:
    """A time in ns as ISO 8601 in UTC with nine decimals, so that names sort by time and none is lost."""
    seconds, nanoseconds = divmod(ns_since_epoch, 1_000_000_000)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}+00:00"


class SummaryWriter(_TorchSummaryWriter):
    """`torch.utils.tensorboard.SummaryWriter` that also stores tensors.

    Args:
        *args, **kwargs: as for torch's class (log_dir, comment, purge_step, max_queue, flush_secs, filename_suffix).
        base_step: the step under which `summarize_scalar` and `summarize_tensor` record the first iteration of an
            executor, int >= 0. Set it to the global step plus one when a run is resumed.

    Raises:
        TypeError, ValueError: a base_step that is not such an int.

    Attributes:
        base_step: as given.
        cs_events_dir: directory of this writer's tensors; exists.

    API page: cerebras.pytorch.utils.tensorboard.SummaryWriter
    """

    def __init__(self, *args, base_step: int = 1, **kwargs):
        if isinstance(base_step, bool) or not isinstance(base_step, int):
            raise TypeError(f"SummaryWriter: base_step={base_step!r}; use an int >= 0.")
        if base_step < 0:
            raise ValueError(f"SummaryWriter: base_step={base_step!r}; use an int >= 0.")
        super().__init__(*args, **kwargs)
        self.base_step = base_step
        event_file = Path(self._get_file_writer().event_writer._file_name)
        self._cs_events_dir = event_file.with_name(event_file.name.replace(EVENTS_MARK, CS_EVENTS_MARK, 1))
        self._cs_events_dir.mkdir(parents=True, exist_ok=True)
        with open(self._cs_events_dir / METADATA, "w") as file:
            json.dump({"version": FORMAT_VERSION, "base_step": base_step}, file)

    @property
    def cs_events_dir(self) -> str:
        """Directory of this writer's tensors."""
        return str(self._cs_events_dir)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None, *args, **kwargs) -> None:
        """As torch's; without a step, the zero-based iteration of the running executor where there is one."""
        if global_step is None:
            from ...backend import current_backend_impl

            backend = current_backend_impl(raise_exception=False)
            executor = getattr(backend, "executor", None)
            global_step = None if executor is None else executor.iteration
        super().add_scalar(tag, scalar_value, global_step, *args, **kwargs)

    def add_tensor(self, name: str, tensor: torch.Tensor, step: int) -> None:
        """Stores a tensor under a name and a step; read it with `SummaryReader.read_tensor`.

        Args:
            name: path-like, such as "model.fc.weight/grad"; no part may be empty, "." or "..".
            tensor: of any shape and dtype, with a value: in a traced step call this from a `@cstorch.step_closure`.
            step: int >= 0. A step may be written again; the reader gives the latest.

        Raises:
            TypeError: `tensor` is no tensor, or `step` no int.
            ValueError: a name that would leave the directory, or a negative step.
            RuntimeError: a CSX tensor whose value does not exist yet.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"add_tensor({name!r}): got {type(tensor).__name__}; use a torch.Tensor.")
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"add_tensor({name!r}): step={step!r}; use an int >= 0.")
        if step < 0:
            raise ValueError(f"add_tensor({name!r}): step={step!r}; use an int >= 0.")
        if not isinstance(name, str) or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise ValueError(
                f"add_tensor: {name!r} cannot name a tensor. Use a str whose parts between slashes are not empty, "
                "'.' or '..'."
            )
        directory = self._cs_events_dir / TENSORS / name
        directory.mkdir(parents=True, exist_ok=True)
        # A clone: `torch.save` writes the whole storage behind a view.
        value = tensor.detach().cpu().clone()
        temporary = directory / f".{step}.{os.getpid()}.{time.monotonic_ns()}.tmp"
        try:
            torch.save(value, temporary)
            os.replace(temporary, directory / f"{step}.{utc_text(time.time_ns())}.pt")
        finally:
            temporary.unlink(missing_ok=True)
