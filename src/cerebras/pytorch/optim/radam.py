"""RAdam."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

from typing import Tuple

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_betas, check_hyper_parameters, host_scalar


class RAdam(Optimizer):
    """Adam with a rectified variance (https://arxiv.org/abs/1908.03265), as `torch.optim.RAdam` defines it.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: L2 penalty.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.0,
    ):
        check_hyper_parameters("RAdam", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("RAdam", betas)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, (beta1, beta2) = group["lr"], group["betas"]
        step, exp_avg, exp_avg_sq = state[STEP], state["exp_avg"], state["exp_avg_sq"]
        step += 1
        count = step.item()
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1, correction2 = 1 - beta1**count, 1 - beta2**count
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * count * (beta2**count) / correction2
        # Whether the variance is tractable depends on the step, so both updates are computed and one selected. As long
        # as it is not, the root below may be of a negative number: a tensor's NaN, which is not selected.
        length = torch.ones((), dtype=torch.float64, device=param.device) * rho
        rectification = ((length - 4) * (length - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * length)).sqrt()
        plain = exp_avg / correction1 * lr
        adaptive = (correction2**0.5) / exp_avg_sq.sqrt().add_(group["eps"])
        param.add_(torch.where(length > 5.0, plain * adaptive * rectification, plain), alpha=-1.0)
