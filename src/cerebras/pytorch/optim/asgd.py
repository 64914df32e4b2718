"""ASGD."""

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_hyper_parameters, host_scalar


class ASGD(Optimizer):
    """Averaged stochastic gradient descent (Polyak and Juditsky, 1992), as `torch.optim.ASGD` defines it.

    The averages are in `state[param]["ax"]`.

    Args:
        params: parameters or groups.
        lr: learning rate of the first step.
        lambd: decay of the weights, and of the learning rate.
        alpha: power of the decay of the learning rate.
        t0: the step at which averaging starts.
        weight_decay: L2 penalty.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        lambd: float = 0.0001,
        alpha: float = 0.75,
        t0: float = 1000000.0,
        weight_decay: float = 0,
        maximize: bool = False,
    ):
        check_hyper_parameters("ASGD", lr=lr, weight_decay=weight_decay)
        defaults = dict(lr=lr, lambd=lambd, alpha=alpha, t0=t0, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        state["eta"] = host_scalar(group["lr"])
        state["mu"] = host_scalar(1.0)
        state["ax"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, lambd = group["lr"], group["lambd"]
        step, eta, mu, average = state[STEP], state["eta"], state["mu"], state["ax"]
        step += 1
        count = step.item()
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        rate, weight = eta.item(), mu.item()
        param.mul_(1 - lambd * rate)
        param.add_(grad, alpha=-rate)
        average.lerp_(param, weight)  # a weight of one copies exactly, which x + (y - x) would not
        eta.fill_(lr / ((1 + lambd * lr * count) ** group["alpha"]))
        mu.fill_(1 / torch.sym_max(1.0, count - group["t0"]))
