"""The names for `s3://` paths. They recognise such a path and refuse it: objects in a bucket are not supported."""

import os

from .base_storage import StorageDeleter, StorageError, StorageReader, StorageWriter


def _is_s3(path: str | os.PathLike) -> bool:
    return os.fspath(path).startswith("s3://") if isinstance(path, (str, os.PathLike)) else False


def _refuse(path) -> StorageError:
    return StorageError(f"{path}: s3 paths are not supported. Mount the bucket, or copy the file to a local path.")


class S3Reader(StorageReader):
    """Recognises `s3://` paths; using it raises `StorageError`."""

    is_valid_path = staticmethod(_is_s3)

    def __init__(self, path):
        raise _refuse(path)

    @staticmethod
    def _exists(path) -> bool:
        raise _refuse(path)


class S3Writer(StorageWriter):
    """Recognises `s3://` paths; using it raises `StorageError`."""

    is_valid_path = staticmethod(_is_s3)

    def __init__(self, path):
        raise _refuse(path)

    @staticmethod
    def _exists(path) -> bool:
        raise _refuse(path)


class S3Deleter(StorageDeleter):
    """Recognises `s3://` paths; using it raises `StorageError`."""

    is_valid_path = staticmethod(_is_s3)

    def __init__(self, path):
        raise _refuse(path)

    @staticmethod
    def _exists(path) -> bool:
        raise _refuse(path)
