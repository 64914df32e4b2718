"""The device type `csx`: what torch is told about it, and where its tensors really live.

To Python a csx tensor's device is `csx:0`. To torch's C++ it is a tensor of the *execution device* (CUDA where there
is one, else CPU), for three reasons:
1. Composite operations (attention, RNNs, autocast, batch norm) then make the same choices as the eager backend on
   that device, so the captured graph has the same numerics.
2. The autograd engine runs the backward of CPU tensors on the calling thread. For an unknown device it uses a thread
   of its own, on which an exception in a user's backward or hook ends the process.
3. Errors keep their Python traceback through `backward()`.
"""

import functools

import torch

NAME = "csx"


@functools.cache
def csx() -> torch.device:
    """Registers the device type on first use and returns `torch.device("csx", 0)`."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    from . import tensor

    tensor.register_factories()
    _complete_module(getattr(torch, NAME))
    return torch.device(NAME, 0)


def _complete_module(module) -> None:
    """What torch.autocast, torch.utils.checkpoint and torch.random ask of `torch.csx`.

    Random operations on csx draw from the execution device's generator, which those save by themselves.
    """
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None


@functools.cache
def execution_device() -> torch.device:
    """Where programs run and state lives."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def is_csx(device) -> bool:
    """True for a `torch.device` or string of type csx."""
    if device is None:
        return False
    return (device.type if isinstance(device, torch.device) else str(device).split(":")[0]) == NAME
