"""`cstorch.save`."""

import functools
import os
from importlib import metadata

from cerebras.appliance.storage import H5Writer
from cerebras.appliance.storage.h5_storage import is_local_path

from . import serializers
from .rotation import CheckpointRotation

_rotation = CheckpointRotation()


@functools.cache
def _version() -> str:
    try:
        own = metadata.version("cstorch")
    except metadata.PackageNotFoundError:
        own = "0"
    return f"2.10.0+cstorch.{own}"


def set_max_checkpoints(limit: int | None) -> None:
    """Sets how many checkpoints of a series `save` keeps; None keeps all (see `CheckpointRotation`).

    Raises:
        TypeError, ValueError: not a positive int or None.
    """
    _rotation.limit = limit


def adopt(path: str | os.PathLike) -> None:
    """Counts an existing checkpoint, such as the one a run resumes from, among those `max_checkpoints` may delete."""
    _rotation.adopt(path)


def save(obj, checkpoint_file: str | os.PathLike) -> None:
    """Saves a nested object, usually a state dict, to an HDF5 checkpoint (`docs/checkpoint-format.md`).

    The file has its name only when it is complete and on the disk. Shared tensors are stored once; constant tensors
    that were never touched are stored as their fill. With `set_max_checkpoints`, older checkpoints of this run are
    deleted after that.

    Args:
        obj: dict, OrderedDict, list, tuple, NamedTuple and set, nested, of tensors of every strided dtype, numpy arrays
            and scalars, int, float, complex, bool, str, bytes, None, torch.Size, torch.dtype, torch.device, dates.
            Subclasses of int, float and str are stored as their base.
        checkpoint_file: the path to write.

    Raises:
        TypeError, ValueError: something cannot be stored; named by its tree path, before anything is written.
        FileExistsError: the file exists.
        FileNotFoundError: its directory does not exist.
        OSError: the system could not write (disk full, no permission); nothing is left behind.
    """
    if not is_local_path(checkpoint_file):
        raise TypeError(f"checkpoint_file must be a local path, not {checkpoint_file!r}")
    path = os.fspath(checkpoint_file)
    if path.endswith(".safetensors"):
        raise ValueError(
            f"{path}: save() writes HDF5 checkpoints, which can hold more than safetensors. "
            "Instead: choose another suffix, such as .mdl, or use safetensors.torch.save_file for a flat dict of tensors."
        )
    planned = serializers.plan(obj)
    with H5Writer(path) as writer:
        serializers.write(planned, writer, _version())
    _rotation.wrote(path)
