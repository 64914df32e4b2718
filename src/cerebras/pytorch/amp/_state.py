"""The two settings of mixed precision: which half precision type, and whether it is used."""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch

HALF_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    # Cerebras' 16-bit type with a longer mantissa exists on the wafer only; bfloat16 has its range, which matters more
    "cbfloat16": torch.bfloat16,
}


@dataclass
class AmpState:
    """The process-wide settings."""

    half_dtype: torch.dtype = torch.float16
    mixed_precision: bool = False


_state = AmpState()
_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """A UserWarning, once in a process for each `key`."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=3)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def set_half_dtype(value: Literal["float16", "bfloat16", "cbfloat16"] | torch.dtype) -> torch.dtype:
    """Chooses the half precision type of mixed precision; float16 until then.

    "cbfloat16", which only the wafer has, becomes bfloat16 with one warning.

    Returns:
        The type in use from now on.

    Raises:
        ValueError: it is none of these.
    """
    if value in HALF_DTYPES:
        if value == "cbfloat16":
            warn_once("cbfloat16", "cbfloat16 exists on the wafer only: bfloat16 is used in its place.")
        dtype = HALF_DTYPES[value]
    elif isinstance(value, torch.dtype) and value in HALF_DTYPES.values():
        dtype = value
    else:
        raise ValueError(
            f"{value!r} is not a half precision type. Use 'float16', 'bfloat16', 'cbfloat16', torch.float16 or "
            "torch.bfloat16."
        )
    _state.half_dtype = dtype
    return dtype


def get_half_dtype() -> torch.dtype:
    """The half precision type."""
    return _state.half_dtype


def get_half_dtype_str() -> str:
    """The half precision type by name, "bfloat16"."""
    return _name(_state.half_dtype)


def enable_mixed_precision(enable: bool = True) -> bool:
    """Switches mixed precision on or off and returns the new setting."""
    _state.mixed_precision = bool(enable)
    return _state.mixed_precision


def mixed_precision() -> bool:
    """Whether mixed precision is on."""
    return _state.mixed_precision


def get_floating_point_dtype(default=torch.float32) -> torch.dtype:
    """The type of activations: the half precision type with mixed precision, `default` without."""
    return _state.half_dtype if _state.mixed_precision else default


def get_floating_point_dtype_str(default="float32") -> str:
    """`get_floating_point_dtype` by name."""
    return _name(_state.half_dtype) if _state.mixed_precision else default


def is_cbfloat16_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is of type cbfloat16: never, outside the wafer."""
    return False
