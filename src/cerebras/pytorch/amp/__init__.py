"""Mixed precision and loss scaling."""

from ._state import (
    enable_mixed_precision,
    get_floating_point_dtype,
    get_floating_point_dtype_str,
    get_half_dtype,
    get_half_dtype_str,
    is_cbfloat16_tensor,
    mixed_precision,
    set_half_dtype,
)
from .autocast import autocast, disable_casts
from .conditional_update import isfinite, update_if_finite
from .grad_scaler import GradScaler
from .optimizer_step import optimizer_step, setup_optimizer

__all__ = [
    "GradScaler",
    "autocast",
    "disable_casts",
    "enable_mixed_precision",
    "get_floating_point_dtype",
    "get_floating_point_dtype_str",
    "get_half_dtype",
    "get_half_dtype_str",
    "is_cbfloat16_tensor",
    "isfinite",
    "mixed_precision",
    "optimizer_step",
    "set_half_dtype",
    "setup_optimizer",
    "update_if_finite",
]
