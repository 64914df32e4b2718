"""RMSprop."""

import torch

from .optimizer import Optimizer, ParamsT, check_hyper_parameters


class RMSprop(Optimizer):
    """RMSprop, as `torch.optim.RMSprop` defines it, bit for bit.

    Args:
        params: parameters or groups.
        lr: learning rate.
        alpha: decay rate of the running mean of the squared gradient.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        momentum: factor of the running sum of updates; 0 keeps none.
        centered: divide by the running standard deviation instead of the root mean square.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
    ):
        check_hyper_parameters("RMSprop", lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        defaults = dict(lr=lr, momentum=momentum, alpha=alpha, eps=eps, centered=centered, weight_decay=weight_decay)
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        state["square_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if group["momentum"] > 0:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if group["centered"]:
            state["grad_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, alpha, square_avg = group["lr"], group["alpha"], state["square_avg"]
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        square_avg.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
        if group["centered"]:
            grad_avg = state["grad_avg"].lerp_(grad, 1 - alpha)
            average = square_avg.addcmul(grad_avg, grad_avg, value=-1).sqrt_()
        else:
            average = square_avg.sqrt()
        average = average.add_(group["eps"])
        if group["momentum"] > 0:
            buffer = state["momentum_buffer"].mul_(group["momentum"]).addcdiv_(grad, average)
            param.add_(buffer, alpha=-lr)
        else:
            param.addcdiv_(grad, average, value=-lr)
