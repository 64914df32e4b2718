"""HDF5 files in the version 0.5 layout: one leaf per `<key>.__metadata__` root attribute, one dataset per array.

What the writer promises:
1. The final name is either absent, the previous file, or a complete file. Data go to `<path>.<8 hex>.tmp` in the same
   directory; `__SUCCESS__` is written after the data have been synced; then the file is synced, linked or renamed to
   its final name and the directory is synced.
2. Array bytes go to the file with `pwrite`, a MiB at a time through a small buffer: an error of the operating system
   (disk full) keeps its errno, and the checksum is of the bytes that were written even if the array changes meanwhile.
   One call for 10 MB took 15 times as long as ten for 1 MB, and two threads no less than one (ext4, Linux 6).
3. The writer holds an flock on its temporary file. A temporary file that nobody holds is the remains of a killed
   process; the next writer in the directory names it in a warning and removes it.

What the reader promises:
1. HDF5's own file locks are off: they fail on many network file systems, and a file is complete once it has its name.
2. Contiguous data are read at their file offset with `preadv` into the caller's memory.
3. Every read first compares inode, size and modification time with those at opening. A deleted file can still be read.
4. Nothing outside the file is followed: external links, external raw data and virtual datasets are refused.
5. The metadata are compared with the file's seal before HDF5 parses them, and data with their checksum whenever an array
   is read whole. HDF5 can crash or loop on damaged metadata, so a file without seal, such as one of the original, is
   first opened in another process.
"""

import errno
import json
import logging
import math
import mmap
import os
import re
import secrets
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .base_storage import MissingFileError, StorageDeleter, StorageError, StorageReader, StorageWriter
from .checksum import DataChecksum, Seal

logger = logging.getLogger(__name__)

VERSION = 0.5
VERSION_ATTR = "__version__"
SUCCESS_ATTR = "__SUCCESS__"
SPEC_ATTR = "__spec__"
METADATA_SUFFIX = ".__metadata__"
CHECKSUMS_ATTR = "__cstorch_checksums__"  # JSON: array -> checksum

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_TEMPORARY = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_IO_CHUNK = 1 << 20  # fits the second-level cache, so that the checksum costs no second pass over memory
COMPRESSIONS = ("lz4", "zstd")
_COMPRESSED_CHUNK = 1 << 20
PROBE_SECONDS = 60  # for opening a file without seal in another process; 0: not done


def is_local_path(path) -> bool:
    """Whether `path` names a file of this machine: a str or PathLike without a URL scheme."""
    return isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path)


def is_hdf5(path: str | os.PathLike) -> bool:
    """Whether the file begins with the HDF5 signature."""
    with open(path, "rb") as file:
        return file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE


def _wrapped(path: str, doing: str, error: BaseException) -> StorageError:
    return StorageError(f"{path}: {doing}: {type(error).__name__}: {error}")


def _bytes_view(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")


def clean_stale_temporaries(directory: str) -> list[str]:
    """Removes temporary files in `directory` that a killed writer left; returns their paths, each named in a warning.

    Only a file called `*.<8 hex>.tmp` that is empty or begins with the HDF5 signature, and on which no living writer
    holds its flock, is removed. Where flock does not work nothing is.
    """
    import fcntl

    removed = []
    for entry in os.scandir(directory):
        if not _TEMPORARY.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        try:
            fd = os.open(entry.path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            head = os.pread(fd, len(HDF5_SIGNATURE), 0)
            if head in (b"", HDF5_SIGNATURE):
                os.unlink(entry.path)
                removed.append(entry.path)
        except OSError:
            pass
        finally:
            os.close(fd)
    for path in removed:
        logger.warning("Removed %s, the remains of a save that did not end.", path)
    return removed


def _fsync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(fd)


class H5Writer(StorageWriter):
    """Writes one file; used as a context manager, it commits on a normal exit and removes its file on an error.

    Args:
        path: the final name.
        overwrite: replace an existing file when complete. By default it is an error.
        compression: "lz4" or "zstd" for arrays of 64 KiB and more; None writes them as they are.

    Raises:
        ValueError: an unknown compression.
        FileNotFoundError: the directory does not exist.
        FileExistsError: the file exists and `overwrite` is false; raised at commit too, if it came into being meanwhile.
    """

    def __init__(self, path: str | os.PathLike, overwrite: bool = False, compression: str | None = None):
        if compression is not None and compression not in COMPRESSIONS:
            raise ValueError(f"compression must be None, 'lz4' or 'zstd', not {compression!r}")
        self.path = os.path.abspath(os.fspath(path))
        self.overwrite = overwrite
        self.compression = compression
        self._extents: list[tuple[int, int]] = []
        self._checksums: dict[str, str] = {}
        self._buffer: np.ndarray | None = None
        self._file = self._fd = None
        directory = os.path.dirname(self.path)
        if not os.path.isdir(directory):
            raise FileNotFoundError(
                errno.ENOENT, "The directory of the checkpoint does not exist; create it first", directory
            )
        if os.path.isdir(self.path):
            raise IsADirectoryError(errno.EISDIR, "The checkpoint's name is that of a directory", self.path)
        if not overwrite and os.path.lexists(self.path):
            raise self._exists_error()
        clean_stale_temporaries(directory)
        self._open(directory)

    def _exists_error(self) -> FileExistsError:
        return FileExistsError(errno.EEXIST, "The checkpoint exists; delete it or choose another name", self.path)

    def _open(self, directory: str) -> None:
        import fcntl

        import h5py

        while True:
            self.temporary = f"{self.path}.{secrets.token_hex(4)}.tmp"
            self._fd = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # no flock here, so no cleaner removes the file either
            # A cleaner may have removed the file between creation and lock.
            if os.path.exists(self.temporary) and os.path.samestat(os.stat(self.temporary), os.fstat(self._fd)):
                break
            os.close(self._fd)
        try:
            # Data on 64-byte boundaries can be mapped as aligned memory. With "earliest", which the original
            # uses, the time for attributes grows with their square: 250 s for 10,000 leaves, with "v108" 1.3 s.
            self._file = h5py.File(
                self.temporary,
                "w",
                libver=("v108", "v108"),
                locking=False,
                alignment_threshold=64,
                alignment_interval=64,
            )
            self._types = _AttributeTypes()
            self._plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            self._plist.set_layout(h5py.h5d.CONTIGUOUS)
            self._plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            self._plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
            self._links.set_create_intermediate_group(True)
            self._links.set_char_encoding(h5py.h5t.CSET_UTF8)
            self._file.flush()  # the signature marks the temporary file as ours from now on
        except BaseException:
            self.abort()
            raise

    def write_attribute(self, name: str, value: Any) -> None:
        """Writes a root attribute: str, bool, int or float."""
        self._types.write(self._file.id, name, value)

    def write_metadata(self, key: str, metadata: dict) -> None:
        """Writes the JSON metadata of the leaf `key`."""
        self.write_attribute(key + METADATA_SUFFIX, json.dumps(metadata))

    def write_array(self, key: str, array: np.ndarray, attributes: dict[str, Any] | None = None) -> None:
        """Writes `array` as the dataset `key`: contiguous and unfiltered, or compressed in chunks."""
        import h5py

        array = np.asarray(array, order="C")
        space = h5py.h5s.create_simple(array.shape) if array.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
        kind = h5py.h5t.py_create(array.dtype, logical=True)
        compressed = self.compression is not None and array.ndim and array.nbytes >= 1 << 16
        plist = self._compressed_plist(array) if compressed else self._plist
        dataset = h5py.h5d.create(self._file.id, key.encode(), kind, space, plist, self._links)
        for name, value in (attributes or {}).items():
            self._types.write(dataset, name, value)
        if array.size == 0:
            return
        checksum = DataChecksum()
        if compressed:
            array = array.copy()
            checksum.update(_bytes_view(array))
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, array, kind)
            self._file.flush()
            dataset.chunk_iter(lambda chunk: self._extents.append((chunk.byte_offset, chunk.size)))
        else:
            offset = dataset.get_offset()
            if offset is None:
                raise StorageError(f"{self.path}: HDF5 gave no room for {key!r}")
            self._pwrite(_bytes_view(array), offset, checksum)
            self._extents.append((offset, array.nbytes))
        self._checksums[key] = checksum.hexdigest()

    def _compressed_plist(self, array: np.ndarray):
        import h5py
        import hdf5plugin

        row = max(1, array.nbytes // array.shape[0])
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((min(array.shape[0], max(1, _COMPRESSED_CHUNK // row)), *array.shape[1:]))
        chosen = hdf5plugin.LZ4() if self.compression == "lz4" else hdf5plugin.Zstd()
        if array.itemsize > 1:
            plist.set_shuffle()
        plist.set_filter(chosen.filter_id, h5py.h5z.FLAG_MANDATORY, tuple(chosen.filter_options))
        return plist

    def _pwrite(self, data: memoryview, offset: int, checksum: DataChecksum) -> None:
        if self._buffer is None:
            self._buffer = np.empty(_IO_CHUNK, np.uint8)
        source = np.frombuffer(data, np.uint8)
        for start in range(0, len(data), _IO_CHUNK):
            part = self._buffer[: min(_IO_CHUNK, len(data) - start)]
            part[:] = source[start : start + len(part)]
            checksum.update(part)
            done = 0
            while done < len(part):
                done += os.pwrite(self._fd, part[done:], offset + start + done)

    def commit(self) -> None:
        """Syncs, marks the file as complete and gives it its name.

        Raises:
            FileExistsError: another process has made the file meanwhile; it stays as it is.
        """
        try:
            self.write_attribute(CHECKSUMS_ATTR, json.dumps(self._checksums))
            self._file.flush()
            os.fsync(self._fd)
            self.write_attribute(SUCCESS_ATTR, True)
            self._file.close()
            seal = Seal.make(self._fd, self._extents)
            if os.pwrite(self._fd, seal, os.fstat(self._fd).st_size) != len(seal):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
            os.fsync(self._fd)
            self._publish()
        except BaseException:
            self.abort()
            raise
        os.close(self._fd)
        self._file = self._fd = None
        _fsync_directory(os.path.dirname(self.path))

    def _publish(self) -> None:
        if self.overwrite:
            os.replace(self.temporary, self.path)
            return
        try:
            os.link(self.temporary, self.path)  # unlike a rename, it never replaces a file that came into being
        except FileExistsError:
            raise self._exists_error() from None
        except OSError:  # a file system without hard links
            if os.path.lexists(self.path):
                raise self._exists_error() from None
            os.replace(self.temporary, self.path)
            return
        os.unlink(self.temporary)

    def abort(self) -> None:
        """Drops what was written; the final name is untouched."""
        if self._fd is None:
            return
        try:
            os.unlink(self.temporary)
        except FileNotFoundError:
            pass
        if self._file is not None:
            try:
                self._file.close()
            except Exception as error:  # on a full disk HDF5 cannot write its metadata; the file is gone anyway
                logger.debug("Closing the abandoned %s: %s", self.temporary, error)
        os.close(self._fd)
        self._file = self._fd = None

    def __enter__(self) -> "H5Writer":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    is_valid_path = staticmethod(is_local_path)

    @staticmethod
    def _exists(path) -> bool:
        return os.path.exists(path)


class _AttributeTypes:
    """Writes attributes through h5py's low level, a third of the time of `AttributeManager`."""

    def __init__(self):
        import h5py

        self._h5a = h5py.h5a
        self._h5s = h5py.h5s
        self._h5t = h5py.h5t
        self._string = h5py.string_dtype()
        self._string_id = h5py.h5t.py_create(self._string, logical=True)
        self._scalar = h5py.h5s.create(h5py.h5s.SCALAR)

    def write(self, location, name: str, value: Any) -> None:
        if isinstance(value, str):
            value, kind = np.array(value, dtype=self._string), self._string_id
        elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            value, kind = np.array(value, dtype=self._string), self._string_id
        else:
            value = np.asarray(value)
            kind = self._h5t.py_create(value.dtype, logical=True)
        space = self._scalar if value.ndim == 0 else self._h5s.create_simple(value.shape)
        attribute = self._h5a.create(location, name.encode(), kind, space)
        if value.size:
            attribute.write(value, mtype=None if kind is self._string_id else kind)


@dataclass(frozen=True)
class ArrayInfo:
    """Where and what an array is.

    Attributes:
        offset: its place in the file in bytes, None where it is chunked, filtered or empty.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class H5Reader(StorageReader):
    """Reads one complete file. Opening reads the metadata of all leaves and no array.

    Attributes:
        path: absolute path of the file.
        fstat: what `os.fstat` said at opening.
        global_metadata: the root attributes that belong to no leaf, such as `__version__` and `__spec__`.
        checksums: array -> checksum of its bytes; empty in files of the original.

    Raises:
        MissingFileError: there is no such file.
        StorageError: not HDF5, damaged, incomplete, or older than version 0.5.
    """

    def __init__(self, path: str | os.PathLike, *, _probe: bool = True):
        self.path = os.path.abspath(os.fspath(path))
        self._probe = _probe
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            raise MissingFileError(errno.ENOENT, "There is no such checkpoint", self.path) from None
        except OSError as error:
            raise _wrapped(self.path, "cannot be opened", error) from error
        weakref.finalize(self, os.close, self._fd)
        self.fstat = os.fstat(self._fd)
        self._infos: dict[str, ArrayInfo] = {}
        self.checksums: dict[str, str] = {}
        self._map: mmap.mmap | None = None
        if os.pread(self._fd, len(HDF5_SIGNATURE), 0) != HDF5_SIGNATURE:
            raise StorageError(f"{self.path} is not an HDF5 file")
        self._check_seal()
        try:
            self._file = self._open()
            self.check_unchanged()
            attributes = dict(self._read_attributes())
        except StorageError:
            raise
        except Exception as error:
            raise _wrapped(self.path, "damaged or not an HDF5 checkpoint", error) from error
        self._metadata: dict[str, Any] = {}
        self.global_metadata: dict[str, Any] = {}
        for name, value in attributes.items():
            if name.endswith(METADATA_SUFFIX):
                self._metadata[name[: -len(METADATA_SUFFIX)]] = value
            else:
                self.global_metadata[name] = value
        self._check_header()
        self._take_checksums()

    def _open(self):
        import h5py

        try:
            return h5py.File(self.path, "r", locking=False)
        except OSError as error:
            # HDF5 shares a file within a process, and all its users must agree on locking.
            if "locking flag" not in str(error):
                raise
            return h5py.File(self.path, "r")

    def _read_attributes(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._file.attrs.items():
            if not isinstance(name, str):
                raise StorageError(f"{self.path} is damaged: {name!r} is not a name")
            yield name, value.item() if isinstance(value, np.generic) else value

    def _check_header(self) -> None:
        if VERSION_ATTR not in self.global_metadata and SPEC_ATTR not in self.global_metadata:
            raise StorageError(f"{self.path} is an HDF5 file, but not a checkpoint: it has no {VERSION_ATTR}")
        if self.global_metadata.get(SUCCESS_ATTR) is not True:
            raise StorageError(
                f"{self.path} was not written to its end ({SUCCESS_ATTR} is missing); use an earlier one"
            )
        version = self.global_metadata.get(VERSION_ATTR)
        if not isinstance(version, (int, float)) or version < VERSION:
            raise StorageError(
                f"{self.path} has layout version {version}; {VERSION} and newer can be read. Older files hold pickles: "
                "load and save them once with the package that wrote them."
            )

    def _check_seal(self) -> None:
        """Compares the metadata with the seal; a file that has none is first opened in another process."""
        sealed = Seal.check(self._fd)
        if sealed is False:
            raise StorageError(
                f"{self.path}: the metadata are damaged: they differ from what was written. Or another program has the "
                "file open for writing: let it end first."
            )
        if sealed is None and self._probe and PROBE_SECONDS and sys.executable:
            script = f"from {__name__} import probe; probe()"
            try:
                code = subprocess.run(
                    [sys.executable, "-P", "-c", script, self.path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=PROBE_SECONDS,
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
            if code < 0:
                raise StorageError(f"{self.path} is damaged: HDF5 crashed or did not end when it opened the file")

    def _take_checksums(self) -> None:
        try:
            checksums = json.loads(self.global_metadata.get(CHECKSUMS_ATTR, "{}"))
        except (ValueError, TypeError) as error:
            raise _wrapped(self.path, "the metadata are damaged", error) from error
        if isinstance(checksums, dict):
            self.checksums = checksums

    def keys(self) -> list[str]:
        """The keys of all leaves."""
        return list(self._metadata)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def metadata(self, key: str) -> dict:
        """The metadata of one leaf, as parsed JSON.

        Raises:
            StorageError: no such leaf, or its metadata are damaged.
        """
        try:
            metadata = json.loads(self._metadata[key])
        except KeyError:
            raise StorageError(f"{self.path} has no entry {key!r}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise _wrapped(self.path, f"the metadata of {key!r} are damaged", error) from error
        if not isinstance(metadata, dict):
            raise StorageError(f"{self.path}: the metadata of {key!r} are damaged: not a JSON object")
        return metadata

    def check_unchanged(self) -> None:
        """Raises StorageError where the file has been replaced or changed since it was opened."""
        stats = [os.fstat(self._fd)]
        try:
            stats.append(os.stat(self.path))
        except FileNotFoundError:
            pass  # deleted, and ours until closed
        then = self.fstat
        for now in stats:
            if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
                what = "replaced by another file"
            elif (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
                what = "changed"
            else:
                continue
            raise StorageError(f"{self.path} has been {what} since it was loaded; load it again")

    def info(self, key: str) -> ArrayInfo:
        """Shape, dtype and place of the array `key`.

        Raises:
            StorageError: no such array, or its data are not in the file itself.
        """
        if key not in self._infos:
            try:
                self._infos[key] = self._find(key)
            except StorageError:
                raise
            except Exception as error:
                raise _wrapped(self.path, f"the data of {key!r} are missing or damaged", error) from error
        return self._infos[key]

    def _dataset(self, key: str):
        import h5py

        if os.fspath(self.path) and not key:
            raise StorageError(f"{self.path} has no array without a name")
        node, parts = self._file, key.split("/")
        for depth in range(1, len(parts) + 1):  # a link may stand at any level
            if (
                parts[depth - 1]
                and self._file.get("/".join(parts[:depth]), getlink=True).__class__ is not h5py.HardLink
            ):
                raise StorageError(f"{self.path}: {key!r} is a link, and links are not followed")
        node = self._file[key]
        if not isinstance(node, h5py.Dataset):
            raise StorageError(f"{self.path}: {key!r} holds no data")
        return node

    def _find(self, key: str) -> ArrayInfo:
        import h5py

        dataset = self._dataset(key)
        plist = dataset.id.get_create_plist()
        if plist.get_external_count() or plist.get_layout() == h5py.h5d.VIRTUAL:
            raise StorageError(f"{self.path}: the data of {key!r} are in another file, which is not followed")
        if dataset.shape is None:
            raise StorageError(f"{self.path}: {key!r} holds no data")
        if plist.get_nfilters():
            import hdf5plugin  # noqa: F401  registers the filters with HDF5
        contiguous = plist.get_layout() == h5py.h5d.CONTIGUOUS and dataset.dtype.isnative
        info = ArrayInfo(dataset.shape, dataset.dtype, dataset.id.get_offset() if contiguous else None)
        # A chunk unwritten, or data never allocated, reads as zeros: in a checkpoint that is damage.
        if info.nbytes and contiguous and (info.offset is None or info.offset + info.nbytes > self.fstat.st_size):
            raise StorageError(f"{self.path} is cut short: the data of {key!r} are not all there")
        if info.nbytes and not contiguous:
            chunks = dataset.chunks
            wanted = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, chunks)) if chunks else 1
            if dataset.id.get_storage_size() == 0 or (chunks and dataset.id.get_num_chunks() != wanted):
                raise StorageError(f"{self.path}: the data of {key!r} are not all there")
        return info

    def attribute(self, key: str, name: str) -> Any:
        """The attribute `name` of the dataset `key`."""
        try:
            return self._file[key].attrs[name]
        except Exception as error:
            raise _wrapped(self.path, f"{key!r} has no readable attribute {name!r}", error) from error

    def read(self, key: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """The array `key`, or its rows [start, stop) along the first dimension, in new memory."""
        info = self.info(key)
        shape = info.shape if rows is None else (max(0, rows[1] - rows[0]), *info.shape[1:])
        out = np.empty(shape, info.dtype)
        self.read_into(key, out, rows)
        return out

    def read_into(self, key: str, out: np.ndarray, rows: tuple[int, int] | None = None) -> None:
        """Reads the array `key`, or its rows [start, stop), into `out`.

        Args:
            out: C-contiguous, of the array's dtype and the shape of what is read.

        Raises:
            StorageError: the file has been changed, or the data are damaged.
        """
        info = self.info(key)
        self.check_unchanged()
        if out.size == 0:
            return
        checksum = DataChecksum() if rows is None and key in self.checksums else None
        try:
            if info.offset is not None:
                row = info.nbytes // info.shape[0] if info.shape else 0
                self._pread(key, _bytes_view(out), info.offset + (rows[0] * row if rows else 0), checksum)
            elif rows is None:
                self._file[key].read_direct(out)
                if checksum is not None:
                    checksum.update(_bytes_view(out))
            else:
                self._file[key].read_direct(out, source_sel=np.s_[rows[0] : rows[1]])
        except StorageError:
            raise
        except Exception as error:
            raise _wrapped(self.path, f"the data of {key!r} cannot be read", error) from error
        if checksum is not None:
            self._compare(key, checksum)

    def mapped(self, key: str) -> np.ndarray | None:
        """The array `key` in a private, writable mapping of the file; None where it is compressed, empty or 0-d.

        Raises:
            StorageError: the file has been changed, or the data are damaged.
        """
        info = self.info(key)
        if info.offset is None or not info.nbytes or not info.shape or info.offset % info.dtype.alignment:
            return None
        self.check_unchanged()
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        array = np.frombuffer(self._map, info.dtype, math.prod(info.shape), info.offset).reshape(info.shape)
        if key in self.checksums:
            checksum, data = DataChecksum(), _bytes_view(array)
            for start in range(0, len(data), _IO_CHUNK):
                checksum.update(data[start : start + _IO_CHUNK])
            self._compare(key, checksum)
        return array

    def _compare(self, key: str, checksum: DataChecksum) -> None:
        if checksum.hexdigest() != self.checksums[key]:
            self.check_unchanged()
            raise StorageError(f"{self.path}: the data of {key!r} are damaged: they differ from what was written")

    def _pread(self, key: str, out: memoryview, offset: int, checksum: DataChecksum | None) -> None:
        for start in range(0, len(out), _IO_CHUNK):
            part = out[start : start + _IO_CHUNK]
            done = 0
            while done < len(part):
                count = os.preadv(self._fd, [part[done:]], offset + start + done)
                if count == 0:
                    raise StorageError(f"{self.path} is cut short: the data of {key!r} are not all there")
                done += count
            if checksum is not None:
                checksum.update(part)

    def close(self) -> None:
        """Closes HDF5's handle; the file descriptor goes with the reader."""
        self._file.close()

    is_valid_path = staticmethod(is_local_path)

    @staticmethod
    def _exists(path) -> bool:
        return os.path.exists(path)


def probe() -> None:
    """Opens the file that is the process's argument, as a reader would, and looks at every array."""
    try:
        reader = H5Reader(sys.argv[1], _probe=False)
    except StorageError:
        return
    for key in reader.keys():
        try:
            reader.info(key)
        except StorageError:
            pass


class H5Deleter(StorageDeleter):
    """Deletes one local file."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.path.abspath(os.fspath(path))

    def delete(self) -> None:
        """Deletes the file and syncs the directory."""
        os.unlink(self.path)
        _fsync_directory(os.path.dirname(self.path))

    is_valid_path = staticmethod(is_local_path)

    @staticmethod
    def _exists(path) -> bool:
        return os.path.exists(path)
