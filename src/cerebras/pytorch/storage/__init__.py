"""Checkpoints, and tensors that hold no memory until they are used.

`save` and `load` are `cerebras.pytorch.save` and `load`; the creation functions are `cerebras.pytorch.full` and so on.
The file format is in `docs/checkpoint-format.md`.
"""

from . import constants, serializers
from .background import check_saves, wait_for_saves
from .creation import full, full_like, ones, ones_like, set_full_factory, set_lazy_creation, zeros, zeros_like
from .deferred import DeferredFileTensor, DeferredFill, DeferredFullTensor, DeferredTensor
from .load import load
from .resolve import register_tensor_resolver, resolve_tensor
from .rotation import CheckpointRotation
from .save import adopt, save, set_max_checkpoints, set_saving_process

__all__ = [
    "CheckpointRotation",
    "DeferredFileTensor",
    "DeferredFill",
    "DeferredFullTensor",
    "DeferredTensor",
    "adopt",
    "check_saves",
    "constants",
    "full",
    "full_like",
    "load",
    "ones",
    "ones_like",
    "register_tensor_resolver",
    "resolve_tensor",
    "save",
    "serializers",
    "set_full_factory",
    "set_lazy_creation",
    "set_max_checkpoints",
    "set_saving_process",
    "wait_for_saves",
    "zeros",
    "zeros_like",
]
