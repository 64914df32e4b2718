"""Samples made up on the fly from a specification of their shapes and dtypes."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Union

import torch
from torch.utils.data import IterableDataset, get_worker_info

SampleSpec = Union[
    torch.Tensor,
    Callable[[int], torch.Tensor],
    list["SampleSpec"],
    tuple["SampleSpec", ...],
    dict[str, "SampleSpec"],
    OrderedDict[str, "SampleSpec"],
    NamedTuple,
]


class SyntheticDataset(IterableDataset):
    """Iterable of samples with the structure of `sample_spec`, for compile checks and benchmarks without data.

    In a torch DataLoader with workers, worker w of n yields the samples of index w, w + n, w + 2n, ..., so that all
    workers together yield each index once. Callables receive the index and so can tell samples apart.

    Args:
        sample_spec: a tensor, which each sample gets a clone of; a callable from the sample's index (int >= 0) to a
            tensor; or a list, tuple, dict, OrderedDict or NamedTuple of those, nested at will.
        num_samples: size of the dataset over all workers; None for no end, and no `len`.

    Raises:
        ValueError: a leaf of another type or an empty container, with its path in the specification; num_samples < 1.
        TypeError: num_samples that is not an int; `len` without num_samples; a callable that returns no tensor.

    API page: cerebras.pytorch.utils.data.SyntheticDataset
    """

    def __init__(self, sample_spec: SampleSpec, num_samples: int | None = None):
        super().__init__()
        _check(sample_spec, "sample_spec")
        if num_samples is not None:
            if isinstance(num_samples, bool) or not isinstance(num_samples, int):
                raise TypeError(f"SyntheticDataset: num_samples={num_samples!r}; use an int >= 1, or None for no end.")
            if num_samples < 1:
                raise ValueError(f"SyntheticDataset: num_samples={num_samples!r}; use an int >= 1, or None for no end.")
        self.sample_spec = sample_spec
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        while self.num_samples is None or index < self.num_samples:
            yield _sample(self.sample_spec, index, "sample_spec")
            index += stride

    def __len__(self) -> int:
        if self.num_samples is None:
            raise TypeError("This SyntheticDataset has no end and so no length. Give num_samples, or count steps.")
        return self.num_samples


def _children(spec: Any, path: str) -> list[tuple[str, Any]] | None:
    """(path, child) of a container, None for a leaf."""
    if isinstance(spec, dict):
        return [(f"{path}[{key!r}]", child) for key, child in spec.items()]
    if isinstance(spec, tuple) and hasattr(spec, "_fields"):
        return [(f"{path}.{name}", child) for name, child in zip(spec._fields, spec, strict=True)]
    if isinstance(spec, (list, tuple)):
        return [(f"{path}[{position}]", child) for position, child in enumerate(spec)]
    return None


def _check(spec: Any, path: str) -> None:
    if isinstance(spec, torch.Tensor):
        return
    children = _children(spec, path)
    if children is not None:
        if not children:
            raise ValueError(
                f"SyntheticDataset: {path} is an empty {type(spec).__name__}. Put a leaf in, or remove it."
            )
        for where, child in children:
            _check(child, where)
    elif not callable(spec):
        raise ValueError(
            f"SyntheticDataset: {path} is {spec!r} of type {type(spec).__name__}. A leaf is a torch.Tensor, or a "
            "callable from the sample's index to one; use a list, tuple, dict, OrderedDict or NamedTuple to nest them."
        )


def _sample(spec: Any, index: int, path: str) -> Any:
    if isinstance(spec, torch.Tensor):
        return spec.clone()
    children = _children(spec, path)
    if children is None:
        tensor = spec(index)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"SyntheticDataset: the callable at {path} returned {type(tensor).__name__} for sample {index}. "
                "Return a torch.Tensor, such as torch.as_tensor(value)."
            )
        return tensor
    values = [_sample(child, index, where) for where, child in children]
    if isinstance(spec, dict):
        items = zip(spec, values, strict=True)
        return OrderedDict(items) if isinstance(spec, OrderedDict) else dict(items)
    if isinstance(spec, tuple):
        return type(spec)(*values) if hasattr(spec, "_fields") else tuple(values)
    return values
