"""Limits of the directory in which streamers keep copies of data sets."""

import os
import shutil
import tempfile
from pathlib import Path

WORKER_CACHE_ROOT = os.environ.get(
    "CSTORCH_WORKER_CACHE_ROOT", os.path.join(tempfile.gettempdir(), "cstorch_worker_cache")
)
"""The directory; set CSTORCH_WORKER_CACHE_ROOT to a fast local disk."""
SSD_LIMIT = 0.8
"""Share of the file system that may be full after a copy."""


def get_dir_size(path: str | os.PathLike) -> int:
    """Bytes of all files below a directory; links are not followed."""
    total = 0
    for directory, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(directory, file)).st_size
            except FileNotFoundError:  # Removed since it was listed.
                continue
    return total


def hit_worker_cache_limit(src_dir: str, dest_dir: str) -> tuple[bool, str, str]:
    """Whether replacing `dest_dir` by a copy of `src_dir` would fill the cache's file system beyond SSD_LIMIT.

    Args:
        src_dir: what is to be copied.
        dest_dir: where to, below WORKER_CACHE_ROOT; may exist, and then its size counts as free.

    Returns:
        (limit hit, size of src_dir, space that a copy may take), the sizes in words such as "1.5GiB".

    Raises:
        ValueError: dest_dir is not below WORKER_CACHE_ROOT.
    """
    from cerebras.appliance.utils.units import bytes_to_human

    root = Path(WORKER_CACHE_ROOT).resolve()
    if not Path(dest_dir).resolve().is_relative_to(root):
        raise ValueError(
            f"{dest_dir} is not below the worker cache {root}. Choose a directory there, or set "
            "CSTORCH_WORKER_CACHE_ROOT."
        )
    root.mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(root)
    needed = get_dir_size(src_dir)
    room = max(0, int(SSD_LIMIT * usage.total) - (usage.total - usage.free) + get_dir_size(dest_dir))
    return needed > room, bytes_to_human(needed), bytes_to_human(room)
