"""Muon."""

import torch

from .optimizer import Optimizer, ParamsT, check_hyper_parameters

# The quintic of https://kellerjordan.github.io/posts/muon/, steepest at zero
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly (singular values in 0.5 .. 1.5), by Newton-Schulz in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    wide = matrix.size(0) <= matrix.size(1)
    if not wide:
        x = x.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class Muon(Optimizer):
    """Momentum orthogonalized by Newton-Schulz (https://kellerjordan.github.io/posts/muon/), as `torch.optim.Muon`.

    It is defined for the matrices of hidden layers. A parameter of more than two dimensions (a convolution) is taken as
    the matrix of its first dimension by all others.

    Args:
        params: parameters or groups, of two dimensions or more.
        lr: learning rate, multiplied by sqrt(rows / columns) where that is above one.
        weight_decay: decay of the weights, times lr, at each step.
        momentum: decay rate of the running mean of the gradient.
        nesterov: look ahead by one step of momentum.
        ns_steps: iterations of Newton-Schulz.

    Raises:
        ValueError: a parameter has fewer than two dimensions.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ):
        check_hyper_parameters("Muon", lr=lr, weight_decay=weight_decay, momentum=momentum)
        if not 0 < ns_steps < 100:
            raise ValueError(f"Muon: ns_steps must be in 1 .. 99, got {ns_steps}.")
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        if param.dim() < 2:
            raise ValueError(
                f"Muon orthogonalizes matrices, but one parameter has the shape {tuple(param.shape)}. "
                "Give biases, norms and embeddings to another optimizer, AdamW for one."
            )
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, momentum = group["lr"], group["momentum"]
        buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        matrix = update.flatten(1)
        update = orthogonalize(matrix, group["ns_steps"]).reshape(param.shape)
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(update, alpha=-(lr * max(1, matrix.size(0) / matrix.size(1)) ** 0.5))
