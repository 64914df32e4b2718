"""Adamax."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

from typing import Tuple

import torch

from .adam import step_from_power
from .optimizer import STEP, Optimizer, ParamsT, check_betas, check_hyper_parameters, host_scalar


class Adamax(Optimizer):
    """Adamax, Adam with the infinity norm (https://arxiv.org/abs/1412.6980), bit for bit `torch.optim.Adamax`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the running mean and of the running maximum.
        eps: added to the magnitude of the gradient.
        weight_decay: L2 penalty.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ):
        check_hyper_parameters("Adamax", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("Adamax", betas)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize))

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_inf"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        beta1, beta2 = group["betas"]
        step, exp_avg, exp_inf = state[STEP], state["exp_avg"], state["exp_inf"]
        step += 1
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        exp_avg.lerp_(grad, 1 - beta1)
        torch.maximum(exp_inf.mul_(beta2), grad.abs().add_(group["eps"]), out=exp_inf)
        param.addcdiv_(exp_avg, exp_inf, value=-(group["lr"] / (1 - beta1 ** step.item())))

    def _upgrade_state(self, group, state):
        power = state.pop("beta1_power", None)
        if power is not None and STEP not in state:
            state[STEP] = host_scalar(step_from_power(float(power), float(group["betas"][0])))
        return state
