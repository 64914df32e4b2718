"""NAdam."""
# ruff: noqa: UP006, UP035  (annotations spelled as the published signatures are, tools compare them)

from typing import Tuple

import torch

from .optimizer import STEP, Optimizer, ParamsT, check_betas, check_hyper_parameters, host_scalar


class NAdam(Optimizer):
    """Adam with Nesterov momentum (Dozat, 2016), bit for bit `torch.optim.NAdam`.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: L2 penalty.
        momentum_decay: how fast the momentum approaches betas[0].
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.002,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0,
        momentum_decay: float = 0.004,
    ):
        check_hyper_parameters("NAdam", lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
        check_betas("NAdam", betas)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
        super().__init__(params, defaults)

    def _init_state(self, group, param, state):
        state[STEP] = host_scalar()
        state["mu_product"] = host_scalar(1.0)
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _update(self, group, param, grad, state):
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["momentum_decay"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        step, mu_product = state[STEP], state["mu_product"]
        step += 1
        count = step.item()
        if self._decays(group):
            grad = grad.add(param, alpha=group["weight_decay"])
        mu = beta1 * (1.0 - 0.5 * (0.96 ** (count * decay)))
        mu_next = beta1 * (1.0 - 0.5 * (0.96 ** ((count + 1) * decay)))
        mu_product *= mu
        product = mu_product.item()
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = exp_avg_sq.div(1 - beta2**count).sqrt().add_(group["eps"])
        param.addcdiv_(grad, denominator, value=-lr * (1.0 - mu) / (1.0 - product))
        param.addcdiv_(exp_avg, denominator, value=(-lr * mu_next) / (1.0 - product * mu_next))
