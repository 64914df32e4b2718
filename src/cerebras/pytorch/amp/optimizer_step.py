"""A whole optimizer step with loss scaling and clipping."""

import torch

from .conditional_update import gradients
from .grad_scaler import GradScaler


def setup_optimizer(optimizer):
    """Returns `optimizer`, ready for loss scaling. Here every optimizer is: nothing has to be patched."""
    return optimizer


def optimizer_step(
    loss: torch.Tensor,
    optimizer: "cstorch.optim.Optimizer",  # noqa: F821
    grad_scaler: "cstorch.amp.GradScaler",  # noqa: F821
    max_gradient_norm: float = None,
    max_gradient_value: float = None,
):
    """Clears the gradients, runs the backward of the scaled loss, unscales, clips, updates, and adapts the scale.

    Args:
        loss: the unscaled loss.
        optimizer: the optimizer to step.
        grad_scaler: scales the loss; `GradScaler()` does not.
        max_gradient_norm: clip the norm of all gradients together to this.
        max_gradient_value: or clip each element to -value .. value.

    Raises:
        ValueError: both ways to clip, or a bound below zero.
    """
    if not isinstance(grad_scaler, GradScaler):
        raise TypeError(f"grad_scaler must be a cstorch.amp.GradScaler, got {type(grad_scaler).__name__}.")
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise ValueError("Clip by max_gradient_norm or by max_gradient_value, not by both.")
    for bound in (max_gradient_norm, max_gradient_value):
        if bound is not None and bound < 0:
            raise ValueError(f"Gradients cannot be clipped to {bound}.")

    optimizer.zero_grad()
    grad_scaler.scale(loss).backward()
    grad_scaler.unscale_(optimizer)
    if max_gradient_norm is not None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, max_gradient_norm)
    elif max_gradient_value is not None:
        with torch.no_grad():
            for grad in gradients(optimizer):
                grad.clamp_(-max_gradient_value, max_gradient_value)
    grad_scaler.step(optimizer)
    grad_scaler.update()
