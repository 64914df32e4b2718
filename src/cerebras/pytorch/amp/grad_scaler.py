"""Loss scaling."""
# ruff: noqa: UP007  (annotations spelled as the published signatures are, tools compare them)

from typing import Union

import torch

from .conditional_update import all_finite, conditional_update, gradients

DYNAMIC = "dynamic"
INIT_SCALE = 2.0**15
MAX_SCALE = 2.0**15
MIN_SCALE = 2.0**-14
STEPS_PER_INCREASE = 2000
FACTOR = 2.0

# the tensors of the state, by their key in a checkpoint
_STATE = ("_loss_scale", "_steps_since_rescale", "_overflows_since_rescale", "_num_skipped_steps")


class GradScaler:
    """Scales the loss so that small gradients survive in half precision, and the gradients back before the update.

    With a number as `loss_scale` the scale is constant and every update is applied. With "dynamic" the scale is halved
    when a gradient overflows, doubled after `steps_per_increase` steps without, and the update of a step that
    overflowed is not applied. All of it is tensor arithmetic, so it can be part of a captured step.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # where gradients are clipped in between
        scaler.step(optimizer)
        scaler.update()

    Args:
        loss_scale: a number, or "dynamic"; None, 0 and 1 do not scale.
        init_scale: the first dynamic scale, 2**15.
        steps_per_increase: steps without overflow before the scale is doubled, 2000.
        min_loss_scale: 2**-14.
        max_loss_scale: 2**15.
        overflow_tolerance: the part of the steps since the last change of scale that may overflow before the scale is
            halved; such a step is skipped all the same.
        max_gradient_norm: clip the gradients to this norm in `step`, dynamic scaling only.

    Raises:
        ValueError: a setting that cannot work.
    """

    def __init__(
        self,
        loss_scale: Union[str, float] = None,
        init_scale: float = None,
        steps_per_increase: int = None,
        min_loss_scale: float = None,
        max_loss_scale: float = None,
        overflow_tolerance: float = 0.0,
        max_gradient_norm: float = None,
    ):
        if isinstance(loss_scale, str) and loss_scale != DYNAMIC:
            try:
                loss_scale = float(loss_scale)
            except ValueError:
                raise ValueError(f'loss_scale must be a number or "{DYNAMIC}", got {loss_scale!r}.') from None
        self.dynamic = loss_scale == DYNAMIC
        first = INIT_SCALE if init_scale is None else float(init_scale)
        self._min_loss_scale = min(MIN_SCALE, first) if min_loss_scale is None else float(min_loss_scale)
        self._max_loss_scale = max(MAX_SCALE, first) if max_loss_scale is None else float(max_loss_scale)
        self._steps_per_increase = STEPS_PER_INCREASE if steps_per_increase is None else int(steps_per_increase)
        self._overflow_tolerance = overflow_tolerance
        self._max_gradient_norm = max_gradient_norm
        self._finite: dict[int, torch.Tensor] = {}  # by optimizer, between unscale_ and update
        self._unscaled: set[int] = set()
        if not 0 < self._min_loss_scale <= self._max_loss_scale:
            raise ValueError(
                f"The smallest and the largest scale must be positive and in this order, got {self._min_loss_scale} "
                f"and {self._max_loss_scale}."
            )
        if self._steps_per_increase <= 0:
            raise ValueError(f"steps_per_increase must be positive, got {steps_per_increase}.")
        if not 0.0 <= overflow_tolerance <= 1.0:
            raise ValueError(f"overflow_tolerance must be in 0 .. 1, got {overflow_tolerance}.")
        if not self.dynamic:
            self._loss_scale = float(loss_scale or 1.0)
            if self._loss_scale <= 0:
                raise ValueError(f"loss_scale must be positive, got {loss_scale}.")
            self.loss_is_scaled = self._loss_scale != 1.0
            return
        self.loss_is_scaled = True
        scale = min(first, self._max_loss_scale) if init_scale is None else first
        if not self._min_loss_scale <= scale <= self._max_loss_scale:
            raise ValueError(f"init_scale {scale} is not between {self._min_loss_scale} and {self._max_loss_scale}.")
        from cerebras.pytorch.backend import current_torch_device

        device = current_torch_device()  # where the steps of the backend read and write
        self._loss_scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._non_clamped_loss_scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._steps_since_rescale = torch.zeros((), dtype=torch.int32, device=device)
        self._overflows_since_rescale = torch.zeros((), dtype=torch.int32, device=device)
        self._num_skipped_steps = torch.zeros((), dtype=torch.int32, device=device)

    # the step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self._loss_scale if self.loss_is_scaled else loss

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of `optimizer` by the scale, in place; between `backward` and clipping.

        Raises:
            RuntimeError: it was done already since the last `update`.
        """
        if id(optimizer) in self._unscaled:
            raise RuntimeError("unscale_() was already called for this optimizer since the last update().")
        self._unscaled.add(id(optimizer))
        grads = gradients(optimizer)
        if self.loss_is_scaled:
            # in double: the reciprocal of a scale that is no power of two is rounded once
            inverse = self._loss_scale.double().reciprocal().float() if self.dynamic else 1.0 / self._loss_scale
            for grad in grads:
                grad.mul_(inverse)
        if self.dynamic:
            self._finite[id(optimizer)] = all_finite(grads)

    def step(self, optimizer: torch.optim.Optimizer, *args, **kwargs):
        """Calls `optimizer.step(*args, **kwargs)`, after `unscale_` where that is still to be done.

        With dynamic scaling the update holds only where all gradients are finite.
        """
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        if not self.dynamic:
            return optimizer.step(*args, **kwargs)
        return self.step_if_finite(optimizer, *args, **kwargs)

    def step_if_finite(self, optimizer: torch.optim.Optimizer, *args, **kwargs):
        """`optimizer.step`, undone where a gradient is infinite or NaN."""
        finite = self.clip_gradients_and_return_isfinite([optimizer])
        with conditional_update(optimizer, finite):
            return optimizer.step(*args, **kwargs)

    @torch.no_grad()
    def clip_gradients_and_return_isfinite(self, optimizers) -> torch.Tensor:
        """Clips the gradients of all `optimizers` together to `max_gradient_norm`, where that is set.

        Returns:
            A 0-d bool tensor: all gradients were finite.
        """
        grads = [grad for optimizer in optimizers for grad in gradients(optimizer)]
        known = [self._finite.get(id(optimizer)) for optimizer in optimizers]
        finite = all_finite(grads) if any(f is None for f in known) else torch.stack(known).all()
        if self._max_gradient_norm is not None and grads:
            norm = torch.nn.utils.get_total_norm(grads)
            factor = (self._max_gradient_norm / (norm + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.mul_(factor)
        for optimizer in optimizers:
            self._finite[id(optimizer)] = finite
        return finite

    @torch.no_grad()
    def update(self, new_scale=None) -> None:
        """Ends the step: adapts a dynamic scale, or sets it to `new_scale`."""
        finite = list(self._finite.values())
        self._finite.clear()
        self._unscaled.clear()
        if not self.dynamic:
            if new_scale is not None:
                self._loss_scale = float(new_scale)
                self.loss_is_scaled = self._loss_scale != 1.0
        elif new_scale is not None:
            for scale in (self._loss_scale, self._non_clamped_loss_scale):
                scale.copy_(new_scale) if isinstance(new_scale, torch.Tensor) else scale.fill_(new_scale)
        elif finite:
            self._adapt(torch.stack(finite).all().to(self._loss_scale.device))

    @torch.no_grad()
    def update_scale(self, optimizers) -> None:
        """`update` for a step whose gradients `optimizers` still hold."""
        for optimizer in optimizers:
            self._finite.setdefault(id(optimizer), all_finite(gradients(optimizer)))
        self.update()

    def _adapt(self, finite: torch.Tensor) -> None:
        steps = self._steps_since_rescale + 1
        overflows = self._overflows_since_rescale + (~finite).to(torch.int32)
        too_many = ~finite & (overflows >= steps * self._overflow_tolerance)
        long_enough = finite & (steps >= self._steps_per_increase)
        scale = torch.where(too_many, self._loss_scale / FACTOR, self._loss_scale)
        scale = torch.where(long_enough, self._loss_scale * FACTOR, scale)
        rescaled = too_many | long_enough
        self._non_clamped_loss_scale.copy_(scale)
        self._loss_scale.copy_(scale.clamp(self._min_loss_scale, self._max_loss_scale))
        self._steps_since_rescale.copy_(torch.where(rescaled, 0, steps))
        self._overflows_since_rescale.copy_(torch.where(rescaled, 0, overflows))
        self._num_skipped_steps.add_((~finite).to(torch.int32))

    # what it has become

    def get_scale(self):
        """The scale: a float, or with dynamic scaling a 0-d tensor."""
        return self._loss_scale

    def get_non_clamped_scale(self):
        """The scale before it was held between its bounds: a float, or with dynamic scaling a 0-d tensor."""
        return self._non_clamped_loss_scale if self.dynamic else self._loss_scale

    def get_num_skipped_steps(self):
        """How many updates were not applied: 0, or with dynamic scaling a 0-d tensor."""
        return self._num_skipped_steps if self.dynamic else 0

    def state_dict(self, destination=None) -> dict:
        """The state of dynamic scaling; empty without, because a constant scale is a setting."""
        destination = {} if destination is None else destination
        if self.dynamic:
            destination.update({key: getattr(self, key) for key in _STATE})
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Copies a `state_dict()` into this scaler. An empty one, and any one without dynamic scaling, changes nothing.

        Raises:
            KeyError: a part of the state is missing.
        """
        if not self.dynamic or not state_dict:
            return
        missing = [key for key in _STATE if key not in state_dict]
        if missing:
            raise KeyError(f"The saved GradScaler state has no {missing}; it has {sorted(state_dict)}.")
        for key in _STATE:
            value = state_dict[key]
            target = getattr(self, key)
            target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)
        self._non_clamped_loss_scale.copy_(self._loss_scale)
