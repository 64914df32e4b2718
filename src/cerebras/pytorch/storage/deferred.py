"""Tensors whose values are not in memory: they stand in a file, or are one constant.

A deferred tensor is a `torch.Tensor` without storage. Notes:
1. Each operation that reads it obtains the values, and drops them afterwards unless the tensor caches.
2. An operation that writes to it (`add_`, `copy_`, an optimizer's update) gives it memory of its own first, once and for
   all: a write is never lost. Its aliases (`detach()`, `nn.Parameter(t)`, `.data`) share that memory.
3. Indexing gives an ordinary tensor with a copy of the values; writing to that copy does not change the deferred tensor.
   `t[2:5]` and `t[3]` read only those rows where the file permits.
4. Pickling and `torch.save` store the values, so the result does not depend on the checkpoint file.
"""

from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Source(Protocol):
    """Where the values come from. `read` returns new memory, except where a view's base is in memory already."""

    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> torch.Tensor: ...

    def read_rows(self, start: int, stop: int) -> torch.Tensor: ...

    def describe(self) -> str: ...


class _Cell:
    """What aliases of one deferred tensor share.

    Attributes:
        data: the values in memory: the cache, or what has been written to the tensor.
        owned: `data` has been written to and is no longer what the source says.
    """

    __slots__ = ("source", "cache", "data", "owned")

    def __init__(self, source: Source, cache: bool):
        self.source = source
        self.cache = cache
        self.data: torch.Tensor | None = None
        self.owned = False

    def get(self) -> torch.Tensor:
        if self.data is not None:
            return self.data
        with torch.no_grad():
            data = self.source.read()
        if self.cache:
            self.data = data
        return data

    def own(self) -> torch.Tensor:
        if not self.owned:
            share = getattr(self.source, "own", None)  # a view shares the memory of the tensor it is a part of
            self.data = share() if share is not None else self.get()
            self.owned = True
        return self.data


_FACTORIES = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


class DeferredTensor(torch.Tensor):
    """A tensor whose values are obtained when an operation needs them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Source, cache: bool = False, *, _cell: _Cell | None = None):
        self = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device="cpu")
        self._cell = _cell if _cell is not None else _Cell(source, cache)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredTensor):
            if func in (aten.detach.default, aten.alias.default):
                return type(first)._alias(first)
            rows = first._rows_of(func, args, kwargs)
            if rows is not None:
                return rows
            if func in _FACTORIES:
                return func(torch.empty(first.shape, dtype=first.dtype, device="cpu"), *args[1:], **kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(
                f"{func}: the shape of a deferred tensor cannot be changed in place ({first!r}). "
                "Instead: use the out-of-place operation, or take t.clone() first."
            )
        owners = {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, DeferredTensor):
                        owners[id(tensor._cell.own())] = tensor
        args, kwargs = pytree.tree_map_only(DeferredTensor, lambda tensor: tensor._cell.get(), (args, kwargs))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda tensor: owners.get(id(tensor), tensor), out) if owners else out

    @classmethod
    def _alias(cls, other: "DeferredTensor") -> "DeferredTensor":
        return cls(other._cell.source, _cell=other._cell)

    def _rows_of(self, func, args, kwargs) -> torch.Tensor | None:
        """The result of a slice or select along the first dimension, reading only these rows; None for other calls."""
        if self._cell.data is not None or self._cell.cache or not self.shape or kwargs:
            return None
        size = self.shape[0]
        if func is aten.select.int and args[1] in (0, -self.dim()):
            index = args[2] + size if args[2] < 0 else args[2]
            if 0 <= index < size:
                return self._cell.source.read_rows(index, index + 1)[0]
        elif func is aten.slice.Tensor and (args[1] if len(args) > 1 else 0) in (0, -self.dim()):
            step = args[4] if len(args) > 4 else 1
            start, stop, _ = slice(args[2] if len(args) > 2 else None, args[3] if len(args) > 3 else None).indices(size)
            rows = self._cell.source.read_rows(start, max(start, stop))
            return rows if step == 1 else rows[::step]
        return None

    def _materialize(self) -> torch.Tensor:
        """The values as an ordinary tensor; the tensor's own memory where it has some, else new memory."""
        data = self._cell.get()
        return (
            data.requires_grad_()
            if self.requires_grad and not data.requires_grad and data is not self._cell.data
            else data
        )

    @property
    def is_deferred(self) -> bool:
        """Whether the values are still only in the source: nothing was cached and nothing written."""
        return self._cell.data is None

    def __repr__(self, *, tensor_contents=None) -> str:
        where = "in memory" if self._cell.owned else self._cell.source.describe()
        return f"{type(self).__name__}({where}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return self.detach()._materialize().__format__(spec)

    def __reduce_ex__(self, protocol):
        values = self.detach()._materialize()
        if isinstance(self, torch.nn.Parameter):
            values = torch.nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        cell = _Cell(self._cell.source, self._cell.cache)
        if self._cell.owned:
            cell.data, cell.owned = self._cell.data.clone(), True
        copy = type(self)(cell.source, _cell=cell)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        elif self.requires_grad:
            copy.requires_grad_()
        memo[id(self)] = copy
        return copy

    # These read memory without passing through an operation.

    def numpy(self, *, force: bool = False):
        return self._materialize().numpy(force=force)

    def __array__(self, *args, **kwargs):
        return self._materialize().__array__(*args, **kwargs)

    def tolist(self):
        return self._materialize().tolist()

    def __dlpack__(self, *args, **kwargs):
        return self._materialize().__dlpack__(*args, **kwargs)


class DeferredFileTensor(DeferredTensor):
    """A tensor that is read from its checkpoint file at each access, or at the first only (`map_location="cache"`)."""


class FillSource:
    """One constant."""

    def __init__(self, shape, dtype: torch.dtype, value: Any):
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.value = value

    def read(self) -> torch.Tensor:
        return filled(self.shape, self.dtype, self.value)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        return filled((stop - start, *self.shape[1:]), self.dtype, self.value)

    def describe(self) -> str:
        return f"fill={self.value!r}"


def filled(shape, dtype: torch.dtype, value: Any) -> torch.Tensor:
    """An ordinary CPU tensor of one value, for every dtype."""
    with torch.device("cpu"):
        try:
            return torch.full(tuple(shape), value, dtype=dtype)
        except (RuntimeError, NotImplementedError):  # a dtype without fill kernel
            return torch.full((), value).to(dtype).expand(tuple(shape)).clone()


class DeferredFullTensor(DeferredTensor):
    """A constant tensor that holds no memory until something is written to it.

    Args:
        size: its shape.
        dtype: its dtype.
        value: its fill.
    """

    @staticmethod
    def __new__(cls, size, dtype: torch.dtype | None = None, value: Any = 0, *, _cell: _Cell | None = None):
        if _cell is None:
            dtype = dtype if dtype is not None else torch.get_default_dtype()
            _cell = _Cell(FillSource(size, dtype, value), cache=False)
        return DeferredTensor.__new__(cls, _cell.source, _cell=_cell)

    @property
    def fill_value(self) -> Any:
        """The constant, as a Python number."""
        return self._cell.source.value


class DeferredFill:
    """What a tensor resolver returns for a constant that was never materialised; stored as its fill.

    Args:
        shape: its shape.
        dtype: its dtype.
        value: a Python number.
    """

    def __init__(self, shape, dtype: torch.dtype, value: bool | int | float | complex):
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.value = value

    def __repr__(self) -> str:
        return f"DeferredFill({tuple(self.shape)}, {self.dtype}, {self.value!r})"
