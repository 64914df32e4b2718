"""Leaves: what each kind of value becomes in a checkpoint, and how it is read back.

Saving has two passes. `plan` looks at types, shapes and sharing only, refuses what cannot be stored, and touches no
data. `write` then obtains and writes one tensor at a time. Loading is `read`.
"""

import contextlib
import contextvars
import datetime
import functools
import importlib.util
import math
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from cerebras.appliance.storage import H5Reader, H5Writer, StorageError
from cerebras.appliance.storage.h5_storage import SPEC_ATTR, VERSION, VERSION_ATTR

from . import tree
from .constants import (
    __CSTORCH_VERSION__,
    BIT_DTYPES,
    BYTES,
    DTYPES,
    EXTENSION_ATTR,
    EXTENSION_VERSION,
    LINKED,
    NONE,
    NUMPY,
    RTFX_DTYPES,
    STORAGE_KEY,
    TORCH,
    TREE_ATTR,
    TYPE,
)
from .deferred import (
    DeferredFileTensor,
    DeferredFill,
    DeferredFullTensor,
    DeferredTensor,
    filled,
)
from .memory import in_threads, short_lived
from .resolve import identity_of, may_be_resolved, resolve_tensor

_cache_deferred = contextvars.ContextVar("cache_deferred_tensors", default=False)


@contextlib.contextmanager
def cache_deferred_tensors(value: bool = True) -> Iterator[None]:
    """Within the block, `load(..., map_location=None)` behaves as `map_location="cache"`."""
    token = _cache_deferred.set(bool(value))
    try:
        yield
    finally:
        _cache_deferred.reset(token)


@contextlib.contextmanager
def use_external_link(value: bool = True) -> Iterator[None]:
    """Accepted for the sake of callers: it changes nothing, because a checkpoint here never points into another file."""
    yield


class LeafError(TypeError):
    """A value cannot be stored; the message has its tree path."""


@dataclass
class Plan:
    """What `write` is to do.

    Attributes:
        root, leaves: the object, each leaf with its key.
        links: key -> key of the leaf that holds the same tensor or array.
        views: key -> its place in the memory of another leaf, or of a buffer.
        buffers: stretches of storage that several tensors share and none of them covers.
        fit: how well version 0.5 can hold the nesting.
    """

    root: Any
    leaves: list[tree.Leaf]
    links: dict[str, str] = field(default_factory=dict)
    views: dict[str, dict] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    fit: tree.Fit = tree.Fit.EXACT

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that are stored."""
        return sum(
            leaf.value.nbytes
            for leaf in self.leaves
            if isinstance(leaf.value, torch.Tensor) and leaf.key not in self.links and leaf.key not in self.views
        )


def plan(obj: Any) -> Plan:
    """Decides where everything in `obj` goes.

    Raises:
        TypeError, ValueError: something in it cannot be stored; the message names it by its tree path.
    """
    root, leaves = tree.flatten(obj)
    for leaf in leaves:
        _check(leaf)
    fit = tree.assign_keys(root, leaves, lambda leaf: isinstance(leaf.value, _WITH_DATA))
    out = Plan(root, leaves, fit=fit)
    _plan_sharing(out)
    return out


_WITH_DATA = (torch.Tensor, np.ndarray, np.generic, bytes, bytearray)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_EXTENSION_SCALARS = (torch.Size, torch.dtype, torch.device, datetime.date, datetime.timedelta)


def _check(leaf: tree.Leaf) -> None:
    value = leaf.value
    if isinstance(value, torch.Tensor):
        _check_tensor(leaf)
    elif isinstance(value, (np.ndarray, np.generic)):
        kind = type(value)
        if value.dtype.kind not in "biufcSUMm" or (
            isinstance(value, np.ndarray) and kind not in (np.ndarray, np.memmap)
        ):
            raise LeafError(
                f"{tree.where(leaf.path)} is a {kind.__name__} of dtype {value.dtype}, which a checkpoint cannot hold. "
                "Instead: save a plain numeric array, or a nested dict."
            )
    elif isinstance(value, Enum):
        raise _refusal(leaf, "Instead: save its name or value.")
    elif isinstance(value, int):
        try:
            str(value)
        except ValueError as error:
            raise ValueError(f"{tree.where(leaf.path)} is an integer too long to be stored: {error}") from None
    elif isinstance(value, datetime.datetime):
        if not isinstance(value.tzinfo, (type(None), datetime.timezone)):
            raise _refusal(leaf, "Instead: save value.astimezone(datetime.timezone.utc).")
    elif not (
        value is None or isinstance(value, (str, float, complex, bytes, bytearray)) or type(value) in _EXTENSION_SCALARS
    ):
        raise _refusal(leaf, "Instead: save tensors, arrays, numbers and strings, such as the object's state_dict().")


def _refusal(leaf: tree.Leaf, mend: str) -> LeafError:
    kind = type(leaf.value)
    return LeafError(
        f"{tree.where(leaf.path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold. {mend}"
    )


def _check_tensor(leaf: tree.Leaf) -> None:
    tensor, place = leaf.value, tree.where(leaf.path)
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"{place} is an uninitialized parameter: run the module once before saving it")
    if tensor.layout is not torch.strided:
        raise LeafError(f"{place} is a tensor of layout {tensor.layout}. Instead: save value.to_dense() or its parts.")
    if tensor.dtype not in RTFX_DTYPES and str(tensor.dtype) not in DTYPES:
        raise LeafError(f"{place} is a tensor of {tensor.dtype}, which a checkpoint cannot hold. Instead: convert it.")
    if isinstance(tensor, DeferredTensor) or may_be_resolved(tensor):
        return
    if tensor.is_meta:
        raise ValueError(f"{place} is on the meta device and has no values to save")
    _check_resolved(tensor, place)


def _check_resolved(tensor: torch.Tensor, place: str) -> None:
    if not _is_plain(tensor):
        raise LeafError(
            f"{place} is a {type(tensor).__module__}.{type(tensor).__qualname__}, whose values cannot be taken. "
            "Instead: save a plain tensor of its values."
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds its values in a strided storage of its own."""
    kind = type(tensor)
    if kind in _PLAIN_TENSORS:
        return True
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return getattr(dispatch, "__func__", dispatch) is getattr(
        torch.Tensor.__torch_dispatch__, "__func__", torch.Tensor.__torch_dispatch__
    )


# Sharing


@dataclass
class _Extent:
    leaf: tree.Leaf
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.leaf.value.numel() * self.leaf.value.element_size()


def _plan_sharing(out: Plan) -> None:
    first: dict[Any, tree.Leaf] = {}
    storages: dict[Any, list[_Extent]] = {}
    for leaf in out.leaves:
        value = leaf.value
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            continue
        keys: list[Any] = [id(value)]
        identity = identity_of(value) if isinstance(value, torch.Tensor) else None
        if identity is not None:
            keys.append(("identity", identity, value.shape, value.dtype))
        elif isinstance(value, torch.Tensor) and _shares_storage(value):
            storage = value.untyped_storage()
            place = (value.device, storage.data_ptr(), storage.nbytes())
            offset = value.storage_offset() * value.element_size()
            keys.append((place, offset, value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()))
        owner = next((first[key] for key in keys if key in first), None)
        for key in keys:
            first.setdefault(key, owner or leaf)
        if owner is not None:
            out.links[leaf.key] = owner.key
        elif len(keys) == 2 and identity is None and not value.is_conj() and not value.is_neg():
            span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
            storages.setdefault(place, []).append(_Extent(leaf, offset, offset + span * value.element_size()))
    for extents in storages.values():
        for cluster in _overlapping(extents):
            _share(out, cluster)


def _shares_storage(tensor: torch.Tensor) -> bool:
    return (
        not isinstance(tensor, DeferredTensor)
        and _is_plain(tensor)
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.untyped_storage().data_ptr() != 0
    )


def _overlapping(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    """Groups of two and more whose stretches of storage overlap."""
    cluster: list[_Extent] = []
    stop = -1
    for extent in sorted(extents, key=lambda extent: extent.start):
        if extent.start >= stop and cluster:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(extent)
        stop = max(stop if len(cluster) > 1 else -1, extent.stop)
    if len(cluster) > 1:
        yield cluster


def _share(out: Plan, cluster: list[_Extent]) -> None:
    """Stores a cluster once: in the member that covers it, else in a buffer, unless that would store more bytes."""
    start, stop = cluster[0].start, max(extent.stop for extent in cluster)
    base = next((e for e in cluster if (e.start, e.stop) == (start, stop) and e.leaf.value.is_contiguous()), None)
    if base is None:
        if stop - start > sum(extent.nbytes for extent in cluster):
            return
        start -= start % 16  # every dtype can be laid over the buffer
        stored_as = f"{STORAGE_KEY}{len(out.buffers)}"
        storage = cluster[0].leaf.value.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=cluster[0].leaf.value.device)
        out.buffers[stored_as] = buffer.set_(storage, start, (stop - start,), (1,))
    else:
        stored_as = base.leaf.key
    for extent in cluster:
        value = extent.leaf.value
        if extent is base or (extent.start - start) % value.element_size():
            continue
        out.views[extent.leaf.key] = {
            "key": stored_as,
            "offset": extent.start - start,
            "shape": list(value.shape),
            "strides": list(value.stride()),
            "dtype": str(value.dtype),
        }


# Writing


def write(planned: Plan, writer: H5Writer, version: str, progress: Callable[[int], Any] = lambda nbytes: None) -> None:
    """Writes a planned object; only one tensor that had to be fetched or converted is in memory at a time.

    Args:
        progress: called with the bytes of each tensor once it is written.
    """
    out = _Writer(writer)
    for key, buffer in planned.buffers.items():
        out.data(key, {TYPE: "cstorch.Buffer"}, buffer.cpu().numpy(), extension=True)
    for leaf in planned.leaves:
        if leaf.key in planned.links:
            out.plain(leaf.key, {"key": planned.links[leaf.key], LINKED: True, TYPE: "LinkedObject"})
        elif leaf.key in planned.views:
            out.plain(leaf.key, planned.views[leaf.key] | {TYPE: "cstorch.TensorView"}, extension=True)
        else:
            out.value(leaf)
            if isinstance(leaf.value, torch.Tensor):
                progress(leaf.value.nbytes)
    writer.write_attribute(VERSION_ATTR, np.float64(VERSION))
    writer.write_attribute(__CSTORCH_VERSION__, version)
    if planned.fit is not tree.Fit.NONE:
        writer.write_attribute(SPEC_ATTR, tree.to_pytree_json(planned.root))
    if planned.fit is not tree.Fit.EXACT:
        writer.write_attribute(TREE_ATTR, tree.to_extension_json(planned.root))
        out.extended = True
    if out.extended:
        writer.write_attribute(EXTENSION_ATTR, EXTENSION_VERSION)


class _Writer:
    """Writes leaves; `extended` tells whether one of them needed the extension."""

    def __init__(self, writer: H5Writer):
        self.writer = writer
        self.extended = False

    def _metadata(self, key: str, metadata: dict) -> None:
        self.writer.write_metadata(
            key, {"__spec__": tree.leaf_spec_json(key), "__objects__": [key], key + ".__metadata__": metadata}
        )

    def plain(self, key: str, metadata: dict, extension: bool = False) -> None:
        """A leaf without a dataset."""
        self.extended |= extension
        self._metadata(key, metadata | {NONE: True})

    def data(self, key: str, metadata: dict, array: np.ndarray, extension: bool = False) -> None:
        """A leaf with a dataset."""
        self.extended |= extension
        metadata = metadata | {NUMPY: True, "compressed": False}
        self._metadata(key, metadata)
        attributes = {name: value for name, value in metadata.items() if name != "numpy_dtype"}
        if "shapes" in attributes:
            attributes["shapes"] = np.array(attributes["shapes"])
        self.writer.write_array(key, array, attributes)

    def value(self, leaf: tree.Leaf) -> None:
        key, value = leaf.key, leaf.value
        if isinstance(value, torch.Tensor):
            self.tensor(leaf)
        elif isinstance(value, DeferredFill):
            self.fill(leaf.key, value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self.array(key, value)
        elif isinstance(value, (bytes, bytearray)):
            kind = "cstorch.Bytes" if isinstance(value, bytes) else "cstorch.ByteArray"
            self.data(key, {TYPE: kind}, np.frombuffer(bytes(value), np.uint8), extension=True)
        elif value is None:
            self.plain(key, {TYPE: "NoneSerializer"})
        elif isinstance(value, str):
            self.plain(key, {"string_value": str(value), TYPE: "StringSerializer"})
        elif isinstance(value, (bool, int, float)):
            plain = value if isinstance(value, bool) else int(value) if isinstance(value, int) else float(value)
            self.plain(key, {"scalar_value": plain, TYPE: "ScalarSerializer"})
        else:
            name, content = _encode_scalar(value)
            self.plain(key, {TYPE: f"cstorch.{name}", "value": content}, extension=True)

    def array(self, key: str, value: np.ndarray | np.generic) -> None:
        array = np.asarray(value)
        metadata: dict[str, Any] = {"is_bfloat16": False, TYPE: "NumpyArraySerializer"}
        raw = array.dtype.kind not in "biufc" or array.dtype.itemsize > 16 or array.dtype.char in "gG"
        extension = raw or isinstance(value, np.generic)
        if extension:
            metadata = {
                TYPE: "cstorch.NumpyScalar" if isinstance(value, np.generic) else "cstorch.NumpyArray",
                "numpy_dtype": array.dtype.str,
                "shape": list(array.shape),
            }
        if raw:
            array = np.frombuffer(array.tobytes(), np.uint8)
        self.data(key, metadata, array, extension)

    def tensor(self, leaf: tree.Leaf) -> None:
        place, declared = tree.where(leaf.path), leaf.value
        tensor = resolve_tensor(declared)
        if tuple(tensor.shape) != tuple(declared.shape) or tensor.dtype != declared.dtype:
            raise ValueError(
                f"{place} is a {tuple(declared.shape)} tensor of {declared.dtype}, but was resolved to "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )
        if isinstance(tensor, DeferredFill):
            self.fill(leaf.key, tensor)
            return
        _check_resolved(tensor, place)
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        dtype = str(tensor.dtype)
        standard = tensor.dtype in RTFX_DTYPES
        metadata: dict[str, Any] = {TORCH: True, "shapes": [list(tensor.shape)], "dtypes": [dtype]}
        if standard:
            metadata |= {"rtfx_dtypes": [RTFX_DTYPES[tensor.dtype]], TYPE: "TorchTensorSerializer"}
        else:
            metadata[TYPE] = "cstorch.Tensor"
        self.data(leaf.key, metadata, to_numpy(tensor), extension=not standard)

    def fill(self, key: str, fill: DeferredFill) -> None:
        value = fill.value
        metadata = {"shape": list(fill.shape), "dtype": str(fill.dtype)}
        if isinstance(value, complex):
            self.plain(
                key, metadata | {"fill_value": [value.real, value.imag], TYPE: "cstorch.ComplexFill"}, extension=True
            )
        else:
            extension = fill.dtype not in RTFX_DTYPES
            name = "cstorch.Fill" if extension else "DeferredFullTensor"
            self.plain(key, metadata | {"fill_value": value, TYPE: name}, extension=extension)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor as an array of a dtype that HDF5 has."""
    bits = BIT_DTYPES.get(tensor.dtype)
    if bits is None:
        return tensor.numpy()
    # A 0-d tensor cannot be viewed as a dtype of another size, and these are of the same size.
    return tensor.view(bits).numpy()


def _encode_scalar(value: Any) -> tuple[str, Any]:
    if isinstance(value, complex):
        return "complex", [value.real, value.imag]
    if isinstance(value, torch.Size):
        return "Size", list(value)
    if isinstance(value, torch.dtype):
        return "dtype", str(value)
    if isinstance(value, torch.device):
        return "device", str(value)
    if isinstance(value, datetime.timedelta):
        return "timedelta", [value.days, value.seconds, value.microseconds]
    return type(value).__name__, value.isoformat()


def _decode_dtype(name: str) -> torch.dtype:
    out = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(out, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return out


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "complex": lambda value: complex(*value),
    "Size": torch.Size,
    "dtype": _decode_dtype,
    "device": torch.device,
    "timedelta": lambda value: datetime.timedelta(*value),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
}


# Reading

_READ_THREADS = 4


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=BIT_DTYPES.get(dtype, dtype), device="cpu").numpy().dtype


class FileSource:
    """A dataset as the source of a tensor."""

    def __init__(self, reader: H5Reader, key: str, dtype: torch.dtype, shape: tuple[int, ...]):
        self.reader = reader
        self.key = key
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self.checked = False

    def check(self) -> None:
        """Compares the dataset with what the metadata say of it; once, and not at loading, which opens no dataset."""
        if self.checked:
            return
        info = self.reader.info(self.key)
        if info.shape != tuple(self.shape) or info.dtype != _numpy_dtype(self.dtype):
            raise StorageError(
                f"{self.reader.path}: {self.key!r} is damaged: the metadata say {tuple(self.shape)} of {self.dtype}, "
                f"the data are {info.shape} of {info.dtype}"
            )
        self.checked = True

    def allocate(self) -> torch.Tensor:
        """Memory for all values."""
        self.check()
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def mapped(self) -> torch.Tensor | None:
        """The values in a private mapping of the file, compared with their checksum; None where they are not as such."""
        self.check()
        array = self.reader.mapped(self.key)
        if array is None:
            return None
        bits = BIT_DTYPES.get(self.dtype)
        tensor = torch.from_numpy(array)
        return tensor if bits is None else tensor.view(self.dtype)

    def fill(self, out: torch.Tensor) -> None:
        """Reads all values into `out`."""
        self.reader.read_into(self.key, to_numpy(out))

    def _read(self, shape: torch.Size, rows: tuple[int, int] | None) -> torch.Tensor:
        self.check()
        out = short_lived(shape, self.dtype)
        self.reader.read_into(self.key, to_numpy(out), rows)
        return out

    def read(self) -> torch.Tensor:
        return self._read(self.shape, None)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        return self._read(torch.Size((stop - start, *self.shape[1:])), (start, stop))

    def describe(self) -> str:
        return f"{self.key!r} in {self.reader.path}"


class ViewSource:
    """A part of another tensor's memory as the source of a tensor."""

    def __init__(self, base: Any, view: dict, label: str):
        self.base = base  # the cell of a deferred tensor, None for eager reading
        self.dtype = DTYPES[view["dtype"]]
        self.shape = torch.Size(view["shape"])
        self.strides = tuple(view["strides"])
        self.offset = view["offset"]
        self.label = label
        numbers = (self.offset, *self.shape, *self.strides)
        if not all(isinstance(n, int) and n >= 0 for n in numbers) or len(self.strides) != len(self.shape):
            raise StorageError(f"{label}: the view is damaged")

    def read(self) -> torch.Tensor:
        shared = self.over(self.base.get())
        return shared if self.base.data is not None else shared.clone()

    def own(self) -> torch.Tensor:
        return self.over(self.base.own())

    def over(self, base: torch.Tensor) -> torch.Tensor:
        """The view itself, sharing `base`'s memory."""
        out = torch.empty(0, dtype=self.dtype, device=base.device)
        size = out.element_size()
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides)) if all(self.shape) else -1
        start = base.storage_offset() * base.element_size() + self.offset
        if start % size or start + (last + 1) * size > base.untyped_storage().nbytes():
            raise StorageError(f"{self.label}: the view reaches beyond the data it is a part of")
        return out.set_(base.untyped_storage(), start // size, self.shape, self.strides)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.read()[start:stop]

    def describe(self) -> str:
        return self.label


class Reading:
    """Reads the leaves of one file.

    Args:
        reader: the open file.
        mode: "lazy", "cache" or "eager".
        place: for eager reading, moves a CPU tensor to where it belongs; None leaves it.
        allow_pickle: unpickle entries that were stored as pickles.
        mmap: for eager reading, map the file instead of copying from it.
    """

    def __init__(
        self,
        reader: H5Reader,
        mode: str,
        place: Callable[[torch.Tensor], torch.Tensor] | None,
        allow_pickle: bool,
        mmap: bool = False,
    ):
        self.reader = reader
        self.mmap = mmap
        self.mode = "cache" if mode == "lazy" and _cache_deferred.get() else mode
        self.place = place
        self.allow_pickle = allow_pickle
        self.done: dict[str, Any] = {}
        self.pending: list[tuple[FileSource, torch.Tensor]] = []
        self.extended = reader.global_metadata.get(EXTENSION_ATTR)

    def read(self) -> Any:
        """The whole object."""
        if self.extended is not None and (not isinstance(self.extended, int) or self.extended > EXTENSION_VERSION):
            raise StorageError(
                f"{self.reader.path} uses version {self.extended} of the extension, newer than this package knows "
                f"({EXTENSION_VERSION}): update it"
            )
        root = self._tree()
        leaves = tree.leaves_of(root)
        if not self.allow_pickle:
            self._refuse_pickles(leaves)
        for leaf in leaves:
            leaf.value = self.leaf(leaf.key)
        self._read_pending()
        try:
            return tree.unflatten(root)
        except TypeError as error:  # a member of a set that cannot be in one
            raise StorageError(f"{self.reader.path} is damaged: {error}") from error

    def _tree(self):
        attributes = self.reader.global_metadata
        text = attributes.get(TREE_ATTR, attributes.get(SPEC_ATTR))
        if not isinstance(text, str):
            raise StorageError(f"{self.reader.path} is damaged: it does not say how its entries are nested")
        parse = tree.from_extension_json if TREE_ATTR in attributes else tree.from_pytree_json
        try:
            return parse(text)
        except StorageError as error:
            raise StorageError(f"{self.reader.path}: {error}") from error

    def _refuse_pickles(self, leaves) -> None:
        pickled = [leaf.key for leaf in leaves if leaf.key in self.reader and self._metadata(leaf.key).get(BYTES)]
        if pickled:
            names = ", ".join(map(repr, pickled[:10])) + (", ..." if len(pickled) > 10 else "")
            raise StorageError(
                f"{self.reader.path} has pickled entries, and unpickling can run any code: {names}. "
                "If you trust whoever wrote the file, use load(..., allow_pickle=True)."
            )

    def _metadata(self, key: str) -> dict:
        outer = self.reader.metadata(key)
        inner = outer.get(key + ".__metadata__")
        if isinstance(inner, dict):
            return inner
        # Nested entries: the original wraps a deferred tensor in the metadata of the tensor it stands for.
        parts = [value for name, value in outer.items() if name.endswith(".__metadata__") and isinstance(value, dict)]
        for kind in ("DeferredGraphTensor", "DeferredFullTensor"):
            for part in parts:
                if part.get(TYPE) == kind:
                    return part
        if any(part.get(BYTES) for part in parts):
            return {TYPE: "ObjectSerializer", BYTES: True}
        raise StorageError(f"{self.reader.path}: {key!r} is of a kind that cannot be read")

    def leaf(self, key: str, seen: tuple[str, ...] = ()) -> Any:
        """The value of one leaf; the same object for the same key."""
        if key not in self.done:
            try:
                self.done[key] = self._leaf(key, self._metadata(key), seen)
            except StorageError:
                raise
            except (
                KeyError,
                IndexError,
                TypeError,
                ValueError,
                OverflowError,
                AttributeError,
                RuntimeError,
                MemoryError,
            ) as error:
                raise StorageError(
                    f"{self.reader.path}: the entry {key!r} is damaged: {type(error).__name__}: {error}"
                ) from error
        return self.done[key]

    def _leaf(self, key: str, metadata: dict, seen: tuple[str, ...]) -> Any:
        kind = metadata.get(TYPE)
        if metadata.get(BYTES):
            return self._unpickled(key)
        if kind == "LinkedObject":
            if key in seen:
                raise ValueError("it links to itself")
            return self.leaf(metadata["key"], (*seen, key))
        if kind in ("TorchTensorSerializer", "cstorch.Tensor"):
            (shape,), (dtype,) = metadata["shapes"], metadata["dtypes"]
            return self._tensor(FileSource(self.reader, key, DTYPES[dtype], tuple(shape)), key)
        if kind == "cstorch.TensorView":
            return self._view(key, metadata)
        if kind in ("DeferredFullTensor", "cstorch.Fill", "cstorch.ComplexFill"):
            return self._fill(metadata)
        if kind == "ScalarSerializer":
            return metadata["scalar_value"]
        if kind == "StringSerializer":
            return metadata["string_value"]
        if kind == "NoneSerializer":
            return None
        if kind == "NumpyArraySerializer":
            array = self.reader.read(key)
            if metadata.get("is_bfloat16"):
                return torch.from_numpy(array).view(torch.bfloat16).float().numpy()
            return array
        if kind == "cstorch.Bytes":
            return self.reader.read(key).tobytes()
        if kind == "cstorch.ByteArray":
            return bytearray(self.reader.read(key).tobytes())
        if kind in ("cstorch.NumpyArray", "cstorch.NumpyScalar"):
            return self._numpy(key, metadata, kind == "cstorch.NumpyScalar")
        if isinstance(kind, str) and kind.removeprefix("cstorch.") in _DECODERS and kind.startswith("cstorch."):
            return _DECODERS[kind.removeprefix("cstorch.")](metadata["value"])
        if kind == "DeferredGraphTensor":
            raise StorageError(
                f"{self.reader.path}: {key!r} holds a program that computes it, not values, and programs in files are "
                "not run. Load and save the file once with the package that wrote it, after initialisation."
            )
        raise StorageError(f"{self.reader.path}: {key!r} is of the unknown kind {kind!r}")

    def _tensor(self, source, key: str) -> torch.Tensor:
        if self.mode != "eager":
            return DeferredFileTensor(source, cache=self.mode == "cache")
        if self.place is not None:
            return self.place(source.read())
        if self.mmap:
            tensor = source.mapped()
            if tensor is not None:
                return tensor
        tensor = source.allocate()
        self.pending.append((source, tensor))
        return tensor

    def _read_pending(self) -> None:
        """Reads the tensors allocated so far, on every core: half of the time goes into fresh memory."""
        nbytes = sum(tensor.nbytes for _, tensor in self.pending)
        in_threads(FileSource.fill, self.pending, nbytes, min(_READ_THREADS, os.cpu_count() or 1))
        self.pending.clear()

    def _view(self, key: str, metadata: dict) -> torch.Tensor:
        base_key = metadata["key"]
        base_kind = self._metadata(base_key)
        if base_kind.get(TYPE) not in ("TorchTensorSerializer", "cstorch.Tensor", "cstorch.Buffer"):
            raise ValueError(f"its base {base_key!r} is not a tensor")
        if base_kind[TYPE] == "cstorch.Buffer" and base_key not in self.done:
            info = self.reader.info(base_key)
            self.done[base_key] = self._tensor(FileSource(self.reader, base_key, torch.uint8, info.shape), base_key)
        base = self.leaf(base_key)
        if self.mode == "eager":
            return ViewSource(None, metadata, f"{self.reader.path}: {key!r}").over(base)
        source = ViewSource(base._cell, metadata, f"{key!r} in {self.reader.path}")
        return DeferredFileTensor(source, cache=self.mode == "cache")

    def _fill(self, metadata: dict) -> torch.Tensor:
        value = metadata["fill_value"]
        value = complex(*value) if metadata[TYPE] == "cstorch.ComplexFill" else value
        shape, dtype = torch.Size(metadata["shape"]), DTYPES[metadata["dtype"]]
        if not isinstance(value, (bool, int, float, complex)) or any(dim < 0 for dim in shape):
            raise ValueError("the fill is not a number, or the shape is negative")
        if self.mode != "eager":
            return DeferredFullTensor(shape, dtype, value)
        tensor = filled(shape, dtype, value)
        return self.place(tensor) if self.place is not None else tensor

    def _numpy(self, key: str, metadata: dict, scalar: bool) -> Any:
        array = self.reader.read(key)
        dtype, shape = np.dtype(metadata["numpy_dtype"]), tuple(metadata["shape"])
        if dtype.hasobject or dtype.kind not in "biufcSUMm":
            raise ValueError(f"dtype {dtype}")
        if array.dtype != dtype:
            if array.dtype != np.uint8 or array.nbytes != math.prod(shape) * dtype.itemsize:
                raise ValueError("its size is not that of its shape and dtype")
            array = np.frombuffer(array.tobytes(), dtype) if array.nbytes else np.empty(shape, dtype)
        array = array.reshape(shape)
        return array[()] if scalar else array.copy() if not array.flags.writeable else array

    def _unpickled(self, key: str) -> Any:
        if not self.allow_pickle:
            raise StorageError(f"{self.reader.path}: {key!r} is pickled; see load(..., allow_pickle=True)")
        data = np.asarray(self.reader.attribute(key, BYTES)).tobytes()
        if importlib.util.find_spec("dill") is not None:
            import dill

            return dill.loads(data)
        return pickle.loads(data)
