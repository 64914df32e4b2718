"""Walks over nested data: visit, map and compare the leaves of lists, tuples, dicts and registered types.

A *scope* is the path of a leaf as a list of str: dict keys as `str(key)`, sequence positions (named tuples too) as
their index. `".".join(scope)` is the name of a tensor in a checkpoint or a batch.
"""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Generator, Iterable
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Scope = list[str]
Visit = Generator[tuple[Scope, Any], None, None]

_visit_fns: dict[type, Callable[[Any], Visit]] = {}


def register_visit_fn(*types: type) -> Callable[[Callable[[Any], Visit]], Callable[[Any], Visit]]:
    """Decorator that makes instances of `types`, and of their subclasses, visitable.

    The function takes an instance and yields `(scope, item)`, the scope relative to the instance. Items are visited
    further.

    Raises:
        TypeError: no types, something that is not a class, or a function that is not callable.
        ValueError: a type that has a function already; call `unregister_visit_fn` first.
    """
    if not types or not all(isinstance(kind, type) for kind in types):
        raise TypeError(
            f"register_visit_fn takes one or more classes, got {types!r}. Write @register_visit_fn(MyBatch)."
        )

    def register(fn):
        if not callable(fn):
            raise TypeError(f"A visit function is called with the structure; {fn!r} is not callable.")
        for kind in types:
            if kind in _visit_fns:
                raise ValueError(f"{kind.__qualname__} has a visit function. Call unregister_visit_fn for it first.")
        _visit_fns.update(dict.fromkeys(types, fn))
        return fn

    return register


def unregister_visit_fn(*types: type) -> None:
    """Undoes `register_visit_fn`.

    Raises:
        ValueError: a type that is not registered.
    """
    for kind in types:
        if kind not in _visit_fns:
            raise ValueError(f"{kind!r} has no visit function to remove.")
        del _visit_fns[kind]


def find_visit_fn(struct: Any) -> Callable[[Any], Visit] | None:
    """The visit function of the nearest class in the instance's method resolution order, or None for a leaf."""
    for kind in type(struct).__mro__:
        if kind in _visit_fns:
            return _visit_fns[kind]
    return None


@register_visit_fn(list, tuple)
def visit_list_tuple(struct: list | tuple) -> Visit:
    """Items of a list, tuple or named tuple under their index."""
    for index, item in enumerate(struct):
        yield [str(index)], item


@register_visit_fn(dict, UserDict)
def visit_dict(struct: dict | UserDict) -> Visit:
    """Values of a mapping under `str(key)`."""
    for key, item in struct.items():
        yield [str(key)], item


def visit_structure(
    data_structure: Any,
    select_fn: Callable[[Any], bool],
    strict: bool = False,
    scope: Scope | None = None,
) -> Visit:
    """Yields `(scope, item)` of each item that `select_fn` accepts, depth first, in order; it is not entered.

    Args:
        data_structure: any nesting of list, tuple, dict, UserDict and registered types.
        select_fn: says which items to yield.
        strict: raise on a leaf that is not selected, instead of passing over it.
        scope: prefix of every scope.

    Raises:
        ValueError: `strict`, and a leaf that is not selected; names its path and type.
    """
    scope = list(scope or ())
    if select_fn(data_structure):
        yield scope, data_structure
        return
    fn = find_visit_fn(data_structure)
    if fn is not None:
        for path, item in fn(data_structure):
            yield from visit_structure(item, select_fn, strict, scope + list(path))
    elif strict:
        raise ValueError(
            f"{'.'.join(scope) or 'The structure itself'} is a {type(data_structure).__qualname__}, which is neither "
            f"selected nor a known container. Leave it out, or declare its class with register_visit_fn."
        )


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def visit_torch_tensors(data_structure: Any, strict: bool = False, scope: Scope | None = None) -> Visit:
    """`visit_structure` for tensors, on whatever device."""
    yield from visit_structure(data_structure, _is_tensor, strict, scope)


def visit_device_tensors(
    data_structure: Any, device_type: str, strict: bool = False, scope: Scope | None = None
) -> Visit:
    """`visit_structure` for tensors whose device has the type `device_type`, such as "cpu"."""
    yield from visit_structure(
        data_structure, lambda item: _is_tensor(item) and item.device.type == device_type, strict, scope
    )


def visit_lazy_tensors(data_structure: Any, strict: bool = False, scope: Scope | None = None) -> Visit:
    """`visit_structure` for tensors of the CSX device."""
    yield from visit_device_tensors(data_structure, "csx", strict, scope)


def map_structure(
    map_fn: Callable[[Scope, Any], Any],
    data_structure: Any,
    select_fn: Callable[[Any], bool],
    scope: Scope | None = None,
) -> Any:
    """A new structure in which each leaf that `select_fn` accepts is `map_fn(scope, leaf)`; other leaves are kept.

    Containers are those that torch's pytree knows: list, tuple, named tuple, dict, OrderedDict, defaultdict, deque,
    and classes registered with `torch.utils._pytree.register_pytree_node`.

    Raises:
        TypeError: a class that can be visited but not rebuilt, so its content would be left unmapped.
    """
    leaves, spec = tree_flatten(data_structure)
    mapped = []
    for path, leaf in zip(recurse_spec(spec, scope), leaves, strict=True):
        if select_fn(leaf):
            leaf = map_fn(path, leaf)
        elif (kind := type(leaf)) and find_visit_fn(leaf) is not None:
            raise TypeError(
                f"{'.'.join(path) or 'The structure itself'} is a {kind.__qualname__}: it can be visited, but torch "
                f"does not know how to rebuild it. Register it with torch.utils._pytree.register_pytree_node."
            )
        mapped.append(leaf)
    return tree_unflatten(mapped, spec)


def map_torch_tensors(
    map_fn: Callable[[Scope, torch.Tensor], Any], data_structure: Any, scope: Scope | None = None
) -> Any:
    """`map_structure` for tensors."""
    return map_structure(map_fn, data_structure, _is_tensor, scope)


def map_lazy_tensors(
    map_fn: Callable[[Scope, torch.Tensor], Any], data_structure: Any, scope: Scope | None = None
) -> Any:
    """`map_structure` for tensors of the CSX device."""
    return map_structure(map_fn, data_structure, lambda item: _is_tensor(item) and item.device.type == "csx", scope)


def _child_names(spec: TreeSpec, count: int) -> Iterable[str]:
    if spec.type in (dict, OrderedDict):
        return map(str, spec.context)
    if spec.type is defaultdict:
        return map(str, spec.context[1])
    return map(str, range(count))


def recurse_spec(spec: TreeSpec, scope: Scope | None = None) -> Generator[Scope, None, None]:
    """Scopes of the leaves of a pytree's spec, in the order of `tree_flatten`'s leaves."""
    scope = list(scope or ())
    if spec.is_leaf():
        yield scope
        return
    # torch 2.13 made the children a method; before that they were a field.
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    for name, child in zip(_child_names(spec, len(children)), children, strict=True):
        yield from recurse_spec(child, [*scope, name])


def diff(data_structure_1: Any, data_structure_2: Any) -> Generator[str, None, None]:
    """One line for each place where two structures differ: type, keys, length, shape, dtype or value.

    Tensors are compared bit for bit, NaN equal to NaN. Nothing is yielded for equal structures.
    """
    yield from _diff(data_structure_1, data_structure_2, [])


_ABSENT = object()


def _diff(one: Any, two: Any, scope: Scope) -> Generator[str, None, None]:
    where = ".".join(scope) or "<root>"
    if type(one) is not type(two):
        yield f"{where}: {type(one).__qualname__} against {type(two).__qualname__}"
    elif isinstance(one, torch.Tensor):
        if one.dtype != two.dtype:
            yield f"{where}: dtype {one.dtype} against {two.dtype}"
        elif one.shape != two.shape:
            yield f"{where}: shape {tuple(one.shape)} against {tuple(two.shape)}"
        elif one.device.type == "csx" or two.device.type == "csx":
            if one is not two:
                yield f"{where}: CSX tensors, whose values cannot be compared here"
        elif not torch.equal(one, two) and not _equal_with_nan(one, two):
            yield f"{where}: tensors of the same shape and dtype hold different values"
    elif isinstance(one, (dict, UserDict)):
        for key in one:
            if key not in two:
                yield f"{where}: key {key!r} is in the first only"
            else:
                yield from _diff(one[key], two[key], [*scope, str(key)])
        for key in two:
            if key not in one:
                yield f"{where}: key {key!r} is in the second only"
    elif (fn := find_visit_fn(one)) is not None:
        for first, second in zip_longest(fn(one), fn(two), fillvalue=_ABSENT):
            if first is _ABSENT or second is _ABSENT:
                path = (second if first is _ABSENT else first)[0]
                side = "second" if first is _ABSENT else "first"
                yield f"{'.'.join([*scope, *path])}: in the {side} only"
            elif first[0] != second[0]:
                yield f"{where}: item {'.'.join(first[0])} against {'.'.join(second[0])}"
            else:
                yield from _diff(first[1], second[1], [*scope, *first[0]])
    else:
        try:
            equal = bool(one == two)
        except (TypeError, ValueError, RuntimeError):  # numpy arrays: the truth of several values
            equal = repr(one) == repr(two)
        if not equal and not (one != one and two != two):
            yield f"{where}: {one!r} against {two!r}"


def _equal_with_nan(one: torch.Tensor, two: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return False
    both_nan = one.isnan() & two.isnan()
    return bool(((one == two) | both_nan).all())
