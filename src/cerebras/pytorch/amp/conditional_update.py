"""Updates that only happen where a condition, itself a tensor, holds.

In a static graph there is no `if` on a tensor: the update is computed, and each tensor then takes either its new or its
old value.
"""

from contextlib import contextmanager

import torch


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients that `optimizer` would use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def all_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A 0-d bool tensor: no element of any of the tensors is infinite or NaN."""
    if not tensors:
        return torch.ones((), dtype=torch.bool)
    first = tensors[0].device
    return torch.stack([torch.isfinite(t).all().to(first) for t in tensors]).all()


def isfinite(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A 0-d bool tensor: every gradient of the optimizer is finite. True where there are no gradients."""
    with torch.no_grad():
        return all_finite(gradients(optimizer))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors in the state of the optimizer."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def update_if_finite(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> None:
    """Marks `tensor` to be restored by the enclosing `conditional_update` of `optimizer`, together with its own.

    For state that an optimizer keeps outside `optimizer.state`. Outside a `conditional_update` it does nothing.
    """
    marked = optimizer.__dict__.get("_conditional_tensors")
    if marked is not None and not any(tensor is t for t, _ in marked):
        marked.append((tensor, tensor.detach().clone()))


@contextmanager
def conditional_update(optimizer: torch.optim.Optimizer, condition: torch.Tensor):
    """What the block does to the parameters and the state of `optimizer` holds only where `condition` is true.

    Notes:
        1. A step counter on the host counts on while the condition is a tensor of another device: the host does not
           wait for it. Bias corrections then see the step as taken.
        2. A torch optimizer makes its state inside its first step, too late to be remembered. That first step sees
           zeros in place of gradients that are not finite, so that no state begins as NaN.
    """
    with torch.no_grad():
        marked = [
            (t, t.detach().clone()) for group in optimizer.param_groups for t in group["params"] if t.grad is not None
        ]
        marked += [(t, t.detach().clone()) for t in state_tensors(optimizer) if _reachable(t, condition)]
        optimizer._conditional_tensors = marked
        if not hasattr(optimizer, "preinitialize"):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and not optimizer.state.get(p):
                        p.grad.copy_(torch.where(torch.isfinite(p.grad), p.grad, 0.0))
    try:
        yield
    finally:
        del optimizer._conditional_tensors
    with torch.no_grad():
        for tensor, before in marked:
            tensor.copy_(torch.where(condition.to(tensor.device), tensor, before))


def _reachable(tensor: torch.Tensor, condition: torch.Tensor) -> bool:
    return tensor.device == condition.device or tensor.device.type != "cpu"
