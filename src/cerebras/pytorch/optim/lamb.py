"""Lamb."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

from typing import Tuple

import torch

from .optimizer import Optimizer, ParamsT, check_betas, check_hyper_parameters

LARGEST_WEIGHT_NORM = 10.0


class Lamb(Optimizer):
    """LAMB: Adam with layer-wise step sizes (https://arxiv.org/abs/1904.00962, version 1), without bias correction.

    The update of each parameter is multiplied by the ratio of the parameter's norm, at most 10, to the update's.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, inside the trust ratio.
        adam: a trust ratio of one everywhere, for comparisons.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0,
        adam: bool = False,
    ):
        check_hyper_parameters("Lamb", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("Lamb", betas)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam=adam))

    def _init_state(self, group, param, state):
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = exp_avg / exp_avg_sq.sqrt().add_(group["eps"])
        if self._decays(group):
            update.add_(param, alpha=group["weight_decay"])
        if not group["adam"]:
            weight_norm = param.norm().clamp(0, LARGEST_WEIGHT_NORM)
            update_norm = update.norm()
            usable = (weight_norm > 0) & (update_norm > 0)
            update.mul_(torch.where(usable, weight_norm / update_norm, 1.0))
        param.add_(update, alpha=-group["lr"])
