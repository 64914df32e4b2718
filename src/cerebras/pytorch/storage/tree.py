"""The nesting of a checkpoint: from Python containers to flat keys and JSON, and back.

Version 0.5 joins the path of a leaf with dots and writes the nesting as pytree JSON. Where that loses something (keys
that join to the same name, keys that JSON or HDF5 cannot hold, containers it does not know) the extension's tree is
written instead, in which each leaf names its key. A NamedTuple, which the original cannot read, is a tuple to it and a
NamedTuple in the extension's tree, written beside.
"""

import collections
import datetime
import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from cerebras.appliance.storage import StorageError

from .constants import DTYPES

_PYTREE_VERSION = 1
_PYTREE_TYPES = {
    "dict": "builtins.dict",
    "OrderedDict": "collections.OrderedDict",
    "list": "builtins.list",
    "tuple": "builtins.tuple",
    "set": "builtins.set",
    "namedtuple": "collections.namedtuple",
}
_KINDS = {name: kind for kind, name in _PYTREE_TYPES.items()}


class Fit(Enum):
    """How much of a nesting version 0.5 can hold: all, all but the names of NamedTuples, or not enough."""

    EXACT = "exact"
    AS_TUPLES = "as tuples"
    NONE = "none"


_MAX_DEPTH = 200


@dataclass
class Leaf:
    """A value that is not a container.

    Attributes:
        path: the keys and indices that lead to it.
        key: its name in the file, once assigned.
    """

    path: tuple
    value: Any = None
    key: str = ""


@dataclass
class Node:
    """A container: its kind, its keys where it has them, its children."""

    kind: str
    keys: list = field(default_factory=list)
    children: list = field(default_factory=list)
    name: str = ""


def where(path: tuple) -> str:
    """A path in the saved object as Python would write it."""
    return "obj" + "".join(f".{part.name}" if isinstance(part, _Field) else f"[{part!r}]" for part in path)


@dataclass(frozen=True)
class _Field:
    name: str
    index: int

    def __str__(self) -> str:
        return str(self.index)


def flatten(obj: Any) -> tuple[Node | Leaf, list[Leaf]]:
    """The containers of `obj` as nodes, and its leaves in order.

    Raises:
        TypeError, ValueError: a container or key that cannot be stored; the message has its tree path.
    """
    leaves: list[Leaf] = []
    return _flatten(obj, (), leaves, set()), leaves


def _flatten(obj: Any, path: tuple, leaves: list[Leaf], above: set[int]) -> Node | Leaf:
    if not isinstance(obj, (dict, list, tuple, set, frozenset)) or isinstance(obj, torch.Size):
        leaf = Leaf(path, obj)
        leaves.append(leaf)
        return leaf
    if id(obj) in above:
        raise ValueError(f"{where(path)} contains itself; a checkpoint must be a tree")
    if len(path) >= _MAX_DEPTH:
        raise ValueError(f"{where(path[:3])}... is nested more than {_MAX_DEPTH} levels deep")
    node = _node(obj, path)
    above.add(id(obj))
    if node.kind in ("dict", "OrderedDict"):
        for key, child in obj.items():
            node.keys.append(_plain_key(key, path))
            node.children.append(_flatten(child, (*path, key), leaves, above))
    elif node.kind == "namedtuple":
        for index, (name, child) in enumerate(zip(obj._fields, obj)):
            node.children.append(_flatten(child, (*path, _Field(name, index)), leaves, above))
    else:
        for index, child in enumerate(obj):
            node.children.append(_flatten(child, (*path, index), leaves, above))
    above.discard(id(obj))
    return node


def _node(obj: Any, path: tuple) -> Node:
    kind = type(obj)
    if kind in (dict, list, tuple, set, frozenset):
        return Node(kind.__name__)
    if kind is collections.OrderedDict:
        return Node("OrderedDict")
    if isinstance(obj, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return Node("namedtuple", keys=list(kind._fields), name=kind.__name__)
    base = next(base for base in (dict, list, tuple, set, frozenset) if isinstance(obj, base))
    raise TypeError(
        f"{where(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. "
        f"Instead: save {base.__name__}(value)."
    )


def _plain_key(key: Any, path: tuple) -> Any:
    try:
        encode_key(key)
    except TypeError:
        raise TypeError(
            f"{where(path)} has a key of type {type(key).__name__} ({key!r}), which a checkpoint cannot hold. "
            "Instead: use str(key)."
        ) from None
    return str(key) if isinstance(key, str) else key


def encode_key(key: Any) -> list:
    """A dictionary key as JSON: [kind, value].

    Raises:
        TypeError: not a scalar, or a tuple of scalars.
    """
    kind = type(key)
    if key is None:
        return ["none"]
    if isinstance(key, np.generic):
        if key.dtype.kind not in "biufcSU":
            raise TypeError
        return ["numpy", key.dtype.str, key.tobytes().hex()]
    if isinstance(key, str) and not hasattr(kind, "__members__"):
        return ["str", str(key)]
    if kind in (bool, int, float):
        return [kind.__name__, key]
    if kind is complex:
        return ["complex", key.real, key.imag]
    if kind is bytes:
        return ["bytes", key.hex()]
    if kind is tuple:
        return ["tuple", *(encode_key(item) for item in key)]
    if kind is torch.dtype and str(key) in DTYPES:
        return ["dtype", str(key)]
    if kind in (datetime.datetime, datetime.date) and getattr(key, "tzinfo", None) is None:
        return [kind.__name__, key.isoformat()]
    raise TypeError


def decode_key(data: Any) -> Any:
    """The inverse of `encode_key`; raises ValueError, TypeError or KeyError on damaged input."""
    kind, *rest = data
    if kind == "none":
        return None
    if kind == "tuple":
        return tuple(decode_key(item) for item in rest)
    if kind == "numpy":
        dtype = np.dtype(rest[0])
        if dtype.kind not in "biufcSU":
            raise ValueError(f"key dtype {rest[0]}")
        return np.frombuffer(bytes.fromhex(rest[1]), dtype)[0] if dtype.itemsize else dtype.type()
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "dtype":
        return DTYPES[rest[0]]
    if kind == "complex":
        return complex(*rest)
    if kind in ("datetime", "date"):
        return getattr(datetime, kind).fromisoformat(rest[0])
    return {"str": str, "bool": bool, "int": int, "float": float}[kind](rest[0])


_CLEAN = re.compile(r"[^/\0]+(/[^/\0]+)*")


def _encodable(name: str) -> bool:
    """Whether `name` can be the name of an attribute."""
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def _clean(name: str) -> bool:
    """Whether HDF5 keeps `name` as it is as the name of a dataset."""
    return _encodable(name) and _CLEAN.fullmatch(name) is not None and "." not in name.split("/")


def _standard(node: Node | Leaf) -> bool:
    """Whether version 0.5 knows every container and key below `node`."""
    if isinstance(node, Leaf):
        return True
    if node.kind not in _PYTREE_TYPES:
        return False
    if node.kind in ("dict", "OrderedDict") and not all(
        key is None or type(key) in (str, int, float, bool) for key in node.keys
    ):
        return False
    return all(map(_standard, node.children))


def assign_keys(root: Node | Leaf, leaves: list[Leaf], has_data) -> Fit:
    """Gives each leaf its key. Returns how well version 0.5 can hold the nesting.

    Args:
        has_data: tells of a leaf whether it becomes a dataset, whose name must be one that HDF5 keeps.
    """
    for leaf in leaves:
        leaf.key = ".".join(map(str, leaf.path))
    groups = set()
    for leaf in leaves:
        if has_data(leaf):
            parts = leaf.key.split("/")
            groups.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    seen: set[str] = set()
    bad = []
    for index, leaf in enumerate(leaves):
        name_ok = _clean(leaf.key) if has_data(leaf) else _encodable(leaf.key)
        if leaf.key in seen or not name_ok or (has_data(leaf) and leaf.key in groups):
            bad.append((index, leaf))
        else:
            seen.add(leaf.key)
    for index, leaf in bad:
        leaf.key = f"#{index}"
        while leaf.key in seen:
            leaf.key += "_"
        seen.add(leaf.key)
    if bad or not _standard(root):
        return Fit.NONE
    return Fit.AS_TUPLES if _has_namedtuple(root) else Fit.EXACT


def _has_namedtuple(node: Node | Leaf) -> bool:
    return isinstance(node, Node) and (node.kind == "namedtuple" or any(map(_has_namedtuple, node.children)))


def to_pytree_json(root: Node | Leaf) -> str:
    """The nesting as version 0.5 writes it (`__spec__`, whose example part is unused on reading)."""
    return json.dumps([None, json.dumps([_PYTREE_VERSION, _to_pytree(root)])])


def leaf_spec_json(key: str) -> list:
    """The nesting of one leaf's own metadata: a dict with one entry."""
    return [None, json.dumps([_PYTREE_VERSION, _to_pytree(Node("dict", [key], [Leaf(())]))])]


def _to_pytree(node: Node | Leaf) -> dict:
    if isinstance(node, Leaf):
        return {"type": None, "context": None, "children_spec": []}
    context: Any = "null"
    if node.kind in ("dict", "OrderedDict"):
        context = json.dumps(node.keys)
    return {
        "type": _PYTREE_TYPES["tuple" if node.kind == "namedtuple" else node.kind],
        "context": context,
        "children_spec": [_to_pytree(child) for child in node.children],
    }


def from_pytree_json(text: str) -> Node | Leaf:
    """Parses `__spec__`; each leaf gets its joined key. Raises StorageError where it is damaged."""
    try:
        _, spec = json.loads(text)
        version, root = json.loads(spec)
        if version != _PYTREE_VERSION:
            raise ValueError(f"unknown tree version {version!r}")
        return _from_pytree(root, ())
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"the nesting (__spec__) is damaged: {type(error).__name__}: {error}") from error


def _from_pytree(data: dict, path: tuple) -> Node | Leaf:
    if data["type"] is None:
        return Leaf(path, key=".".join(map(str, path)))
    if data["type"] not in _KINDS:
        raise StorageError(f"{where(path)} is a container of the unknown type {data['type']!r}")
    node = Node(_KINDS[data["type"]])
    parts: Any = range(len(data["children_spec"]))
    context = data["context"]
    if node.kind in ("dict", "OrderedDict"):
        parts = node.keys = json.loads(context)
    elif node.kind == "namedtuple":
        node.name, node.keys = context.rpartition(".")[2], [f"field{index}" for index in parts]
    if len(parts) != len(data["children_spec"]):
        raise ValueError("keys and children differ in number")
    node.children = [_from_pytree(child, (*path, part)) for part, child in zip(parts, data["children_spec"])]
    return node


def to_extension_json(root: Node | Leaf) -> str:
    """The nesting as the extension writes it."""
    return json.dumps(_to_extension(root))


def _to_extension(node: Node | Leaf) -> Any:
    if isinstance(node, Leaf):
        return node.key
    data: dict[str, Any] = {"type": node.kind}
    if node.kind in ("dict", "OrderedDict"):
        data["keys"] = [encode_key(key) for key in node.keys]
    elif node.kind == "namedtuple":
        data["name"], data["keys"] = node.name, node.keys
    data["children"] = [_to_extension(child) for child in node.children]
    return data


def from_extension_json(text: str) -> Node | Leaf:
    """Parses the extension's tree. Raises StorageError where it is damaged."""
    try:
        return _from_extension(json.loads(text), ())
    except Exception as error:
        raise StorageError(f"the nesting is damaged: {type(error).__name__}: {error}") from error


def _from_extension(data: Any, path: tuple) -> Node | Leaf:
    if isinstance(data, str):
        return Leaf(path, key=data)
    kind = data["type"]
    if kind not in _PYTREE_TYPES and kind != "frozenset":
        raise ValueError(f"unknown container {kind!r}")
    node = Node(kind)
    parts: Any = range(len(data["children"]))
    if kind in ("dict", "OrderedDict"):
        parts = node.keys = [decode_key(key) for key in data["keys"]]
    elif kind == "namedtuple":
        node.name, node.keys = str(data["name"]), [str(key) for key in data["keys"]]
    if len(parts) != len(data["children"]) or (kind == "namedtuple" and len(node.keys) != len(parts)):
        raise ValueError("keys and children differ in number")
    node.children = [_from_extension(child, (*path, part)) for part, child in zip(parts, data["children"])]
    return node


def leaves_of(root: Node | Leaf) -> list[Leaf]:
    """The leaves below `root`, in order."""
    if isinstance(root, Leaf):
        return [root]
    return [leaf for child in root.children for leaf in leaves_of(child)]


def unflatten(root: Node | Leaf) -> Any:
    """The Python object; every leaf has its value already."""
    if isinstance(root, Leaf):
        return root.value
    children = [unflatten(child) for child in root.children]
    if root.kind == "dict":
        return dict(zip(root.keys, children))
    if root.kind == "OrderedDict":
        return collections.OrderedDict(zip(root.keys, children))
    if root.kind == "namedtuple":
        return _namedtuple_type(root.name, tuple(root.keys))(*children)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[root.kind](children)


_namedtuples: dict[tuple, type] = {}


def _namedtuple_type(name: str, fields: tuple[str, ...]) -> type:
    """A class made from the name and fields in the file; the original class is never imported."""
    if (name, fields) not in _namedtuples:
        try:
            _namedtuples[name, fields] = collections.namedtuple(name, fields)
        except (ValueError, TypeError) as error:
            raise StorageError(f"the named tuple {name!r} is damaged: {error}") from error
    return _namedtuples[name, fields]
