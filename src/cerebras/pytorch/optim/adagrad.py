"""Adagrad."""

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_hyper_parameters, host_scalar


class Adagrad(Optimizer):
    """Adagrad (https://jmlr.org/papers/v12/duchi11a.html), bit for bit `torch.optim.Adagrad`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        lr_decay: the learning rate of step n is lr / (1 + (n - 1) * lr_decay).
        weight_decay: L2 penalty.
        initial_accumulator_value: where the sum of squared gradients starts.
        eps: added to the denominator.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-06,
        maximize: bool = False,
    ):
        check_hyper_parameters(
            "Adagrad",
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = dict(
            lr=lr,
            lr_decay=lr_decay,
            eps=eps,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            maximize=maximize,
        )
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        state["sum"] = torch.full_like(param, group["initial_accumulator_value"], memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        step, total = state[STEP], state["sum"]
        step += 1
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        lr = group["lr"] / (1 + (step.item() - 1) * group["lr_decay"])
        total.addcmul_(grad, grad, value=1)
        param.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-lr)
