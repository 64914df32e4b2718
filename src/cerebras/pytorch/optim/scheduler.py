"""Schedulers of a hyper-parameter of an optimizer: one closed form each, for learning rate and weight decay alike.

A scheduler is a host program. `step()` counts and writes Python floats, computed in double precision, into the
optimizer's groups; it reads no tensor and creates none. An engine that captured the training step calls it again at
each later step and passes the values in.
"""
# ruff: noqa: UP006, UP007, UP035, UP045  (annotations spelled as the published signatures are, tools compare them)

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import Any, Callable, Dict, List, Optional, Union

import torch

TagsT = Optional[Union[str, List[Optional[str]]]]

ADJUST_KEY = "adjust_learning_rate"  # what ScalePerParam multiplies by, in a parameter group


def _plain(value: Any) -> Any:
    """A value from a checkpoint without its 0-d tensors."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _tag_set(tags: Any) -> Optional[set]:
    if tags is None:
        return None
    return {tags} if isinstance(tags, str) else set(tags)


class Scheduler(ABC):
    """Base class of all schedulers.

    A subclass names the hyper-parameter in `param_group_key` and computes its value from `self.last_epoch`, the number
    of steps taken, in `_get_closed_form()`. It sets what it needs before it calls this constructor, which already
    writes the value of step 0 into the groups.

    Args:
        optimizer: whose groups are written to; any `torch.optim.Optimizer`.
        total_iters: how many steps the schedule takes, None where it has no end.
        last_epoch: the step before the first one.
        param_group_tags: write only to groups that have one of these in their "tags"; None in the list stands for
            groups without tags.

    Raises:
        ValueError: no group has any of the tags.
    """

    param_group_key: str = ""
    _state_names: Dict[str, str] = {}  # attribute: its name in a checkpoint, where they differ

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_iters: int,
        last_epoch: int = -1,
        param_group_tags: TagsT = None,
    ):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(self).__name__} needs a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        if total_iters is not None and total_iters < 0:
            raise ValueError(f"{type(self).__name__}: total_iters must not be negative, got {total_iters}.")
        self.optimizer = optimizer
        self.total_iters = total_iters
        self.last_epoch = last_epoch
        self.param_group_tags = _tag_set(param_group_tags)
        self._step_count = 0
        self._last_value: List[Optional[float]] = []
        self._check_tags()
        if self.param_group_key and hasattr(optimizer, "_scheduled_keys"):
            optimizer._scheduled_keys.add(self.param_group_key)
        self._advance()

    # for subclasses

    @abstractmethod
    def _get_closed_form(self) -> float:
        """The value after `self.last_epoch` steps."""

    def _values(self) -> List[float]:
        """The value for each group of the optimizer."""
        return [float(self._get_closed_form())] * len(self.optimizer.param_groups)

    def _at(self, epoch: int) -> "Scheduler":
        """Moves the count without writing anything; how a scheduler reads the ones inside it."""
        self.last_epoch = epoch
        return self

    # progress

    def step(self, *args, **kwargs) -> None:
        """Counts one step and writes the new value into the groups."""
        self._advance()

    def _advance(self) -> None:
        self.last_epoch += 1
        self._step_count += 1
        self.update_groups(self._values())

    def update_groups(self, values: List[float]) -> None:
        """Writes one value for each group into those that the tags select."""
        self._last_value = [None] * len(values)
        if not self.param_group_key:
            return
        for i, (group, value) in enumerate(zip(self.optimizer.param_groups, values)):
            if not self._should_apply_to_param_group(group):
                continue
            self._last_value[i] = value
            if isinstance(group.get(self.param_group_key), torch.Tensor):
                group[self.param_group_key].fill_(value)
            else:
                group[self.param_group_key] = value

    def get(self) -> List[float]:
        """The value for each group at the current step, whether the tags select it or not."""
        return self._values()

    def get_last_value(self) -> List[Optional[float]]:
        """The value last written to each group, None for a group that the tags leave out."""
        return list(self._last_value)

    # groups

    def _should_apply_to_param_group(self, group: Dict[str, Any]) -> bool:
        if self.param_group_tags is None:
            return True
        tags = _tag_set(group.get("tags"))
        return bool(tags & self.param_group_tags) if tags else None in self.param_group_tags

    def _check_tags(self) -> None:
        groups = self.optimizer.param_groups
        if not any(map(self._should_apply_to_param_group, groups)):
            known = sorted({str(tag) for group in groups for tag in _tag_set(group.get("tags")) or {None}})
            raise ValueError(
                f"{type(self).__name__}: no parameter group has one of the tags "
                f"{sorted(map(str, self.param_group_tags))}; the groups have {known}."
            )

    # checkpoints

    def state_dict(self) -> Dict[str, Any]:
        """The progress and the settings, without tensors."""
        state = {}
        for name, value in vars(self).items():
            if name == "optimizer":
                continue
            if isinstance(value, Scheduler):
                value = value.state_dict()
            elif isinstance(value, list):
                value = [v.state_dict() if isinstance(v, Scheduler) else v for v in value]
            elif isinstance(value, set):
                value = sorted(value, key=str)
            elif callable(value):
                continue
            state[self._state_names.get(name, name)] = value
        return state

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes over progress and settings from a `state_dict()`; numbers may be 0-d tensors.

        As in torch, the settings of the checkpoint win over those of the constructor, and the optimizer's groups are
        left as they are: they belong to the optimizer's own state. Unknown keys are ignored.

        Raises:
            ValueError: the checkpoint holds another number of inner schedulers.
        """
        for name in vars(self):
            key = self._state_names.get(name, name)
            if name in ("optimizer", "param_group_tags") or key not in state_dict:
                continue
            mine, saved = getattr(self, name), state_dict[key]
            if isinstance(mine, Scheduler):
                mine.load_state_dict(saved)
            elif isinstance(mine, list) and any(isinstance(v, Scheduler) for v in mine):
                if len(mine) != len(saved):
                    raise ValueError(
                        f"The saved {type(self).__name__} has {len(saved)} schedulers inside, this one {len(mine)}."
                    )
                for inner, inner_state in zip(mine, saved):
                    inner.load_state_dict(inner_state)
            else:
                setattr(self, name, _plain(saved))

    # checks

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}: {message}")


class ConstantScheduler(Scheduler):
    """Always `val`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        val: float,
        total_iters: Optional[int] = None,
        param_group_tags: TagsT = None,
    ):
        self.val = val
        super().__init__(optimizer, total_iters=total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        return self.val


class PolynomialScheduler(Scheduler):
    """From `initial_val` to `end_val` in `total_iters` steps, along (1 - step / total_iters) ** power.

    With `cycle`, the period grows to the next multiple of `total_iters` each time its end is passed, as in TensorFlow's
    PolynomialDecay; otherwise the value stays at `end_val`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: TagsT = None,
    ):
        self.initial_val = initial_val
        self.end_val = end_val
        self.power = power
        self.cycle = cycle
        super().__init__(optimizer, total_iters=total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        step, period = self.last_epoch, self.total_iters
        if period == 0:
            return self.end_val
        if self.cycle:
            period *= max(1, math.ceil(step / period))
        step = min(step, period)
        return (self.initial_val - self.end_val) * (1 - step / period) ** self.power + self.end_val


class LinearScheduler(PolynomialScheduler):
    """From `initial_val` to `end_val` in `total_iters` equal steps; see PolynomialScheduler for `cycle`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: TagsT = None,
    ):
        super().__init__(optimizer, initial_val, end_val, total_iters, 1.0, cycle, param_group_tags)


class ExponentialScheduler(Scheduler):
    """initial_val * decay_rate ** (step / total_iters); with `staircase` the exponent is rounded down."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: TagsT = None,
    ):
        self._require(total_iters > 0, f"total_iters must be positive, got {total_iters}.")
        self.initial_val = initial_val
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, total_iters=total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        exponent = self.last_epoch / self.total_iters
        return self.initial_val * self.decay_rate ** (math.floor(exponent) if self.staircase else exponent)


class InverseExponentialTimeDecayScheduler(Scheduler):
    """initial_val / (1 + decay_rate * step ** step_exponent / total_iters); `staircase` rounds the quotient down."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: TagsT = None,
    ):
        self._require(total_iters > 0, f"total_iters must be positive, got {total_iters}.")
        self.initial_val = initial_val
        self.step_exponent = step_exponent
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, total_iters=total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        time = self.last_epoch**self.step_exponent / self.total_iters
        return self.initial_val / (1 + self.decay_rate * (math.floor(time) if self.staircase else time))


class InverseSquareRootDecayScheduler(Scheduler):
    """initial_val * scale / sqrt(max(step, warmup_steps))."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1.0,
        param_group_tags: TagsT = None,
    ):
        self._require(warmup_steps > 0, f"warmup_steps must be positive, got {warmup_steps}.")
        self.initial_val = initial_val
        self.scale = scale
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        return self.initial_val * self.scale / math.sqrt(max(self.last_epoch, self.warmup_steps))


class CosineDecayScheduler(Scheduler):
    """From `initial_val` to `end_val` along half a cosine in `total_iters` steps, and `end_val` from then on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        param_group_tags: TagsT = None,
    ):
        self.initial_val = initial_val
        self.end_val = end_val
        super().__init__(optimizer, total_iters=total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        if self.last_epoch >= self.total_iters:
            return self.end_val
        return _half_cosine(self.initial_val, self.end_val, self.last_epoch / self.total_iters)


def _half_cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * fraction)) / 2


class StepScheduler(Scheduler):
    """initial_val * gamma for every `step_size` steps taken."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        step_size: int,
        gamma: float,
        param_group_tags: TagsT = None,
    ):
        self._require(step_size > 0, f"step_size must be positive, got {step_size}.")
        self.initial_val = initial_val
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        return self.initial_val * self.gamma ** (self.last_epoch // self.step_size)


class MultiStepScheduler(Scheduler):
    """initial_val * gamma for every milestone reached."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        gamma: float,
        milestones: List[int],
        param_group_tags: TagsT = None,
    ):
        self.initial_val = initial_val
        self.gamma = gamma
        self.milestones = sorted(milestones)
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        return self.initial_val * self.gamma ** bisect_right(self.milestones, self.last_epoch)


class LambdaScheduler(Scheduler):
    """initial_val times the functions of the step that `set_value_lambda` returns; override it.

    The default functions, step / 30 and 0.95 ** step, are an example: a rise followed by a decay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, param_group_tags: TagsT = None):
        self.initial_val = initial_val
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> List[Callable[[int], float]]:
        """Functions of the number of steps taken; their product is the factor of `initial_val`."""
        return [lambda step: step / 30, lambda step: 0.95**step]

    def _get_closed_form(self):
        return self.initial_val * math.prod(factor(self.last_epoch) for factor in self.set_value_lambda())


class CosineAnnealingScheduler(Scheduler):
    """Between `initial_val` and `eta_min` along a cosine of half period `T_max`, without end."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: TagsT = None,
    ):
        self._require(T_max > 0, f"T_max must be positive, got {T_max}.")
        self.initial_val = initial_val
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        return _half_cosine(self.initial_val, self.eta_min, self.last_epoch / self.T_max)


class CosineAnnealingWarmRestartsScheduler(Scheduler):
    """From `initial_val` towards `eta_min` along half a cosine, restarted after T_0, T_0 * T_mult, ... steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: TagsT = None,
    ):
        self._require(T_0 > 0 and T_0 == int(T_0), f"T_0 must be a positive integer, got {T_0}.")
        self._require(T_mult >= 1 and T_mult == int(T_mult), f"T_mult must be an integer of 1 or more, got {T_mult}.")
        self.initial_val = initial_val
        self.T_0 = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        step, period = self.last_epoch, self.T_0
        if self.T_mult == 1:
            step %= period
        else:
            while step >= period:
                step -= period
                period *= self.T_mult
        return _half_cosine(self.initial_val, self.eta_min, step / period)


class MultiplicativeScheduler(Scheduler):
    """initial_val * coefficient ** step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        coefficient: float,
        param_group_tags: TagsT = None,
    ):
        self.initial_val = initial_val
        self.coefficient = coefficient
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        return self.initial_val * self.coefficient**self.last_epoch


class CyclicScheduler(Scheduler):
    """Triangles between `base_val` and `max_val` (https://arxiv.org/abs/1506.01186).

    Args:
        optimizer: whose groups are written to.
        base_val: the value at the foot.
        max_val: the value at the top.
        step_size_up: steps from foot to top.
        step_size_down: steps from top to foot; as many as up where not given.
        mode: "triangular", "triangular2" (half the height after each cycle) or "exp_range" (height times
            gamma ** step).
        gamma: for "exp_range".
        scale_mode: "cycle" or "iterations". As in torch it has no effect on the three modes, which each have their own.
        param_group_tags: see Scheduler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_val: float,
        max_val: float,
        step_size_up: int = 2000,
        step_size_down: int = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str = "cycle",
        param_group_tags: TagsT = None,
    ):
        self._require(step_size_up > 0, f"step_size_up must be positive, got {step_size_up}.")
        if step_size_down is None:
            step_size_down = step_size_up
        self._require(step_size_down > 0, f"step_size_down must be positive, got {step_size_down}.")
        modes, scale_modes = ("triangular", "triangular2", "exp_range"), ("cycle", "iterations")
        self._require(mode in modes, f"mode must be one of {modes}, got {mode!r}.")
        self._require(scale_mode in scale_modes, f"scale_mode must be one of {scale_modes}, got {scale_mode!r}.")
        self.base_val = base_val
        self.max_val = max_val
        self.step_size_up = step_size_up
        self.step_size_down = step_size_down
        self.mode = mode
        self.gamma = gamma
        self.scale_mode = scale_mode
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        cycle, position = divmod(self.last_epoch, self.step_size_up + self.step_size_down)
        if position <= self.step_size_up:
            height = position / self.step_size_up
        else:
            height = 1 - (position - self.step_size_up) / self.step_size_down
        if self.mode == "triangular2":
            height /= 2.0**cycle
        elif self.mode == "exp_range":
            height *= self.gamma**self.last_epoch
        return self.base_val + (self.max_val - self.base_val) * height


class OneCycleScheduler(Scheduler):
    """Up from `initial_val` to `max_val` and down to initial_val / final_div_factor (https://arxiv.org/abs/1708.07120).

    Args:
        optimizer: whose groups are written to.
        initial_val: the value at the start.
        max_val: the value at the top.
        total_steps: steps of the whole cycle; the last value stays from then on.
        pct_start: the part of the cycle that goes up, in 0 .. 1.
        final_div_factor: see above.
        three_phase: come down to `initial_val`, as fast as up, before the descent to the final value.
        anneal_strategy: "cos" or "linear".
        param_group_tags: see Scheduler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        max_val: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 10000.0,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: TagsT = None,
    ):
        self._require(total_steps > 0, f"total_steps must be positive, got {total_steps}.")
        self._require(0 <= pct_start <= 1, f"pct_start must be in 0 .. 1, got {pct_start}.")
        self._require(final_div_factor > 0, f"final_div_factor must be positive, got {final_div_factor}.")
        self._require(
            anneal_strategy in ("cos", "linear"), f"anneal_strategy must be 'cos' or 'linear', got {anneal_strategy!r}."
        )
        self.initial_val = initial_val
        self.max_val = max_val
        self.total_steps = total_steps
        self.pct_start = pct_start
        self.final_div_factor = final_div_factor
        self.three_phase = three_phase
        self.anneal_strategy = anneal_strategy
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _get_closed_form(self):
        last = self.total_steps - 1
        top = self.pct_start * self.total_steps - 1
        final = self.initial_val / self.final_div_factor
        phases = [(top, self.initial_val, self.max_val)]
        if self.three_phase:
            phases += [(2 * top, self.max_val, self.initial_val), (last, self.initial_val, final)]
        else:
            phases += [(last, self.max_val, final)]
        begin, step = 0.0, self.last_epoch
        for end, start_val, end_val in phases:
            if step <= end and end > begin:
                fraction = (step - begin) / (end - begin)
                if self.anneal_strategy == "cos":
                    return _half_cosine(start_val, end_val, fraction)
                return start_val + (end_val - start_val) * fraction
            begin = max(begin, end)
        return final


class _Container(Scheduler):
    """What the schedulers that hold others share: the same optimizer and the same tags all through."""

    def _check_inner(self, schedulers: List[Scheduler], optimizer: torch.optim.Optimizer, tags: TagsT) -> None:
        self._require(len(schedulers) > 0, "needs at least one scheduler.")
        for i, inner in enumerate(schedulers):
            self._require(isinstance(inner, Scheduler), f"scheduler {i} is a {type(inner).__name__}.")
            self._require(inner.optimizer is optimizer, f"scheduler {i} has another optimizer.")
            self._require(
                inner.param_group_key == self.param_group_key or not self.param_group_key,
                f"scheduler {i} sets {inner.param_group_key!r}, not {self.param_group_key!r}.",
            )
            self._require(
                inner.param_group_tags == _tag_set(tags),
                f"scheduler {i} has the param_group_tags {inner.param_group_tags}, this one {_tag_set(tags)}; "
                "give them all the same.",
            )

    def _get_closed_form(self):
        raise NotImplementedError(f"{type(self).__name__} has one value for each group, see get().")


class SequentialScheduler(_Container):
    """One scheduler after the other; each counts its steps from the milestone at which it takes over.

    Args:
        optimizer: whose groups are written to.
        schedulers: in their order.
        milestones: the steps at which the second, third, ... take over; one less than there are schedulers.
        last_epoch: the step before the first one.
        param_group_tags: see Scheduler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: List[Scheduler],
        milestones: List[int],
        last_epoch: int = -1,
        param_group_tags: TagsT = None,
    ):
        self._check_inner(schedulers, optimizer, param_group_tags)
        self._require(
            len(milestones) == len(schedulers) - 1,
            f"{len(schedulers)} schedulers need {len(schedulers) - 1} milestones, got {len(milestones)}.",
        )
        self._require(list(milestones) == sorted(milestones), f"milestones must rise, got {list(milestones)}.")
        self._schedulers = list(schedulers)
        self._milestones = list(milestones)
        super().__init__(optimizer, total_iters=None, last_epoch=last_epoch, param_group_tags=param_group_tags)

    def _values(self):
        active = bisect_right(self._milestones, self.last_epoch)
        start = self._milestones[active - 1] if active else 0
        return self._schedulers[active]._at(self.last_epoch - start)._values()


class PiecewiseConstantScheduler(SequentialScheduler):
    """`vals[i]` from milestone i - 1 to milestone i.

    Args:
        optimizer: whose groups are written to.
        constant_cls: the class for one piece, ConstantLR or ConstantWD.
        vals: one more than there are milestones.
        milestones: where the next value starts.
        param_group_tags: see Scheduler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constant_cls: type,
        vals: List[float],
        milestones: List[int],
        param_group_tags: TagsT = None,
    ):
        self._require(
            len(vals) == len(milestones) + 1, f"{len(milestones)} milestones need {len(milestones) + 1} values."
        )
        lengths = [end - start for start, end in zip([0, *milestones], milestones)]
        pieces = [
            constant_cls(optimizer, val, total_iters=length, param_group_tags=param_group_tags)
            for val, length in zip(vals, [*lengths, None])
        ]
        super().__init__(optimizer, pieces, milestones, param_group_tags=param_group_tags)


class ChainedScheduler(_Container):
    """The first scheduler, multiplied by what each of the others has become relative to its own start."""

    def __init__(self, schedulers: List[Scheduler], param_group_tags: TagsT = None):
        self._require(len(schedulers) > 0, "needs at least one scheduler.")
        optimizer = schedulers[0].optimizer
        self._check_inner(schedulers, optimizer, param_group_tags)
        for i, inner in enumerate(schedulers[1:], start=1):
            self._require(
                all(value != 0 for value in inner._at(0)._values()),
                f"scheduler {i} starts at 0, so nothing can be relative to its start; put it first.",
            )
        self._schedulers = list(schedulers)
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    def _values(self):
        first, *others = self._schedulers
        values = first._at(self.last_epoch)._values()
        for other in others:
            start = other._at(0)._values()
            now = other._at(self.last_epoch)._values()
            values = [value * n / s for value, n, s in zip(values, now, start)]
        return values


class ScalePerParamScheduler(_Container):
    """Another scheduler's value, times the "adjust_learning_rate" of each parameter group that has one."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler, param_group_tags: TagsT = None):
        self._check_inner([scheduler], optimizer, param_group_tags)
        self._scheduler_nested = scheduler
        super().__init__(optimizer, total_iters=None, param_group_tags=param_group_tags)

    _state_names = {"_scheduler_nested": "_scheduler"}

    def _values(self):
        values = self._scheduler_nested._at(self.last_epoch)._values()
        return [value * group.get(ADJUST_KEY, 1.0) for value, group in zip(values, self.optimizer.param_groups)]
