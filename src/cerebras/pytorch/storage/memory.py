"""Fresh memory for large tensors."""

import ctypes
import functools
import mmap
from concurrent.futures import ThreadPoolExecutor

import torch

_HUGE = 1 << 22


@functools.cache
def _madvise():
    try:
        return ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None


def allocate(shape, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor; a large one in huge pages where the system has them.

    First writing 1 GB in pages of 4 KiB takes longer than reading it from the page cache.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.nbytes >= _HUGE and advice is not None and _madvise() is not None:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)  # advice: a failure changes nothing
    return tensor


def in_threads(function, items, nbytes: int, threads: int) -> None:
    """Calls `function(*item)` for each item, in threads where there are enough bytes to be worth it."""
    if nbytes < 1 << 24 or threads < 2:
        for item in items:
            function(*item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(function, *item) for item in items]:
            done.result()
