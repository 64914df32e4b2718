"""Adafactor."""
# ruff: noqa: UP006, UP035, UP045  (annotations spelled as the published signatures are, tools compare them)

from typing import Optional, Tuple

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_hyper_parameters, host_scalar


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.norm(2) / (tensor.numel() ** 0.5)


class Adafactor(Optimizer):
    """Adafactor (https://arxiv.org/abs/1804.04235): Adam's second moment from the means of its rows and columns.

    Parameters of two and more dimensions are factored over the last two.

    Args:
        params: parameters or groups.
        lr: learning rate; None with `relative_step`.
        eps: added to the squared gradient, and the smallest scale of a parameter.
        clip_threshold: largest root mean square of an update, before lr.
        decay_rate: the mean square of step n decays by 1 - n ** decay_rate.
        beta1: decay rate of a running mean of the update; None keeps none.
        weight_decay: decay of the weights, times the learning rate, at each step.
        scale_parameter: multiply lr by the root mean square of the parameter.
        relative_step: lr is min(0.01, 1 / sqrt(step)).
        warmup_init: with `relative_step`, lr is min(step * 1e-6, 1 / sqrt(step)).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        eps: Tuple[float, float] = (1e-30, 0.001),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: Optional[float] = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = False,
        warmup_init: bool = False,
    ):
        check_hyper_parameters("Adafactor", lr=lr, weight_decay=weight_decay, clip_threshold=clip_threshold)
        if (lr is None) != relative_step:
            raise ValueError("Adafactor: give either lr, or lr=None and relative_step=True.")
        if warmup_init and not relative_step:
            raise ValueError("Adafactor: warmup_init=True needs relative_step=True.")
        defaults = dict(
            lr=lr,
            eps=eps,
            clip_threshold=clip_threshold,
            decay_rate=decay_rate,
            beta1=beta1,
            weight_decay=weight_decay,
            scale_parameter=scale_parameter,
            relative_step=relative_step,
            warmup_init=warmup_init,
        )
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        if param.dim() >= 2:
            state["exp_avg_sq_row"] = param.new_zeros(param.shape[:-1])
            state["exp_avg_sq_col"] = param.new_zeros(param.shape[:-2] + param.shape[-1:])
        else:
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        step = state[STEP]
        step += 1
        count = step.item()
        lr = group["lr"]
        if group["relative_step"]:
            lr = torch.sym_min(1e-6 * count if group["warmup_init"] else 1e-2, count**-0.5)
        if group["scale_parameter"]:
            lr = _rms(param).clamp(min=group["eps"][1]) * lr  # a tensor from here on

        fresh = count ** group["decay_rate"]
        square = grad.square().add_(group["eps"][0])
        if param.dim() >= 2:
            rows = state["exp_avg_sq_row"].lerp_(square.mean(dim=-1), fresh)
            columns = state["exp_avg_sq_col"].lerp_(square.mean(dim=-2), fresh)
            row_factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = row_factor * columns.rsqrt().unsqueeze(-2) * grad
        else:
            update = state["exp_avg_sq"].lerp_(square, fresh).rsqrt().mul_(grad)
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0))
        update.mul_(lr)
        if group["beta1"] is not None:
            update = state["exp_avg"].lerp_(update, 1 - group["beta1"])
        if self._decays(group):
            param.sub_(param * (lr * group["weight_decay"]))
        param.sub_(update)
