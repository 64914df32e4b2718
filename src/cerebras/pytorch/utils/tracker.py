"""How fast samples are processed."""

import time

DEFAULT_SMOOTH_FACTOR = 0.4


class RateTracker:
    """Counts items and tells their rate, smoothed since the last query and plain since the last reset.

    Args:
        smooth_factor: weight of the previous smoothed rate, in [0, 1); 0 for no smoothing, None for 0.4. The rate of
            the interval since the last query has the weight `1 - smooth_factor`.

    Raises:
        TypeError, ValueError: a smooth_factor that is not such a number.

    API page: cerebras.pytorch.utils.tracker.RateTracker
    """

    __slots__ = (
        "_last_count", "_last_time", "_rate", "_skipped_count", "_skipped_time", "_start", "smooth_factor",
        "total_count",
    )  # fmt: skip

    def __init__(self, smooth_factor: float | None = None):
        if smooth_factor is not None:
            if isinstance(smooth_factor, bool) or not isinstance(smooth_factor, (int, float)):
                raise TypeError(f"RateTracker: smooth_factor={smooth_factor!r}; use a number in [0, 1), or None.")
            if not 0 <= smooth_factor < 1:
                raise ValueError(f"RateTracker: smooth_factor={smooth_factor!r}; use a number in [0, 1), or None.")
        self.smooth_factor = DEFAULT_SMOOTH_FACTOR if smooth_factor is None else float(smooth_factor)
        self.reset()

    def reset(self) -> None:
        """Forgets every count and starts the clock anew."""
        self.total_count = 0
        self._start = self._last_time = time.perf_counter()
        self._last_count = 0
        self._skipped_count, self._skipped_time = 0, 0.0
        self._rate: float | None = None

    def skip(self, seconds: float, count: int) -> None:
        """Leaves the last `seconds`, with the `count` items counted in them, out of the rates, not out of the totals."""
        self._skipped_time += seconds
        self._skipped_count += count
        self._last_time = min(self._last_time + seconds, time.perf_counter())
        self._last_count = min(self._last_count + count, self.total_count)

    def add(self, count: int) -> None:
        """Counts `count` more items."""
        self.total_count += count

    def elapsed_seconds(self) -> float:
        """Seconds since the last reset."""
        return time.perf_counter() - self._start

    def rate(self) -> float:
        """Items per second since the last query, smoothed with the earlier rates; 0.0 before the first item.

        Asking again before anything was added returns the same rate, so that two loggers do not disturb each other.
        """
        if self.total_count == self._last_count:
            return self._rate or 0.0
        now = time.perf_counter()
        interval = max(now - self._last_time, 1e-9)
        rate = (self.total_count - self._last_count) / interval
        if self._rate is not None:
            rate = self.smooth_factor * self._rate + (1.0 - self.smooth_factor) * rate
        self._last_count = self.total_count
        self._last_time = now
        self._rate = rate
        return rate

    def global_rate(self) -> float:
        """Items per second since the last reset; 0.0 before the first item. Without what was skipped, if any is left."""
        if self.total_count > self._skipped_count:
            seconds = self.elapsed_seconds() - self._skipped_time
            return (self.total_count - self._skipped_count) / max(seconds, 1e-9)
        return self.total_count / max(self.elapsed_seconds(), 1e-9) if self.total_count else 0.0
