"""`cstorch.save`."""

import functools
import os
from importlib import metadata

from cerebras.appliance.storage import H5Writer
from cerebras.appliance.storage.h5_storage import is_local_path

from . import background as saving
from . import serializers
from .rotation import CheckpointRotation

_rotation = CheckpointRotation()
_saves = True


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


def set_saving_process(saves: bool) -> None:
    """False in a process of a distributed run that leaves saving to another: `save` does nothing there."""
    global _saves
    _saves = saves


def adopt(path: str | os.PathLike) -> None:
    """Counts an existing checkpoint, such as the one a run resumes from, among those `max_checkpoints` may delete."""
    _rotation.adopt(path)


def remember_loaded(path: str | os.PathLike, stat: os.stat_result) -> None:
    """Remembers a loaded checkpoint: a later step of its series, once saved, adopts it."""
    _rotation.loaded(path, stat)


def save(obj, checkpoint_file: str | os.PathLike, *, compression: str | None = None, background: bool = False) -> None:
    """Saves a nested object, usually a state dict, to an HDF5 checkpoint (`docs/checkpoint-format.md`).

    The file has its name only when it is complete and on the disk. Shared tensors are stored once; constant tensors
    that were never touched are stored as their fill. With `set_max_checkpoints`, older checkpoints of this run are
    deleted after that. In a distributed run the main process saves; in the others this does nothing.

    Args:
        obj: dict, OrderedDict, list, tuple, NamedTuple and set, nested, of tensors of every strided dtype, numpy arrays
            and scalars, int, float, complex, bool, str, bytes, None, torch.Size, torch.dtype, torch.device, dates.
            Subclasses of int, float and str are stored as their base.
        checkpoint_file: the path to write.
        compression: "lz4" or "zstd" for tensors of 64 KiB and more. Not compressed is what saves and loads fastest.
        background: return when a copy of the state is in memory, and write that while training goes on. A failure is
            raised by the next step or save, or ends the process with status 1 (see `check_saves`, `wait_for_saves`).

    Raises:
        TypeError, ValueError: something cannot be stored; named by its tree path, before anything is written.
        FileExistsError: the file exists.
        FileNotFoundError: its directory does not exist.
        OSError: the system could not write (disk full, no permission); nothing is left behind.
    """
    if not _saves:
        return
    if not is_local_path(checkpoint_file):
        raise TypeError(f"checkpoint_file must be a local path, not {checkpoint_file!r}")
    path = os.fspath(checkpoint_file)
    if path.endswith(".safetensors"):
        raise ValueError(
            f"{path}: save() writes HDF5 checkpoints, which can hold more than safetensors. Instead: choose another "
            "suffix, such as .mdl, and run `cstorch ckpt convert` on the file, or use safetensors.torch.save_file."
        )
    saving.wait_before_next()
    planned = serializers.plan(obj)
    writer = H5Writer(path, compression=compression)
    if not background:
        with writer:
            with _progress(path, planned) as bar:
                serializers.write(planned, writer, _version(), bar.update)
        _rotation.wrote(path)
        return
    try:
        memory = saving.snapshot(planned)
    except BaseException:
        writer.abort()
        raise

    def write() -> None:
        with writer:
            serializers.write(planned, writer, _version())
        _rotation.wrote(path)

    saving.start(writer.path, write, memory)


def _progress(path: str, planned: serializers.Plan):
    """A bar on a terminal, for a save that takes longer than two seconds."""
    from tqdm import tqdm

    name = f"Saving {os.path.basename(path)}"
    return tqdm(
        desc=name,
        total=planned.nbytes,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=2,
        disable=None,
        leave=False,
    )
