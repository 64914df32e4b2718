"""Adadelta."""

import torch

from .optimizer import Optimizer, ParamsT, check_hyper_parameters


class Adadelta(Optimizer):
    """Adadelta (https://arxiv.org/abs/1212.5701), bit for bit `torch.optim.Adadelta`.

    Args:
        params: parameters or groups.
        lr: factor of the update.
        rho: decay rate of the running means of squares.
        eps: added under the square roots.
        weight_decay: L2 penalty.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-06,
        weight_decay: float = 0,
        maximize: bool = False,
    ):
        check_hyper_parameters("Adadelta", lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0.0 <= rho <= 1.0:
            raise ValueError(f"Adadelta: rho must be in [0, 1], got {rho}.")
        super().__init__(params, dict(lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize))

    def _init_state(self, group, param, state):
        state["square_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["acc_delta"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        rho, eps = group["rho"], group["eps"]
        square_avg, acc_delta = state["square_avg"], state["acc_delta"]
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        square_avg.mul_(rho).addcmul_(grad, grad, value=1 - rho)
        deviation = square_avg.add(eps).sqrt_()
        delta = acc_delta.add(eps).sqrt_().div_(deviation).mul_(grad)
        acc_delta.mul_(rho).addcmul_(delta, delta, value=1 - rho)
        param.add_(delta, alpha=-group["lr"])
