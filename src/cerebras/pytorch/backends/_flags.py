"""How a flag is declared, checked and found again: one descriptor class, and groups that refuse unknown names."""

import copy
import difflib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ._settings import DebugArgs, Ini

PREFIX = "cerebras.pytorch.backends"
MAX_TRANSFER_BYTES = 2147482624
"""Largest message of the transport, less its header (bytes)."""


class FlagInfo(NamedTuple):
    """One flag as `backends.flags()` reports it: dotted name below `backends`, value now, default, meaning."""

    name: str
    value: Any
    default: Any
    help: str


class Flag:
    """Descriptor of one flag. The value is checked when it is assigned, so a wrong one fails where it was written.

    Args:
        default: the value after `del` or `reset()`; copied at each use, so a mutable default is safe.
        check: returns the value to store, or raises TypeError or ValueError saying what is allowed.
        help: one line on what the flag does.
    """

    def __init__(self, default: Any, check: Callable[[Any], Any], help: str):
        self.default = default
        self.check = check
        self.help = help
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, group: "Group | None", owner: type | None = None) -> Any:
        if group is None:
            return self
        values = group.__dict__["_values"]
        if self.name not in values:
            default = copy.deepcopy(self.default)
            if not isinstance(default, (Ini, DebugArgs)):
                return default
            values[self.name] = default  # Set through their attributes, so the one handed out must be the one kept.
        value = values[self.name]
        # A copy of a container: changing it in place would pass the checks by.
        return copy.deepcopy(value) if isinstance(value, (dict, list)) else value

    def __set__(self, group: "Group", value: Any) -> None:
        try:
            checked = self.check(value)
        except (TypeError, ValueError) as error:
            dotted = f"{PREFIX}.{group._path}.{self.name}"
            raise type(error)(f"{dotted} = {value!r} ({type(value).__name__}) is refused: {error}") from None
        group.__dict__["_values"][self.name] = checked

    def __delete__(self, group: "Group") -> None:
        group.__dict__["_values"].pop(self.name, None)


class Group:
    """A node of the tree: flags and further groups as attributes; any other name is an AttributeError.

    Assigning, reading or deleting an unknown name names the nearest known flag. `del group.flag` restores the default.
    """

    def __init__(self, path: str, root: "Group | None" = None):
        self.__dict__.update(_path=path, _root=root if root is not None else self, _values={})
        for name, kind in self._subgroups().items():
            self.__dict__[name] = kind(f"{path}.{name}" if path else name, self._root)

    @classmethod
    def _subgroups(cls) -> dict[str, type["Group"]]:
        return {
            name: kind
            for name, kind in getattr(cls, "_groups", {}).items()
            if isinstance(kind, type) and issubclass(kind, Group)
        }

    def _unknown(self, name: str) -> AttributeError:
        dotted = f"{self._path}.{name}" if self._path else name
        known = [info.name for info in self._root._flags()]
        same_leaf = [flag for flag in known if flag.rsplit(".", 1)[-1] == name]
        nearest = same_leaf or difflib.get_close_matches(dotted, known, n=1, cutoff=0.0)
        return AttributeError(
            f"{PREFIX}.{dotted} is not a known flag. Nearest: {PREFIX}.{nearest[0]}. "
            f"In this group: {', '.join(self._members()) or 'none'}."
        )

    def _members(self) -> list[str]:
        return [*self._subgroups(), *(name for name, flag in vars(type(self)).items() if isinstance(flag, Flag))]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_root" not in self.__dict__:
            raise AttributeError(name)
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._subgroups():
            raise AttributeError(
                f"{PREFIX}.{self._path}.{name} is a group of flags and cannot be replaced. "
                f"Assign one of its flags: {', '.join(self.__dict__[name]._members())}."
            )
        if not isinstance(vars(type(self)).get(name), Flag):
            raise self._unknown(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if not isinstance(vars(type(self)).get(name), Flag):
            raise self._unknown(name)
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return self._members()

    def __repr__(self) -> str:
        return f"<flags {PREFIX}.{self._path}: {', '.join(self._members())}>"

    def _flags(self) -> Iterator[FlagInfo]:
        for name, flag in vars(type(self)).items():
            if isinstance(flag, Flag):
                yield FlagInfo(f"{self._path}.{name}", getattr(self, name), copy.deepcopy(flag.default), flag.help)
        for name in self._subgroups():
            yield from self.__dict__[name]._flags()

    def _reset(self) -> None:
        self._values.clear()
        for name in self._subgroups():
            self.__dict__[name]._reset()


def integer(low: int | None = None, high: int | None = None, optional: bool = False) -> Callable[[Any], int | None]:
    """Check of an int in [low, high]; None too where `optional`. A bool is not an int here."""
    allowed = "an int" + (f" >= {low}" if low is not None and high is None else "")
    if high is not None:
        allowed = f"an int from {low} to {high}"
    if optional:
        allowed += ", or None"

    def check(value):
        if value is None and optional:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"use {allowed}.")
        value = operator.index(value)
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"use {allowed}.")
        return value

    return check


def boolean(value: Any) -> bool:
    """Check of a bool; 0, 1 and strings are refused."""
    if not isinstance(value, bool):
        raise TypeError("use True or False.")
    return value


def choice(*allowed: str) -> Callable[[Any], str]:
    """A check for one of a few words."""

    def check(value):
        if not isinstance(value, str):
            raise TypeError(f"use {' or '.join(map(repr, allowed))}.")
        if value not in allowed:
            raise ValueError(f"use {' or '.join(map(repr, allowed))}.")
        return value

    return check


def optional_text(value: Any) -> str | None:
    """Check of a non-empty str or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError("use a str, or None.")
    if value == "":
        raise ValueError("use a non-empty str, or None.")
    return value


def names(value: Any) -> list[str] | None:
    """Check of a list of non-empty str; one str stands for a list of one."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in value):
        raise TypeError("use a list of str, one str, or None.")
    if not all(value):
        raise ValueError("use names that are not empty.")
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)


def micro_batch_size(value: Any) -> Any:
    """Check of a micro batch size: "auto", "explore", an int > 0, None, or {"explore": {"min": ..., "max": ...}}."""
    allowed = 'use "auto", "explore", an int >= 1, None, or {"explore": {"min": <int or None>, "max": <int or None>}}.'
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("auto", "explore"):
            raise ValueError(allowed)
        return value
    if isinstance(value, Mapping):
        if set(value) != {"explore"}:
            raise ValueError(f"keys {sorted(map(str, value))}; {allowed}")
        bounds = value["explore"]
        if not isinstance(bounds, Mapping):
            raise TypeError(f'"explore" holds {type(bounds).__name__}; {allowed}')
        if not set(bounds) <= {"min", "max"}:
            raise ValueError(f'"explore" has the keys {sorted(map(str, bounds))}; {allowed}')
        bound = integer(low=1, optional=True)
        checked = {}
        for key, number in bounds.items():
            try:
                checked[key] = bound(number)
            except (TypeError, ValueError) as error:
                raise type(error)(f'"{key}" is {number!r}; {allowed}') from None
        low, high = checked.get("min"), checked.get("max")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min {low} is above max {high}; swap them, or leave one out.")
        return {"explore": checked}
    try:
        return integer(low=1)(value)
    except (TypeError, ValueError) as error:
        raise type(error)(allowed) from None


def ini(value: Any) -> Ini:
    """Check of ini settings: Ini, a mapping, or None for none."""
    if value is None:
        return Ini()
    if isinstance(value, Ini):
        return value
    if not isinstance(value, Mapping):
        raise TypeError("use a mapping of setting to bool, int, float or str, an Ini, or None.")
    try:
        return Ini(**value)
    except AttributeError as error:
        raise ValueError(str(error)) from None


def debug_args(value: Any) -> DebugArgs:
    """Check of debug args: DebugArgs, a mapping, or None for none."""
    if value is None:
        return DebugArgs()
    if isinstance(value, DebugArgs):
        return value
    if not isinstance(value, Mapping):
        raise TypeError("use DebugArgs, a mapping, or None.")
    try:
        return DebugArgs(**value)
    except AttributeError as error:
        raise ValueError(str(error)) from None
