"""Lion."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

from typing import Tuple

import torch

from .optimizer import Optimizer, ParamsT, check_betas, check_hyper_parameters


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (https://arxiv.org/abs/2302.06675), with decoupled weight decay.

    Args:
        params: parameters or groups.
        lr: learning rate; a third to a tenth of Adam's.
        betas: interpolation between momentum and gradient for the update, and for the momentum itself.
        weight_decay: decay of the weights, times lr, at each step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.0001,
        betas: Tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        check_hyper_parameters("Lion", lr=lr, weight_decay=weight_decay)
        check_betas("Lion", betas)
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def _init_state(self, group, param, state):
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, (beta1, beta2), exp_avg = group["lr"], group["betas"], state["exp_avg"]
        if self._decays(group):
            param.mul_(1 - lr * group["weight_decay"])
        param.add_(exp_avg.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
        exp_avg.lerp_(grad, 1 - beta2)
