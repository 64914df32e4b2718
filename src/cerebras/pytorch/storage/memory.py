"""Moving large tensors with several threads."""

from concurrent.futures import ThreadPoolExecutor


def in_threads(function, items, nbytes: int, threads: int) -> None:
    """Calls `function(*item)` for each item, in threads where there are enough bytes to be worth it."""
    if nbytes < 1 << 24 or threads < 2:
        for item in items:
            function(*item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(function, *item) for item in items]:
            done.result()
