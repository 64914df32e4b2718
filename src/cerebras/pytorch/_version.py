"""The version: the API level that is implemented, and our own version as its local part."""

from importlib import metadata

API_LEVEL = "2.10.0"

try:
    _own = metadata.version("cstorch")
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    _own = "0"

__version__ = f"{API_LEVEL}+cstorch.{_own}"
