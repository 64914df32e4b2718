"""The three small base classes of storage, and the errors all of them raise."""

import os
from abc import ABC, abstractmethod
from typing import ClassVar


class StorageError(RuntimeError):
    """A file cannot be read or written: missing, damaged, incomplete, changed meanwhile, or of another kind."""


class MissingFileError(StorageError, FileNotFoundError):
    """There is no file at the path."""


class _ByPath(ABC):
    """Chooses an implementation by path: the newest subclass whose `is_valid_path` accepts it."""

    _kinds: ClassVar[list[type]]

    @staticmethod
    @abstractmethod
    def is_valid_path(path: str | os.PathLike) -> bool:
        """Whether this implementation is the one for `path`; the file need not exist."""

    @classmethod
    def get_type(cls, path: str | os.PathLike) -> type:
        """The implementation for `path`.

        Raises:
            StorageError: no implementation takes such a path.
        """
        for kind in reversed(cls._kinds):
            if kind.is_valid_path(path):
                return kind
        raise StorageError(f"No storage takes the path {os.fspath(path)!r}: give the path of a local file.")

    @classmethod
    def get(cls, path: str | os.PathLike, *args, **kwargs):
        """An instance of the implementation for `path`."""
        return cls.get_type(path)(path, *args, **kwargs)

    @classmethod
    def path_exists(cls, path: str | os.PathLike) -> bool:
        """Whether there is something at `path`."""
        return cls.get_type(path)._exists(path)

    @staticmethod
    @abstractmethod
    def _exists(path: str | os.PathLike) -> bool: ...


class StorageReader(_ByPath):
    """Reads one file. `StorageReader.get(path)` gives the reader for a path."""

    _kinds: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        StorageReader._kinds.append(cls)


class StorageWriter(_ByPath):
    """Writes one file. `StorageWriter.get(path)` gives the writer for a path."""

    _kinds: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        StorageWriter._kinds.append(cls)


class StorageDeleter(_ByPath):
    """Deletes one file. `StorageDeleter.get(path).delete()`."""

    _kinds: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        StorageDeleter._kinds.append(cls)
