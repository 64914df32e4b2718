"""Memory for large tensors, and filling it with several threads."""

import math
import mmap
from concurrent.futures import ThreadPoolExecutor

import torch


def short_lived(shape, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor whose memory, where it is large, goes back to the system when it dies.

    The allocator keeps some: reading 100 tensors of 10 MB one by one left 90 MB behind.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < 1 << 20 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).reshape(shape)


def in_threads(function, items, nbytes: int, threads: int) -> None:
    """Calls `function(*item)` for each item, in threads where there are enough bytes to be worth it."""
    if nbytes < 1 << 24 or threads < 2:
        for item in items:
            function(*item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(function, *item) for item in items]:
            done.result()
