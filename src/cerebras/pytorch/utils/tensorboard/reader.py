"""SummaryReader: what SummaryWriter wrote, by name and step."""

import datetime
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import (
    COMPRESSED_HISTOGRAMS,
    HISTOGRAMS,
    SCALARS,
    TENSORS,
    ScalarEvent,
    TensorEvent,
)
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from .writer import CS_EVENTS_MARK
from .writer import TENSORS as TENSOR_DIRECTORY

_TEXT_SUFFIX = "/text_summary"
# Everything: tensorboard's own limits silently drop all but a sample of the events.
_KEEP_ALL = {kind: 0 for kind in (SCALARS, TENSORS, HISTOGRAMS, COMPRESSED_HISTOGRAMS)}
_FILE = re.compile(
    r"(?P<step>\d+)\.(?P<second>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(?P<fraction>\d{1,9}))?(?:\+00:00|Z)?\.pt"
)


@dataclass(frozen=True, eq=False)
class TensorDescriptor:
    """A stored tensor: the step it belongs to, when it was written (ns since the epoch), and the tensor, on the CPU."""

    step: int
    ns_since_epoch: int
    tensor: torch.Tensor

    @property
    def utc(self) -> datetime.datetime:
        """The time of writing, to the microsecond."""
        return datetime.datetime.fromtimestamp(self.ns_since_epoch / 1e9, datetime.UTC)


class SummaryReader:
    """Reads event files, and the tensors beside them, below one or several directories.

    Args:
        log_dirs: directory, or list of directories; their subdirectories are searched too.
        filter: keep only names that start with it and have a slash after it, that is `<filter>*/*`.
        **kwargs: for tensorboard's EventMultiplexer, such as size_guidance. By default no event is dropped.

    Raises:
        FileNotFoundError: a directory that does not exist.

    API page: cerebras.pytorch.utils.tensorboard.SummaryReader
    """

    def __init__(self, log_dirs: str | os.PathLike | Iterable[str | os.PathLike], filter: str | None = None, **kwargs):
        one = isinstance(log_dirs, (str, os.PathLike))
        self._log_dirs = [Path(path) for path in ([log_dirs] if one else log_dirs)]
        for path in self._log_dirs:
            if not path.is_dir():
                raise FileNotFoundError(
                    f"SummaryReader: {path} is not a directory. Give the log_dir of the SummaryWriter."
                )
        self._filter = filter
        self._events = EventMultiplexer(**{"size_guidance": _KEEP_ALL, **kwargs})
        self._tensors: dict[str, list[tuple[int, int, Path]]] = {}
        self.reload()

    def reload(self) -> None:
        """Takes in what was written since the reader was made or last reloaded."""
        tensors: dict[str, list[tuple[int, int, Path]]] = {}
        for path in self._log_dirs:
            self._events.AddRunsFromDirectory(str(path), name=str(path))
            for directory, subdirectories, _ in os.walk(path):
                if CS_EVENTS_MARK in os.path.basename(directory):
                    subdirectories.clear()
                    _find_tensors(Path(directory) / TENSOR_DIRECTORY, tensors)
        self._events.Reload()
        for files in tensors.values():
            files.sort(key=lambda entry: entry[:2])
        self._tensors = tensors

    def _keeps(self, name: str) -> bool:
        if self._filter is None:
            return True
        return name.startswith(self._filter) and "/" in name[len(self._filter) :]

    def Tags(self) -> dict[str, list[str]]:
        """Kind of event, as tensorboard calls it ("scalars", "tensors", "histograms", ...), to names, over all runs."""
        merged: dict[str, set[str]] = {}
        for tags in self._events.Runs().values():
            for kind, found in tags.items():
                if isinstance(found, (list, tuple)):  # "graph" and "meta_graph" are mere flags
                    merged.setdefault(kind, set()).update(filter(self._keeps, found))
        return {kind: sorted(found) for kind, found in merged.items()}

    def Scalars(self, name: str) -> list[ScalarEvent]:
        """Every event of a scalar over all runs, by step, then time; empty for an unknown name."""
        return self._collect(SCALARS, self._events.Scalars, name)

    def _collect(self, kind: str, read, name: str) -> list:
        if not self._keeps(name):
            return []
        events = []
        for run, tags in self._events.Runs().items():
            if name in tags.get(kind, ()):
                events.extend(read(run, name))
        return sorted(events, key=lambda event: (event.step, event.wall_time))

    def scalar_names(self) -> set[str]:
        """Names of the scalars."""
        return set(self.Tags().get(SCALARS, ()))

    def scalar_groups(self) -> set[str]:
        """What stands before the first slash in the names of the scalars that have one."""
        return {name.split("/", 1)[0] for name in self.scalar_names() if "/" in name}

    def read_scalar(self, name: str, step: int | None = None) -> list[ScalarEvent] | ScalarEvent | None:
        """Events `(wall_time, step, value)` of a scalar.

        Args:
            name: as given to `add_scalar`.
            step: only the latest event of this step.

        Returns:
            All events by step, empty for an unknown name; with `step` one event, or None where there is none.
        """
        return _at(self.Scalars(name), step)

    def text_summary_names(self) -> list[str]:
        """Names of the texts, as given to `add_text`."""
        names = {
            name.removesuffix(_TEXT_SUFFIX)
            for tags in self._events.Runs().values()
            for name in tags.get(TENSORS, ())
            if name.endswith(_TEXT_SUFFIX)
        }
        return sorted(filter(self._keeps, names))

    def read_text_summary(self, name: str, step: int | None = None) -> list[TensorEvent] | TensorEvent | None:
        """Events of a text; the text is `event.tensor_proto.string_val[0].decode()`.

        Returns:
            All events by step, empty for an unknown name; with `step` one event, or None where there is none.
        """
        if not self._keeps(name):
            return _at([], step)
        events = []
        for run, tags in self._events.Runs().items():
            if name + _TEXT_SUFFIX in tags.get(TENSORS, ()):
                events.extend(self._events.Tensors(run, name + _TEXT_SUFFIX))
        return _at(sorted(events, key=lambda event: (event.step, event.wall_time)), step)

    def tensor_names(self) -> set[str]:
        """Names of the tensors, as given to `add_tensor`."""
        return set(filter(self._keeps, self._tensors))

    def read_tensor(
        self, name: str, step: int | None = None, latest_only: bool = True
    ) -> (
        TensorDescriptor
        | list[TensorDescriptor]
        | dict[int, TensorDescriptor]
        | dict[int, list[TensorDescriptor]]
        | None
    ):
        """Stored tensors of a name, loaded with `weights_only=True`, so that a file cannot run code.

        Args:
            name: as given to `add_tensor`.
            step: only this step.
            latest_only: one tensor for each step, the latest written; else all, by time.

        Returns:
            step to TensorDescriptor (or to a list of them), empty for an unknown name. With `step`, one
            TensorDescriptor or None (or a list, empty where there is none).

        Raises:
            RuntimeError: a file that holds anything but a tensor; names the file.
        """
        by_step: dict[int, list[tuple[int, int, Path]]] = {}
        for entry in self._tensors.get(name, ()) if self._keeps(name) else ():
            if step is None or entry[0] == step:
                by_step.setdefault(entry[0], []).append(entry)
        if latest_only:
            latest = {number: _load(*entries[-1]) for number, entries in by_step.items()}
            return latest if step is None else latest.get(step)
        every = {number: [_load(*entry) for entry in entries] for number, entries in by_step.items()}
        return every if step is None else every.get(step, [])


def _at(events: list, step: int | None):
    if step is None:
        return events
    matching = [event for event in events if event.step == step]
    return matching[-1] if matching else None


def _find_tensors(root: Path, found: dict[str, list[tuple[int, int, Path]]]) -> None:
    for directory, _, files in os.walk(root):
        name = Path(directory).relative_to(root).as_posix()
        for file in files:
            match = _FILE.fullmatch(file)
            if match:
                second = datetime.datetime.fromisoformat(match["second"]).replace(tzinfo=datetime.UTC)
                fraction = int((match["fraction"] or "0").ljust(9, "0"))
                when = int(second.timestamp()) * 1_000_000_000 + fraction
                found.setdefault(name, []).append((int(match["step"]), when, Path(directory) / file))


def _load(step: int, ns_since_epoch: int, path: Path) -> TensorDescriptor:
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RuntimeError(
            f"{path} cannot be read as a tensor ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Remove the file, or write it again with SummaryWriter.add_tensor."
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise RuntimeError(f"{path} holds a {type(tensor).__name__}, not a tensor. Remove the file.")
    return TensorDescriptor(step, ns_since_epoch, tensor)
