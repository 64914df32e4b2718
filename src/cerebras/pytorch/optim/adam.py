"""Adam and AdamW."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

import math
from typing import Tuple

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_betas, check_hyper_parameters, host_scalar


def step_from_power(power: float, beta: float) -> float:
    """The number of steps taken, from a saved beta ** (steps + 1).

    A power that has underflowed stands for so many steps that the bias correction is one anyway.
    """
    tiny = torch.finfo(torch.float32).tiny
    return max(0.0, round(math.log(max(power, tiny)) / math.log(beta)) - 1.0) if 0 < beta < 1 else 0.0


class AdamUpdate:
    """What Adam and AdamW share; `decoupled` tells where the weight decay enters."""

    decoupled: bool

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, (beta1, beta2) = group["lr"], group["betas"]
        exp_avg, exp_avg_sq, step = state["exp_avg"], state["exp_avg_sq"], state[STEP]
        step += 1
        if self._decays(group):
            if self.decoupled:
                param.mul_(1 - lr * group["weight_decay"])
            else:
                grad = grad.add(param, alpha=group["weight_decay"])
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["amsgrad"]:
            exp_avg_sq = torch.maximum(state["max_exp_avg_sq"], exp_avg_sq, out=state["max_exp_avg_sq"])
        if group.get("correct_bias", True):
            count = step.item()
            step_size = lr / (1 - beta1**count)
            denominator = (exp_avg_sq.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
        else:
            step_size = lr
            denominator = exp_avg_sq.sqrt().add_(group["eps"])
        param.addcdiv_(exp_avg, denominator, value=-step_size)

    def _upgrade_group(self, group):
        # the original Adam keeps its L2 penalty under another name
        penalty = group.pop("l2_regularization_rate", 0.0)
        if not self.decoupled and penalty:
            group["weight_decay"] = penalty
        return group

    def _upgrade_state(self, group, state):
        # the original keeps the powers of the betas in place of a step counter
        power1, power2 = state.pop("beta1_power", None), state.pop("beta2_power", None)
        if power1 is not None and STEP not in state:
            beta1, beta2 = (float(beta) for beta in group["betas"])
            # the slower power says more: 0.9 ** n is no longer a float32 after a thousand steps
            steps = [step_from_power(float(power1), beta1), step_from_power(float(power2), beta2)]
            state[STEP] = host_scalar(max(steps))
        return state


class Adam(AdamUpdate, Optimizer):
    """Adam (https://arxiv.org/abs/1412.6980), with an L2 penalty as weight decay, bit for bit `torch.optim.Adam`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: L2 penalty, added to the gradient.
        amsgrad: divide by the largest mean square so far (https://openreview.net/forum?id=ryQu7f-RZ).
    """

    decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ):
        check_hyper_parameters("Adam", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("Adam", betas)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad))


class AdamW(AdamUpdate, Optimizer):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101), bit for bit `torch.optim.AdamW`.

    The weights are multiplied by 1 - lr * weight_decay before the update.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decay of the weights, times lr, at each step.
        correct_bias: divide the running means by 1 - beta ** step; False is what the BERT repository did.
        amsgrad: divide by the largest mean square so far.
    """

    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
    ):
        check_hyper_parameters("AdamW", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("AdamW", betas)
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, correct_bias=correct_bias, amsgrad=amsgrad
        )
        super().__init__(params, defaults)
