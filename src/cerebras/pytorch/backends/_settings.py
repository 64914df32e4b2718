"""Free-form settings for the cluster's services: `backends.csx.debug.ini` and `backends.csx.debug.debug_args`.

Both are open sets of names that only a service knows, so no name is refused here; types are checked, and
`backends.flags()` reports what was set.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def _check_name(where: str, name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise AttributeError(f"{where}: {name!r} cannot be the name of a setting. Use a Python identifier.")


class Ini:
    """Flat set of named scalars, set, read and deleted as attributes: `ini.name = True`, `del ini.name`.

    Args:
        **values: initial settings, each a bool, int, float or str.

    Raises:
        TypeError: a value of another type.
        AttributeError: reading or deleting a name that is not set; a name that is no identifier.

    API page: cerebras.pytorch.backends.csx.debug.ini
    """

    def __init__(self, **values):
        object.__setattr__(self, "_values", {})
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_name("backends.csx.debug.ini", name)
        if not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"cerebras.pytorch.backends.csx.debug.ini.{name} = {value!r} ({type(value).__name__}): "
                "an ini setting is a bool, int, float or str."
            )
        self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        # Looked up through __dict__: copy and pickle ask before `_values` exists.
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"cerebras.pytorch.backends.csx.debug.ini.{name} is not set. Assign it first, or use "
            f"getattr(ini, {name!r}, default). Set now: {', '.join(values) or 'nothing'}."
        )

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        del self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Ini) and self._values == other._values

    __hash__ = None

    def __copy__(self) -> "Ini":
        return Ini(**self._values)

    def __deepcopy__(self, memo: dict) -> "Ini":
        return Ini(**self._values)

    def __reduce__(self):
        return _ini_from, (dict(self._values),)

    def __repr__(self) -> str:
        return f"Ini({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def as_dict(self) -> dict[str, bool | int | float | str]:
        """The settings as a new dict."""
        return dict(self._values)


def _ini_from(values: dict) -> Ini:
    return Ini(**values)


class DebugArgs:
    """Tree of named settings with the merge semantics of a protobuf message.

    Reading a name that is not set gives an empty node, which joins the tree when something is set in it, so
    `args.debug_crd.timeout = 3` needs no declaration. `MergeFrom` overwrites scalars, extends lists, and merges nodes.

    Args:
        **values: initial settings: bool, int, float, str, list, or a mapping for a node.

    Raises:
        TypeError: a value of another type.

    API page: cerebras.pytorch.backends.csx.debug.debug_args
    """

    def __init__(self, **values):
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_attach", None)
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_name("backends.csx.debug.debug_args", name)
        if isinstance(value, Mapping):
            value = DebugArgs(**value)
        elif isinstance(value, DebugArgs):
            value = value.__deepcopy__({})
        elif isinstance(value, (list, tuple)):
            value = list(value)
        elif not isinstance(value, (bool, int, float, str)):
            raise TypeError(
                f"cerebras.pytorch.backends.csx.debug.debug_args: {name} = {value!r} ({type(value).__name__}): "
                "a setting is a bool, int, float, str, list, or a mapping of those."
            )
        self._values[name] = value
        self._join()

    def _join(self) -> None:
        if self._attach is not None:
            parent, own_name = self._attach
            object.__setattr__(self, "_attach", None)
            parent._values[own_name] = self
            parent._join()

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values")
        if values is None or name.startswith("_"):
            raise AttributeError(name)
        if name not in values:
            node = DebugArgs()
            object.__setattr__(node, "_attach", (self, name))
            return node
        return values[name]

    def __delattr__(self, name: str) -> None:
        if name not in self._values:
            raise AttributeError(f"debug_args: {name!r} is not set. Set now: {', '.join(self._values) or 'nothing'}.")
        del self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, DebugArgs) and self.as_dict() == other.as_dict()

    __hash__ = None

    def __deepcopy__(self, memo: dict) -> "DebugArgs":
        return DebugArgs(**self.as_dict())

    def __copy__(self) -> "DebugArgs":
        return self.__deepcopy__({})

    def __reduce__(self):
        return _debug_args_from, (self.as_dict(),)

    def __repr__(self) -> str:
        return f"DebugArgs({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def as_dict(self) -> dict[str, Any]:
        """The settings as new nested dicts and lists."""
        return {
            name: value.as_dict() if isinstance(value, DebugArgs) else list(value) if isinstance(value, list) else value
            for name, value in self._values.items()
        }

    def MergeFrom(self, other: "DebugArgs | Mapping") -> None:
        """Takes over what is set in `other`: scalars are overwritten, lists extended, nodes merged.

        Raises:
            TypeError: `other` is neither DebugArgs nor a mapping.
        """
        if isinstance(other, Mapping):
            other = DebugArgs(**other)
        if not isinstance(other, DebugArgs):
            raise TypeError(f"debug_args.MergeFrom takes DebugArgs or a mapping, got {type(other).__name__}.")
        for name, value in other._values.items():
            mine = self._values.get(name)
            if isinstance(value, DebugArgs) and isinstance(mine, DebugArgs):
                mine.MergeFrom(value)
            elif isinstance(value, list) and isinstance(mine, list):
                mine.extend(value)
            else:
                setattr(self, name, value)

    def CopyFrom(self, other: "DebugArgs | Mapping") -> None:
        """Becomes equal to `other`."""
        source = other.as_dict() if isinstance(other, DebugArgs) else dict(other)
        self.Clear()
        self.MergeFrom(source)

    def Clear(self) -> None:
        """Unsets everything."""
        self._values.clear()


def _debug_args_from(values: dict) -> DebugArgs:
    return DebugArgs(**values)
