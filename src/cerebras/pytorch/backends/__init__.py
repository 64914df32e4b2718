"""Typed performance and debug flags, `cerebras.pytorch.backends.csx.*`, usable on every backend.

    cstorch.backends.csx.precision.optimization_level = 2
    del cstorch.backends.csx.precision.optimization_level  # back to the default

A value is checked when it is assigned: TypeError or ValueError with the flag's full name, the value, and what is
allowed. An unknown flag is an AttributeError that names the nearest known one, on assignment too.

API page: cerebras.pytorch Package, Performance/Debug Flags.
"""

import difflib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ._flags import MAX_TRANSFER_BYTES, PREFIX, FlagInfo
from ._settings import DebugArgs, Ini
from .csx import Csx

__all__ = ["DebugArgs", "FlagInfo", "Ini", "MAX_TRANSFER_BYTES", "as_dict", "csx", "flags", "reset"]

csx = Csx("csx")


def flags() -> Iterator[FlagInfo]:
    """Each flag as `(name, value, default, help)`, the name dotted below `backends`, such as "csx.cluster.auto_taint".

    The value and the default are copies.
    """
    yield from csx._flags()


def as_dict(changed_only: bool = False) -> dict[str, Any]:
    """Dotted name to value, for a report, a cache key or another process; `ini` and `debug_args` as plain dicts.

    Args:
        changed_only: leave out the flags that have their default.
    """
    return {
        info.name: info.value.as_dict() if isinstance(info.value, (Ini, DebugArgs)) else info.value
        for info in flags()
        if not changed_only or info.value != info.default
    }


def reset() -> None:
    """Gives every flag its default."""
    csx._reset()


class _Backends(ModuleType):
    """The module's class: an assignment to `backends.<name>` must not silently create a flag nobody reads."""

    def _unknown(self, name: str) -> AttributeError:
        known = ["csx", *(info.name for info in flags())]
        same_leaf = [flag for flag in known if flag.rsplit(".", 1)[-1] == name]
        nearest = (same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.0))[0]
        return AttributeError(f"{PREFIX}.{name} is not a known flag. Nearest: {PREFIX}.{nearest}.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "csx":
            if isinstance(value, ModuleType):
                return  # The import system binds the submodule of this name; the flags keep the attribute.
            raise AttributeError(f"{PREFIX}.csx is a group of flags and cannot be replaced. Assign one of its flags.")
        # The import system sets submodules and dunder names.
        if not name.startswith("__") and not isinstance(value, ModuleType):
            raise self._unknown(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{PREFIX}.{name} cannot be deleted. Delete a flag to restore its default.")


sys.modules[__name__].__class__ = _Backends
