"""`cstorch.load`."""

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import IO, Any

import torch

from cerebras.appliance.storage import H5Reader, MissingFileError, StorageError
from cerebras.appliance.storage.h5_storage import HDF5_SIGNATURE

from .background import wait_before_reading
from .save import remember_loaded
from .serializers import Reading

_ZIP_SIGNATURE = b"PK\x03\x04"


def load(checkpoint_file: str | os.PathLike | IO, map_location=None, *, allow_pickle: bool = False, **kwargs) -> Any:
    """Loads a checkpoint: an HDF5 file of `save` or of the original, a safetensors file, or a file of `torch.save`.

    Args:
        checkpoint_file: a path, or a binary file object.
        map_location: None: tensors are read from the file at each access. "cache": at the first access only.
            A device, its name, a callable or a dict as in `torch.load`: all tensors are read now. Lazy tensors of
            safetensors and torch files are memory-mapped instead.
        allow_pickle: unpickle entries of an HDF5 file that were stored as pickles, and load torch files with
            `weights_only=False`. Unpickling can run any code: only for files whose writer you trust.
        **kwargs: for `torch.load`, and only used for its files; but `mmap=True` also counts for an eager load of an
            HDF5 file. It needs no memory for the values until they are written to, and is as fast as safetensors. The
            file must then not be changed in place while its tensors live (a new file under its name does no harm).

    Returns:
        The saved object. A NamedTuple comes back as a NamedTuple class of the same name and fields.

    Raises:
        RuntimeError: the file does not exist (also a FileNotFoundError), is not a checkpoint, is damaged or incomplete,
            or has pickled entries. The same error where a lazy tensor finds its file replaced or changed.
    """
    if not isinstance(checkpoint_file, (str, os.PathLike)):
        return _load_file_object(checkpoint_file, map_location, allow_pickle, kwargs)
    path = os.fspath(checkpoint_file)
    wait_before_reading(path)
    if os.path.isdir(path):
        raise StorageError(f"{path} is a directory, not a checkpoint file")
    try:
        with open(path, "rb") as file:
            head = file.read(9)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise MissingFileError(2, "There is no such checkpoint", path) from None
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
    if head.startswith(HDF5_SIGNATURE):
        return _load_hdf5(path, map_location, allow_pickle, bool(kwargs.get("mmap", False)))
    if len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return _load_safetensors(path, map_location)
    return _load_torch(path, path, head, map_location, allow_pickle, kwargs)


def _load_hdf5(path: str, map_location, allow_pickle: bool, mmap: bool) -> Any:
    reader = H5Reader(path)
    remember_loaded(path, reader.fstat)
    if map_location is None or (isinstance(map_location, str) and map_location == "cache"):
        return Reading(reader, "cache" if map_location else "lazy", None, allow_pickle).read()
    return Reading(reader, "eager", _placer(map_location), allow_pickle, mmap).read()


def _placer(map_location) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function that moves a CPU tensor to where `map_location` says; None where it stays."""
    if isinstance(map_location, dict):
        target = map_location.get("cpu", map_location.get(torch.device("cpu")))
        return None if target is None else _placer(target)
    if isinstance(map_location, (str, int, torch.device)):
        device = torch.device(map_location)
        return None if device.type == "cpu" else lambda tensor: tensor.to(device)
    if callable(map_location):
        return lambda tensor: _moved(tensor, map_location)
    raise TypeError(f"map_location must be None, 'cache', a device, a callable or a dict, not {map_location!r}")


def _moved(tensor: torch.Tensor, map_location: Callable) -> torch.Tensor:
    storage = map_location(tensor.untyped_storage(), "cpu")
    if storage is None:
        return tensor
    out = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return out.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _load_safetensors(path: str, map_location) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise StorageError(
            f"{path} looks like a safetensors file: install the package safetensors to load it"
        ) from None
    try:
        tensors = load_file(path, device="cpu")
    except Exception as error:
        raise StorageError(f"{path} is not a valid safetensors file: {error}") from error
    place = None if map_location is None or map_location == "cache" else _placer(map_location)
    return tensors if place is None else {name: place(tensor) for name, tensor in tensors.items()}


def _load_torch(file, name: str, head: bytes, map_location, allow_pickle: bool, kwargs: dict) -> Any:
    lazy = map_location is None or (isinstance(map_location, str) and map_location == "cache")
    options: dict[str, Any] = {"weights_only": not allow_pickle}
    if lazy and isinstance(file, str) and head.startswith(_ZIP_SIGNATURE):
        options["mmap"] = True
    try:
        return torch.load(file, map_location="cpu" if lazy else map_location, **options | kwargs)
    except Exception as error:
        mend = ""
        if "weights_only" in str(error) or "Weights only" in str(error):
            mend = (
                " If it is a file of torch.save with other objects than tensors, and you trust whoever wrote it, use "
                "load(..., allow_pickle=True): unpickling can run any code."
            )
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise StorageError(
            f"{name} is neither an HDF5 checkpoint, nor a safetensors file, nor a file that torch.load reads "
            f"safely: {reason}.{mend}"
        ) from error


def _load_file_object(file: IO, map_location, allow_pickle: bool, kwargs: dict) -> Any:
    if not hasattr(file, "read") or not hasattr(file, "seek"):
        raise TypeError(f"checkpoint_file must be a path or a binary file object, not {type(file).__name__}")
    start = file.tell()
    head = file.read(9)
    file.seek(start)
    if not isinstance(head, bytes):
        raise TypeError("the checkpoint's file object is in text mode: open it with mode 'rb'")
    if not head.startswith(HDF5_SIGNATURE) and head[8:] != b"{":
        return _load_torch(file, getattr(file, "name", repr(file)), head, map_location, allow_pickle, kwargs)
    with tempfile.NamedTemporaryFile(suffix=".mdl") as copy:  # lazy tensors keep the deleted file open
        shutil.copyfileobj(file, copy)
        copy.flush()
        return load(copy.name, map_location, allow_pickle=allow_pickle, **kwargs)
