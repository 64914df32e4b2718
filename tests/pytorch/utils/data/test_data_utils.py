"""Schedules, step counts and numpy conversion."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from cerebras.pytorch.utils.data.utils import (
    Schedule,
    bf16,
    compute_num_steps,
    from_numpy,
    infer_batch_size,
    is_bf16,
    to_numpy,
)

Range = Schedule.Range


@pytest.mark.parametrize(
    "interval",
    [Range(0, 1, 1, False), Range(2, 11, 3, False), Range(2, 11, 3, True), Range(2, 12, 3, True), Range(4, 5, 9, True)],
)
def test_a_range_agrees_with_counting_its_steps(interval):
    steps = list(interval)
    assert steps == sorted(set(steps))
    assert [step for step in range(40) if interval.match(step)] == steps
    assert len(interval) == len(steps)
    assert interval.final_step == steps[-1]
    for target in range(-1, steps[-1] + 1):
        assert interval.next_immediate_step(target) == min(step for step in steps if step >= target)
    with pytest.raises(ValueError, match="final step"):
        interval.next_immediate_step(steps[-1] + 1)


def test_a_schedule_agrees_with_counting_its_steps():
    schedule = Schedule([Range(3, 10, 4, True), Range(10, 12, 1, False), Range(20, 31, 5, False)])
    steps = [3, 7, 9, 10, 11, 20, 25, 30]
    assert list(schedule) == steps
    assert len(schedule) == len(steps)
    assert [step for step in range(-2, 40) if schedule.match(step)] == steps
    assert (schedule.start, schedule.final_step) == (3, 30)
    for target in range(31):
        assert schedule.next_immediate_step(target) == min(step for step in steps if step >= target)
    with pytest.raises(ValueError, match="final step is 30"):
        schedule.next_immediate_step(31)
    assert schedule.range() == [range(3, 10, 4), range(10, 12), range(20, 31, 5)]


def test_a_schedule_is_a_dataclass_that_can_be_copied_and_sent():
    schedule = Schedule([Range(start=0, end=9, step=2, include_last=True)])
    assert dataclasses.asdict(schedule) == {"intervals": [{"start": 0, "end": 9, "step": 2, "include_last": True}]}
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    shifted = copy.copy(schedule.intervals[0])
    shifted.start = shifted.next_immediate_step(3)
    assert len(shifted) == 3 and schedule.intervals[0].start == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule([]), "no intervals"),
        (lambda: Schedule([Range(0, 5, 1, False), Range(4, 9, 1, False)]), "before the end 5"),
        (lambda: Schedule([Range(5, 9, 1, False), Range(0, 4, 1, False)]), "ascending"),
        (lambda: Range(5, 5, 1, False), "empty"),
        (lambda: Range(0, 5, 0, False), "step=0"),
        (lambda: Range(-1, 5, 1, False), "start=-1"),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_needs_ranges_and_ints():
    with pytest.raises(TypeError, match=r"intervals\[0\]"):
        Schedule([(0, 5, 1, True)])
    with pytest.raises(TypeError, match="end=5.0"):
        Range(0, 5.0, 1, True)
    with pytest.raises(TypeError):
        Range(0, 5, 1)


LOADER = range(7)


class Endless:
    def __iter__(self):
        return iter(int, 1)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"num_steps": 5}, 5),
        ({"num_steps": 5, "initial_step": 100}, 5),
        ({"num_steps": 5, "max_steps": 3}, 5),
        ({"max_steps": 10, "initial_step": 4}, 6),
        ({"num_epochs": 2}, 14),
        ({"num_epochs": 2, "steps_per_epoch": 3}, 6),
        ({"num_epochs": 2, "max_steps": 10, "initial_step": 4}, 6),
        ({"num_epochs": 1, "grad_accum_steps": 3}, 3),
        ({"num_epochs": 2, "grad_accum_steps": 3}, 5),
        ({"num_epochs": 3, "grad_accum_steps": 3}, 7),
        ({"num_epochs": 1, "grad_accum_steps": 100}, 1),
        ({"num_steps": 5, "grad_accum_steps": 3}, 5),
    ],
)
def test_compute_num_steps(given, steps):
    assert compute_num_steps(LOADER, **given) == steps


@pytest.mark.parametrize(
    ("loader", "given", "message"),
    [
        (LOADER, {}, "all three are None"),
        (LOADER, {"num_steps": 3, "num_epochs": 1}, "exclude each other"),
        (LOADER, {"max_steps": 4, "initial_step": 4}, "nothing is left"),
        (LOADER, {"max_steps": 4, "initial_step": 5, "num_epochs": 1}, "nothing is left"),
        (LOADER, {"num_epochs": 1, "steps_per_epoch": 8}, "Use at most 7"),
        (LOADER, {"num_epochs": 1, "steps_per_epoch": 3, "grad_accum_steps": 3}, "Use at most 2"),
        (LOADER, {"num_steps": 0}, "num_steps=0"),
        (LOADER, {"num_epochs": 1, "grad_accum_steps": 0}, "grad_accum_steps=0"),
        (Endless(), {"num_epochs": 1}, "without a length"),
        ([], {"num_epochs": 1}, "no batch"),
    ],
)
def test_compute_num_steps_refuses_what_cannot_be_meant(loader, given, message):
    with pytest.raises(ValueError, match=message):
        compute_num_steps(loader, **given)


def test_an_endless_loader_needs_no_length_where_it_is_not_asked_for():
    assert compute_num_steps(Endless(), num_steps=3) == 3
    assert compute_num_steps(Endless(), num_epochs=2, steps_per_epoch=5) == 10
    with pytest.raises(TypeError, match="num_steps=True"):
        compute_num_steps(Endless(), num_steps=True)


def test_several_loaders_are_passed_through_one_after_the_other():
    assert compute_num_steps([LOADER, range(3)], num_epochs=1) == 10


def test_steps_per_epoch_without_epochs_is_said_to_have_no_effect():
    with pytest.warns(UserWarning, match="no effect"):
        assert compute_num_steps(LOADER, num_steps=3, steps_per_epoch=2) == 3


def test_infer_batch_size():
    two = torch.zeros(2, 3)
    assert infer_batch_size({"a": [two, two], "b": torch.tensor(1.0)}) == 2
    assert infer_batch_size({"a": two, "b": torch.zeros(3)}) is None
    assert infer_batch_size([]) is None
    assert infer_batch_size(two, 2) == 2
    assert infer_batch_size(two, 3) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(6, 4)[::2, 1:],
        torch.tensor(1.5),
        torch.zeros(0, 3),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_numpy_and_back_keeps_dtype_shape_and_bits(tensor, dtype):
    tensor = tensor.to(dtype)
    array = to_numpy(tensor)
    back = from_numpy(array)
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    assert is_bf16(array) == is_bf16(array.dtype) == (dtype == torch.bfloat16)


def test_plain_int16_is_not_taken_for_bfloat16():
    assert from_numpy(np.arange(3, dtype=np.int16)).dtype == torch.int16
    assert is_bf16(bf16) and not is_bf16(np.dtype(np.int16)) and not is_bf16(np.int16)


def test_slices_and_copies_of_a_bfloat16_array_stay_bfloat16():
    array = to_numpy(torch.arange(6).bfloat16())
    assert from_numpy(array[2:].copy()).tolist() == [2.0, 3.0, 4.0, 5.0]


def test_awkward_arrays_are_copied_rather_than_refused():
    read_only = np.arange(3)
    read_only.flags.writeable = False
    assert from_numpy(read_only).tolist() == [0, 1, 2]
    assert from_numpy(np.arange(3)[::-1]).tolist() == [2, 1, 0]
    assert from_numpy(np.arange(3, dtype=">i4")).tolist() == [0, 1, 2]
    assert from_numpy(np.float32(3)).item() == 3.0


def test_conversion_shares_memory_and_detaches():
    array = np.zeros(3)
    from_numpy(array)[0] = 1
    assert array[0] == 1
    tensor = torch.zeros(3, requires_grad=True)
    to_numpy(tensor)[0] = 2
    assert tensor[0].item() == 2


def test_conversion_names_the_wrong_type():
    with pytest.raises(TypeError, match="list"):
        from_numpy([1])
    with pytest.raises(TypeError, match="ndarray"):
        to_numpy(np.zeros(1))
