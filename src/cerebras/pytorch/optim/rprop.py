"""Rprop."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

from typing import Tuple

import torch

from .optimizer import Optimizer, ParamsT, check_hyper_parameters


class Rprop(Optimizer):
    """Resilient backpropagation (Riedmiller and Braun, 1993), bit for bit `torch.optim.Rprop`.

    Args:
        params: parameters or groups.
        lr: step size at the start.
        etas: factors of the step size where the sign of the gradient changes, and where it stays.
        step_sizes: smallest and largest step size.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        etas: Tuple[float, float] = (0.5, 1.2),
        step_sizes: Tuple[float, float] = (1e-06, 50.0),
    ):
        check_hyper_parameters("Rprop", lr=lr)
        if not 0.0 < etas[0] < 1.0 < etas[1]:
            raise ValueError(f"Rprop: etas must be (below 1, above 1), got {etas}.")
        super().__init__(params, dict(lr=lr, etas=etas, step_sizes=step_sizes))

    def _init_state(self, group, param, state):
        state["prev"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step_size"] = torch.full_like(param, group["lr"], memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        eta_minus, eta_plus = group["etas"]
        smallest, largest = group["step_sizes"]
        prev, step_size = state["prev"], state["step_size"]
        sign = grad.mul(prev).sign()
        turned = sign.lt(0)
        factor = torch.ones_like(sign)
        factor = factor.masked_fill(sign.gt(0), eta_plus).masked_fill(turned, eta_minus)
        step_size.mul_(factor).clamp_(smallest, largest)
        grad = grad.masked_fill(turned, 0.0)
        param.addcmul_(grad.sign(), step_size, value=-1)
        prev.copy_(grad)
