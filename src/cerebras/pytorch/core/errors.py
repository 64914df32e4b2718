"""The errors of the static-graph discipline. Each says what happened, where in the user's code, and the mend."""

import contextlib
import functools
import linecache
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_PLUMBING = {contextlib.__file__, functools.__file__}  # between a caller and a decorated function


@dataclass(frozen=True)
class Site:
    """A place in the user's code."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The stripped source line, empty where it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}, in {self.function}"
        return f"{text}\n    {self.source}" if self.source else text


def _is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS, "<")) or filename in _PLUMBING


def user_site() -> Site | None:
    """The innermost frame outside torch and this package, or None (a thread without user code)."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def user_location() -> tuple[str, int] | None:
    """Cheaper form of `user_site` for every recorded operation: (file, line)."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_library(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


class StaticGraphError(RuntimeError):
    """Something in a traced step cannot be part of one static graph.

    Attributes:
        site: the user's file and line, None where there is none.
    """

    def __init__(self, what: str, mend: str, site: Site | None = None):
        self.site = site if site is not None else user_site()
        where = f"\n  at {self.site}" if self.site else ""
        super().__init__(f"{what}{where}\n  Instead: {mend}")


class TensorReadError(StaticGraphError):
    """A tensor's value was read where it does not exist yet: inside a traced step, or before the step has ended."""


class FrozenValueError(StaticGraphError):
    """A Python value that changes between steps would have been frozen into the graph."""


class DynamicShapeError(StaticGraphError):
    """An operation whose output shape depends on the data."""


class BatchMismatchError(StaticGraphError):
    """A batch or argument differs in structure, shape or dtype from the one that the step was captured with."""


class GraphChangedError(StaticGraphError):
    """`retrace_every_iteration` found another graph than the first iteration's."""


class CompilerMissingError(RuntimeError):
    """TorchInductor needs a C++ compiler and none was found."""
