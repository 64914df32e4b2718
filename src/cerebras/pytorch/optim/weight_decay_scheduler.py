"""Schedulers of the weight decay: the forms of scheduler.py, written to the groups' "weight_decay"."""
# ruff: noqa: UP006, UP035, UP045  (annotations spelled as the published signatures are, tools compare them)

from typing import List

import torch

from .scheduler import (
    ChainedScheduler,
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


class WeightDecayScheduler(Scheduler):
    """Base class of the weight decay schedulers; see `scheduler.Scheduler`."""

    param_group_key = "weight_decay"


class ChainedWD(WeightDecayScheduler, ChainedScheduler):
    __doc__ = ChainedScheduler.__doc__


class ConstantWD(WeightDecayScheduler, ConstantScheduler):
    __doc__ = ConstantScheduler.__doc__


class CosineAnnealingWD(WeightDecayScheduler, CosineAnnealingScheduler):
    __doc__ = CosineAnnealingScheduler.__doc__


class CosineAnnealingWarmRestartsWD(WeightDecayScheduler, CosineAnnealingWarmRestartsScheduler):
    __doc__ = CosineAnnealingWarmRestartsScheduler.__doc__


class CosineDecayWD(WeightDecayScheduler, CosineDecayScheduler):
    __doc__ = CosineDecayScheduler.__doc__


class CyclicWD(WeightDecayScheduler, CyclicScheduler):
    __doc__ = CyclicScheduler.__doc__


class ExponentialWD(WeightDecayScheduler, ExponentialScheduler):
    __doc__ = ExponentialScheduler.__doc__


class InverseExponentialTimeDecayWD(WeightDecayScheduler, InverseExponentialTimeDecayScheduler):
    __doc__ = InverseExponentialTimeDecayScheduler.__doc__


class InverseSquareRootDecayWD(WeightDecayScheduler, InverseSquareRootDecayScheduler):
    __doc__ = InverseSquareRootDecayScheduler.__doc__


class LambdaWD(WeightDecayScheduler, LambdaScheduler):
    __doc__ = LambdaScheduler.__doc__


class LinearWD(WeightDecayScheduler, LinearScheduler):
    __doc__ = LinearScheduler.__doc__


class MultiplicativeWD(WeightDecayScheduler, MultiplicativeScheduler):
    __doc__ = MultiplicativeScheduler.__doc__


class MultiStepWD(WeightDecayScheduler, MultiStepScheduler):
    __doc__ = MultiStepScheduler.__doc__


class OneCycleWD(WeightDecayScheduler, OneCycleScheduler):
    __doc__ = OneCycleScheduler.__doc__


class PolynomialWD(WeightDecayScheduler, PolynomialScheduler):
    __doc__ = PolynomialScheduler.__doc__


class ScalePerParamWD(WeightDecayScheduler, ScalePerParamScheduler):
    __doc__ = ScalePerParamScheduler.__doc__


class SequentialWD(WeightDecayScheduler, SequentialScheduler):
    __doc__ = SequentialScheduler.__doc__


class StepWD(WeightDecayScheduler, StepScheduler):
    __doc__ = StepScheduler.__doc__


class PiecewiseConstantWD(WeightDecayScheduler, PiecewiseConstantScheduler):
    """`vals[i]` from milestone i - 1 to milestone i."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        vals: List[float],
        milestones: List[int],
        param_group_tags: TagsT = None,
    ):
        super().__init__(optimizer, ConstantWD, vals, milestones, param_group_tags=param_group_tags)
