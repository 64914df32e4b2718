"""Stochastic gradient descent."""

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_hyper_parameters, host_scalar


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it, bit for bit.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: factor of the running sum of gradients; 0 keeps none.
        dampening: fraction of the gradient that does not enter the running sum, from the second step on.
        weight_decay: L2 penalty.
        nesterov: Nesterov momentum; needs momentum > 0 and no dampening.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        maximize: bool = False,
    ):
        check_hyper_parameters("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("SGD: nesterov=True needs momentum > 0 and dampening=0.")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        if group["momentum"] != 0:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if group["dampening"] != 0:
                state[STEP] = host_scalar()

    def _update(self, group, param, grad, state):
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        if group["momentum"] != 0:
            buffer = state["momentum_buffer"]
            fresh = 1 - group["dampening"]
            if STEP in state:
                # the first gradient enters undamped; a minimum, because a branch would be frozen into the graph
                fresh = 1 - group["dampening"] * torch.sym_min(1.0, state[STEP].item())
                state[STEP] += 1
            buffer.mul_(group["momentum"]).add_(grad, alpha=fresh)
            grad = grad.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        param.add_(grad, alpha=-group["lr"])

    def _upgrade_state(self, group, state):
        # torch keeps no counter: there, a buffer that exists has had its first gradient
        if group.get("dampening") and state.get("momentum_buffer") is not None:
            state.setdefault(STEP, host_scalar(1.0))
        return state
