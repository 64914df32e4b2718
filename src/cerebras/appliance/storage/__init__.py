"""Files that hold arrays and JSON metadata: readers and writers without torch.

`StorageReader`, `StorageWriter` and `StorageDeleter` choose the implementation from the path; `H5Reader` and `H5Writer`
are the one for local HDF5 files (`docs/checkpoint-format.md`).
"""

from .base_storage import MissingFileError, StorageDeleter, StorageError, StorageReader, StorageWriter
from .h5_storage import H5Deleter, H5Reader, H5Writer
from .s3_storage import S3Deleter, S3Reader, S3Writer

__all__ = [
    "H5Deleter",
    "H5Reader",
    "H5Writer",
    "MissingFileError",
    "S3Deleter",
    "S3Reader",
    "S3Writer",
    "StorageDeleter",
    "StorageError",
    "StorageReader",
    "StorageWriter",
]
