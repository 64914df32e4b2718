"""Schedulers of the learning rate: the forms of scheduler.py, under the names that learning rates have."""
# ruff: noqa: UP006, UP035, UP045  (annotations spelled as the published signatures are, tools compare them)

from typing import List, Optional

import torch
import torch.optim.lr_scheduler

from .scheduler import ChainedScheduler as BaseChainedScheduler
from .scheduler import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineDecayScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    InverseExponentialTimeDecayScheduler,
    InverseSquareRootDecayScheduler,
    LambdaScheduler,
    LinearScheduler,
    MultiplicativeScheduler,
    MultiStepScheduler,
    OneCycleScheduler,
    PiecewiseConstantScheduler,
    PolynomialScheduler,
    ScalePerParamScheduler,
    Scheduler,
    SequentialScheduler,
    StepScheduler,
    TagsT,
)

_INITIAL = {"initial_val": "initial_learning_rate"}
_ENDS = {**_INITIAL, "end_val": "end_learning_rate"}


class LRScheduler(Scheduler, torch.optim.lr_scheduler.LRScheduler):
    """Base class of the learning rate schedulers; see `scheduler.Scheduler`.

    It is a torch LRScheduler by name only, for code that asks with isinstance: nothing of torch's runs.
    """

    param_group_key = "lr"

    def __getattr__(self, name: str):
        # the settings under the names of the constructor, initial_learning_rate for initial_val
        for attribute, published in type(self)._state_names.items():
            if name == published and attribute in vars(self):
                return vars(self)[attribute]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_lr(self) -> List[float]:
        """The learning rate of each group at the current step."""
        return self.get()

    def get_last_lr(self) -> List[Optional[float]]:
        """The learning rate last written to each group, None for a group that the tags leave out."""
        return self.get_last_value()


class ConstantLR(LRScheduler, ConstantScheduler):
    __doc__ = ConstantScheduler.__doc__
    _state_names = {"val": "learning_rate"}

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
        total_iters: Optional[int] = None,
        param_group_tags: TagsT = None,
    ):
        ConstantScheduler.__init__(self, optimizer, learning_rate, total_iters, param_group_tags=param_group_tags)


class PolynomialLR(LRScheduler, PolynomialScheduler):
    __doc__ = PolynomialScheduler.__doc__
    _state_names = _ENDS

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: TagsT = None,
    ):
        PolynomialScheduler.__init__(
            self,
            optimizer,
            initial_learning_rate,
            end_learning_rate,
            total_iters,
            power,
            cycle,
            param_group_tags=param_group_tags,
        )


class LinearLR(LRScheduler, LinearScheduler):
    __doc__ = LinearScheduler.__doc__
    _state_names = _ENDS

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: TagsT = None,
    ):
        LinearScheduler.__init__(
            self,
            optimizer,
            initial_learning_rate,
            end_learning_rate,
            total_iters,
            cycle,
            param_group_tags=param_group_tags,
        )


class ExponentialLR(LRScheduler, ExponentialScheduler):
    __doc__ = ExponentialScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: TagsT = None,
    ):
        ExponentialScheduler.__init__(
            self,
            optimizer,
            initial_learning_rate,
            total_iters,
            decay_rate,
            staircase,
            param_group_tags=param_group_tags,
        )


class InverseExponentialTimeDecayLR(LRScheduler, InverseExponentialTimeDecayScheduler):
    __doc__ = InverseExponentialTimeDecayScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: TagsT = None,
    ):
        InverseExponentialTimeDecayScheduler.__init__(
            self,
            optimizer,
            initial_learning_rate,
            step_exponent,
            total_iters,
            decay_rate,
            staircase,
            param_group_tags=param_group_tags,
        )


class InverseSquareRootDecayLR(LRScheduler, InverseSquareRootDecayScheduler):
    __doc__ = InverseSquareRootDecayScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1.0,
        param_group_tags: TagsT = None,
    ):
        InverseSquareRootDecayScheduler.__init__(
            self, optimizer, initial_learning_rate, scale, warmup_steps, param_group_tags=param_group_tags
        )


class CosineDecayLR(LRScheduler, CosineDecayScheduler):
    __doc__ = CosineDecayScheduler.__doc__
    _state_names = _ENDS

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        param_group_tags: TagsT = None,
    ):
        CosineDecayScheduler.__init__(
            self, optimizer, initial_learning_rate, end_learning_rate, total_iters, param_group_tags=param_group_tags
        )


class StepLR(LRScheduler, StepScheduler):
    __doc__ = StepScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_size: int,
        gamma: float,
        param_group_tags: TagsT = None,
    ):
        StepScheduler.__init__(
            self, optimizer, initial_learning_rate, step_size, gamma, param_group_tags=param_group_tags
        )


class MultiStepLR(LRScheduler, MultiStepScheduler):
    __doc__ = MultiStepScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        gamma: float,
        milestones: List[int],
        param_group_tags: TagsT = None,
    ):
        MultiStepScheduler.__init__(
            self, optimizer, initial_learning_rate, gamma, milestones, param_group_tags=param_group_tags
        )


class LambdaLR(LRScheduler, LambdaScheduler):
    __doc__ = LambdaScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        param_group_tags: TagsT = None,
    ):
        LambdaScheduler.__init__(self, optimizer, initial_learning_rate, param_group_tags=param_group_tags)


class CosineAnnealingLR(LRScheduler, CosineAnnealingScheduler):
    __doc__ = CosineAnnealingScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: TagsT = None,
    ):
        CosineAnnealingScheduler.__init__(
            self, optimizer, initial_learning_rate, T_max, eta_min, param_group_tags=param_group_tags
        )


class CosineAnnealingWarmRestarts(LRScheduler, CosineAnnealingWarmRestartsScheduler):
    __doc__ = CosineAnnealingWarmRestartsScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: TagsT = None,
    ):
        CosineAnnealingWarmRestartsScheduler.__init__(
            self, optimizer, initial_learning_rate, T_0, T_mult, eta_min, param_group_tags=param_group_tags
        )


class MultiplicativeLR(LRScheduler, MultiplicativeScheduler):
    __doc__ = MultiplicativeScheduler.__doc__
    _state_names = _INITIAL

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        coefficient: float,
        param_group_tags: TagsT = None,
    ):
        MultiplicativeScheduler.__init__(
            self, optimizer, initial_learning_rate, coefficient, param_group_tags=param_group_tags
        )


class CyclicLR(LRScheduler, CyclicScheduler):
    __doc__ = CyclicScheduler.__doc__
    _state_names = {"base_val": "base_lr", "max_val": "max_lr"}

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_lr: float,
        max_lr: float,
        step_size_up: int = 2000,
        step_size_down: Optional[int] = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str = "cycle",
        param_group_tags: TagsT = None,
    ):
        CyclicScheduler.__init__(
            self,
            optimizer,
            base_lr,
            max_lr,
            step_size_up,
            step_size_down,
            mode,
            gamma,
            scale_mode,
            param_group_tags=param_group_tags,
        )


class OneCycleLR(LRScheduler, OneCycleScheduler):
    __doc__ = OneCycleScheduler.__doc__
    _state_names = {**_INITIAL, "max_val": "max_lr"}

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        max_lr: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 10000.0,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: TagsT = None,
    ):
        OneCycleScheduler.__init__(
            self,
            optimizer,
            initial_learning_rate,
            max_lr,
            total_steps,
            pct_start,
            final_div_factor,
            three_phase,
            anneal_strategy,
            param_group_tags=param_group_tags,
        )


class SequentialLR(LRScheduler, SequentialScheduler):
    __doc__ = SequentialScheduler.__doc__

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: List[LRScheduler],
        milestones: List[int],
        last_epoch: int = -1,
        param_group_tags: TagsT = None,
    ):
        SequentialScheduler.__init__(self, optimizer, schedulers, milestones, last_epoch, param_group_tags)


class PiecewiseConstantLR(LRScheduler, PiecewiseConstantScheduler):
    """`learning_rates[i]` from milestone i - 1 to milestone i."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rates: List[float],
        milestones: List[int],
        param_group_tags: TagsT = None,
    ):
        PiecewiseConstantScheduler.__init__(
            self, optimizer, ConstantLR, learning_rates, milestones, param_group_tags=param_group_tags
        )


class ChainedLR(LRScheduler, BaseChainedScheduler):
    __doc__ = BaseChainedScheduler.__doc__

    def __init__(self, schedulers: List[LRScheduler], param_group_tags: TagsT = None):
        BaseChainedScheduler.__init__(self, schedulers, param_group_tags)


class ScalePerParamLR(LRScheduler, ScalePerParamScheduler):
    __doc__ = ScalePerParamScheduler.__doc__
    _state_names = ScalePerParamScheduler._state_names

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, param_group_tags: TagsT = None):
        ScalePerParamScheduler.__init__(self, optimizer, scheduler, param_group_tags)


ChainedScheduler = ChainedLR  # in this module the published name means the learning rate's
