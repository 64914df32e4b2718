"""Schedules of steps, step counts, and numpy conversion.

API pages: cerebras.pytorch.utils.data.DataExecutor (`checkpoint_steps`), cerebras.pytorch.from_numpy and to_numpy.
"""

import bisect
import operator
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..nest import visit_torch_tensors

__all__ = [
    "Schedule",
    "bf16",
    "compute_num_steps",
    "from_numpy",
    "infer_batch_size",
    "is_bf16",
    "to_numpy",
    "visit_torch_tensors",
]


def _integer(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} ({type(value).__name__}); use an int >= {low}.")
    value = operator.index(value)
    if value < low:
        raise ValueError(f"{name}={value!r}; use an int >= {low}.")
    return value


@dataclass
class Schedule:
    """Zero-based steps, as a list of ranges in ascending order.

    Args:
        intervals: ranges that neither overlap nor go back; at least one.

    Raises:
        ValueError: no intervals, or intervals out of order.
        TypeError: an interval that is not a Schedule.Range.

    API page: cerebras.pytorch.utils.data.DataExecutor, `checkpoint_steps`.
    """

    @dataclass
    class Range:
        """Every `step`-th step from `start`, below `end`; also `end - 1` where `include_last`.

        Args:
            start: first step, >= 0.
            end: first step past the range, > start.
            step: distance of two steps, >= 1.
            include_last: whether `end - 1` belongs to the range although it may be off the grid.
        """

        start: int
        end: int
        step: int
        include_last: bool

        def __post_init__(self):
            self.start = _integer("Schedule.Range: start", self.start, 0)
            self.end = _integer("Schedule.Range: end", self.end, 1)
            self.step = _integer("Schedule.Range: step", self.step, 1)
            if self.end <= self.start:
                raise ValueError(
                    f"Schedule.Range: end={self.end} is not above start={self.start}, so the range is empty. "
                    "The end is exclusive: use start + 1 for a single step."
                )
            if not isinstance(self.include_last, bool):
                raise TypeError(f"Schedule.Range: include_last={self.include_last!r}; use True or False.")

        def range(self) -> range:
            """The grid as a builtin range, without the last step that `include_last` may add."""
            return range(self.start, self.end, self.step)

        def match(self, index: int) -> bool:
            """Whether the step `index` is in the range."""
            return index in self.range() or (self.include_last and index == self.end - 1)

        def __iter__(self) -> Iterator[int]:
            grid = self.range()
            yield from grid
            if self.include_last and self.end - 1 not in grid:
                yield self.end - 1

        def __len__(self) -> int:
            grid = self.range()
            return len(grid) + (self.include_last and self.end - 1 not in grid)

        @property
        def final_step(self) -> int:
            """The last step of the range."""
            return self.end - 1 if self.include_last else self.range()[-1]

        def next_immediate_step(self, target: int) -> int:
            """The first step of the range that is `target` or later.

            Raises:
                ValueError: `target` is past the final step.
            """
            if target <= self.start:
                return self.start
            on_grid = self.start + -(-(target - self.start) // self.step) * self.step
            if on_grid < self.end:
                return on_grid
            if self.include_last and target < self.end:
                return self.end - 1
            raise ValueError(f"No step of {self} is at {target} or later; its final step is {self.final_step}.")

    intervals: list[Range]

    def __post_init__(self):
        self.intervals = list(self.intervals)
        if not self.intervals:
            raise ValueError(
                "Schedule: no intervals. Give at least one Schedule.Range, or None in place of a schedule."
            )
        for position, interval in enumerate(self.intervals):
            if not isinstance(interval, Schedule.Range):
                raise TypeError(
                    f"Schedule: intervals[{position}] is a {type(interval).__name__}; "
                    "use Schedule.Range(start, end, step, include_last)."
                )
        for position, (one, two) in enumerate(zip(self.intervals, self.intervals[1:], strict=False), start=1):
            if two.start < one.end:
                raise ValueError(
                    f"Schedule: intervals[{position}] starts at {two.start}, before the end {one.end} of the interval "
                    "before it. Put the intervals in ascending order without overlap."
                )

    def match(self, index: int) -> bool:
        """Whether the step `index` is in the schedule."""
        position = bisect.bisect_right(self.intervals, index, key=lambda interval: interval.start) - 1
        return position >= 0 and self.intervals[position].match(index)

    def __iter__(self) -> Iterator[int]:
        for interval in self.intervals:
            yield from interval

    def __len__(self) -> int:
        return sum(map(len, self.intervals))

    def range(self) -> list[range]:
        """The grid of each interval as a builtin range, without the steps that `include_last` may add."""
        return [interval.range() for interval in self.intervals]

    @property
    def start(self) -> int:
        """The first step."""
        return self.intervals[0].start

    @property
    def final_step(self) -> int:
        """The last step."""
        return self.intervals[-1].final_step

    def next_immediate_step(self, target: int) -> int:
        """The first step of the schedule that is `target` or later.

        Raises:
            ValueError: `target` is past the final step.
        """
        for interval in self.intervals:
            if target <= interval.final_step:
                return interval.next_immediate_step(target)
        raise ValueError(f"No step of the schedule is at {target} or later; its final step is {self.final_step}.")


def _length(dataloader: Any) -> int | None:
    """Batches of one pass, None where the loader cannot tell; a list of loaders is passed through one by one."""
    if isinstance(dataloader, (list, tuple)) and dataloader and all(hasattr(one, "__iter__") for one in dataloader):
        lengths = [_length(one) for one in dataloader]
        return None if None in lengths else sum(lengths)
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def compute_num_steps(
    dataloader: Any,
    initial_step: int = 0,
    num_steps: int | None = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    grad_accum_steps: int = 1,
) -> int:
    """Number of steps that a run has still to do. A step is one optimizer update, that is `grad_accum_steps` batches.

    - `num_steps`: the answer itself; it takes precedence over `max_steps` and excludes `num_epochs`.
    - `max_steps`: the global step to end at, so `max_steps - initial_step` remain. With `num_epochs`, the smaller.
    - `num_epochs`: passes over the data, of `steps_per_epoch` steps each, or of `len(dataloader)` batches. Batches
      that do not fill an update at the end of a pass are completed by the next pass; those at the end of the last pass
      give one more step, for which the data starts again. No batch is dropped.

    Args:
        dataloader: gives the batches of a pass by `len`; a list of loaders gives their sum.
        initial_step: the global step at which the run starts, >= 0.
        num_steps, max_steps, num_epochs, steps_per_epoch: ints >= 1, or None.
        grad_accum_steps: batches per update, >= 1.

    Raises:
        ValueError: none of num_steps, max_steps and num_epochs; num_steps with num_epochs; a number out of range;
            nothing left below max_steps; num_epochs for a loader without a length and without steps_per_epoch;
            steps_per_epoch above what one pass gives.
        TypeError: a number that is not an int.
    """
    initial_step = _integer("compute_num_steps: initial_step", initial_step, 0)
    grad_accum_steps = _integer("compute_num_steps: grad_accum_steps", grad_accum_steps, 1)
    given = {
        name: None if value is None else _integer(f"compute_num_steps: {name}", value, 1)
        for name, value in (
            ("num_steps", num_steps),
            ("max_steps", max_steps),
            ("num_epochs", num_epochs),
            ("steps_per_epoch", steps_per_epoch),
        )
    }
    num_steps, max_steps, num_epochs, steps_per_epoch = given.values()

    if num_steps is not None and num_epochs is not None:
        raise ValueError(
            f"compute_num_steps: num_steps={num_steps} and num_epochs={num_epochs} exclude each other. "
            "Leave one of them None."
        )
    if num_steps is None and max_steps is None and num_epochs is None:
        raise ValueError("compute_num_steps: give num_steps, max_steps or num_epochs; all three are None.")
    if steps_per_epoch is not None and num_epochs is None:
        warnings.warn(
            f"compute_num_steps: steps_per_epoch={steps_per_epoch} has no effect without num_epochs.", stacklevel=2
        )
    remaining = None
    if max_steps is not None:
        remaining = max_steps - initial_step
        if remaining <= 0:
            raise ValueError(
                f"compute_num_steps: nothing is left to do, initial_step={initial_step} has reached "
                f"max_steps={max_steps}. Raise max_steps, or use num_steps to run further from here."
            )
    if num_steps is not None:
        return num_steps
    if num_epochs is None:
        return remaining

    batches = _length(dataloader)
    if batches == 0:
        raise ValueError("compute_num_steps: the data loader gives no batch, so an epoch has no steps.")
    if steps_per_epoch is not None:
        if batches is not None and steps_per_epoch * grad_accum_steps > batches:
            raise ValueError(
                f"compute_num_steps: steps_per_epoch={steps_per_epoch} needs {steps_per_epoch * grad_accum_steps} "
                f"batches a pass, the data loader gives {batches}. Use at most {batches // grad_accum_steps}, "
                "or more num_epochs."
            )
        total = num_epochs * steps_per_epoch
    elif batches is None:
        raise ValueError(
            f"compute_num_steps: num_epochs={num_epochs} for a data loader without a length. Give steps_per_epoch, "
            "or num_steps in place of num_epochs, or define __len__."
        )
    else:
        total = -(-num_epochs * batches // grad_accum_steps)  # rounded up
    return total if remaining is None else min(total, remaining)


def infer_batch_size(data: Any, batch_size: int | None = None) -> int | None:
    """The common first dimension of all tensors in a nested batch.

    Args:
        data: nested structure of tensors; scalars (0-d tensors) have no batch dimension and do not count.
        batch_size: the size that the tensors are expected to have, if known.

    Returns:
        The size, or `batch_size` where there is no tensor; None where tensors differ from it or from each other.
    """
    for _, tensor in visit_torch_tensors(data):
        if tensor.ndim == 0:
            continue
        if batch_size is None:
            batch_size = tensor.shape[0]
        elif batch_size != tensor.shape[0]:
            return None
    return batch_size


bf16 = np.dtype(np.int16, metadata={"bfloat16": True})
"""numpy has no bfloat16: its bits travel as int16 whose dtype carries this mark."""


def is_bf16(dtype_or_array: np.ndarray | np.dtype, /) -> bool:
    """Whether a numpy array or dtype stands for bfloat16: marked as `bf16`, or the ml_dtypes type of that name."""
    dtype = dtype_or_array.dtype if isinstance(dtype_or_array, (np.ndarray, np.generic)) else np.dtype(dtype_or_array)
    return dtype.name == "bfloat16" or bool((dtype.metadata or {}).get("bfloat16"))


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A tensor of a numpy array's shape and dtype; arrays marked as `bf16` become torch.bfloat16.

    The memory is shared where torch can: not for read-only, byte-swapped or negatively strided arrays.

    Raises:
        TypeError: something other than an array or numpy scalar, or a dtype that torch does not have.

    API page: cerebras.pytorch.from_numpy
    """
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(f"from_numpy takes a numpy array, got {type(array).__name__}. Use torch.as_tensor for others.")
    bfloat16 = is_bf16(array)
    array = np.asarray(array)
    if bfloat16:
        array = array.view(np.int16)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array of a tensor's shape and dtype, detached; torch.bfloat16 becomes int16 bits marked as `bf16`.

    The memory is shared with a tensor on the CPU.

    Raises:
        TypeError: something other than a tensor, or a dtype that numpy does not have.
        RuntimeError: a CSX tensor whose value does not exist yet, inside a traced step.

    API page: cerebras.pytorch.to_numpy
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_numpy takes a torch.Tensor, got {type(tensor).__name__}. Use numpy.asarray for others.")
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(bf16)
    return tensor.resolve_conj().resolve_neg().numpy()
