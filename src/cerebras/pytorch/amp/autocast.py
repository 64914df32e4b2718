"""Mixed precision inside a `with` block."""

from contextlib import contextmanager

import torch

from ._state import get_half_dtype, warn_once


def execution_device_type() -> str:
    """The torch device type on which the operations of the active backend are computed."""
    from cerebras.pytorch.backend import current_backend_impl

    backend = current_backend_impl(raise_exception=False)
    if backend is not None and backend.is_gpu:
        return "cuda"
    if backend is not None and backend.is_csx:
        from cerebras.pytorch.core.device import execution_device

        return execution_device().type
    return "cpu"


@contextmanager
def autocast(dtype: torch.dtype = None):
    """Runs the block in mixed precision: `torch.autocast` for the active backend.

    Args:
        dtype: the half precision type; `get_half_dtype()` where not given. float16 becomes bfloat16 on a CPU, which
            has no arithmetic for it, with one warning.
    """
    dtype = get_half_dtype() if dtype is None else dtype
    device_type = execution_device_type()
    if device_type == "cpu" and dtype == torch.float16:
        warn_once("float16", "Mixed precision on a CPU uses bfloat16 in place of float16.")
        dtype = torch.bfloat16
    with torch.autocast(device_type, dtype=dtype):
        yield


@contextmanager
def disable_casts():
    """Switches mixed precision off inside the block, also within `autocast`."""
    with torch.autocast(execution_device_type(), enabled=False):
        yield
