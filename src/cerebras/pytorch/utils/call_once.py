"""Functions whose first call is their only one."""

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def call_once() -> Callable[[Callable[..., _Result]], Callable[..., _Result | None]]:
    """Decorator factory, `@call_once()`: the function runs at its first call in the process; later ones return None.

    Later arguments do not matter. A call that raises does not count, so the next call tries again. Thread-safe.
    """

    def decorate(fn: Callable[..., _Result]) -> Callable[..., _Result | None]:
        lock = threading.RLock()
        called = False

        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            nonlocal called
            if called:
                return None
            with lock:
                if called:
                    return None
                called = True  # Before the call: a function that reaches itself again must not recurse.
                try:
                    return fn(*args, **kwargs)
                except BaseException:
                    called = False
                    raise

        return wrapper

    return decorate
