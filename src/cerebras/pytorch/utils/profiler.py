"""What an execution measures about itself: samples, rates, time, and what the user adds as an `Activity`.

API page: cerebras.pytorch.utils.data.DataExecutor, `profiler_activities`.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

from .tracker import RateTracker

PERFORMANCE_FILE = "performance.json"


class Activity:
    """One measurement. A subclass names it, gives `value`, and overrides `step` where it needs every step.

    Attributes:
        name: key in performance.json, and attribute of the profiler; the class name where it is not set.
        profiler: the profiler that made it, with `rate_tracker` and the other activities.
    """

    name: str = ""

    def __init__(self, profiler: "Profiler"):
        self.profiler = profiler

    def step(self, batch_size: int) -> None:
        """Called at the end of each step with the number of samples in its batch. Runs on the step's critical path."""

    @property
    def value(self) -> Any:
        """The measurement so far; JSON must be able to hold it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it measured. Define the property `value`.")


class TotalSamples(Activity):
    """Samples processed since the start."""

    name = "total_samples"

    @property
    def value(self) -> int:
        return self.profiler.rate_tracker.total_samples


class TotalTime(Activity):
    """Seconds since the start."""

    name = "total_time"

    @property
    def value(self) -> float:
        return self.profiler.rate_tracker.total_time


class ClientRate(Activity):
    """Smoothed samples per second, as this process sees it."""

    name = "rate"

    @property
    def value(self) -> float:
        return self.profiler.rate_tracker.rate


class GlobalRate(Activity):
    """Samples per second since the start."""

    name = "global_rate"

    @property
    def value(self) -> float:
        return self.profiler.rate_tracker.global_rate


class SamplesPerSecond(GlobalRate):
    """The global rate under the key that site scripts read."""

    name = "samples_per_sec"


class FlopsUtilization(Activity):
    """Percent of the hardware's FLOP/s that the model uses; None until `Profiler.set_flops` was told both figures."""

    name = "flops_utilization"

    @property
    def value(self) -> float | None:
        flops = self.profiler.flops
        if flops is None:
            return None
        per_sample, supported = flops
        return 100.0 * per_sample * self.profiler.rate_tracker.global_rate / supported


BUILT_IN = (FlopsUtilization, GlobalRate, ClientRate, SamplesPerSecond, TotalSamples, TotalTime)


class _Rates:
    """The rate tracker's figures as plain numbers, which is how scripts format them."""

    __slots__ = ("_tracker",)

    def __init__(self, tracker: RateTracker):
        self._tracker = tracker

    @property
    def rate(self) -> float:
        """Smoothed samples per second."""
        return self._tracker.rate()

    @property
    def global_rate(self) -> float:
        """Samples per second since the start."""
        return self._tracker.global_rate()

    @property
    def total_samples(self) -> int:
        """Samples since the start."""
        return self._tracker.total_count

    total_count = total_samples

    @property
    def total_time(self) -> float:
        """Seconds since the start."""
        return self._tracker.elapsed_seconds()

    elapsed_seconds = total_time


class Profiler:
    """Collects the built-in activities and the user's over one execution.

    Args:
        activities: `Activity` subclasses; each is constructed with the profiler.

    Raises:
        TypeError: something that is not a subclass of Activity.
        ValueError: two activities of one name.

    Attributes:
        rate_tracker: `rate`, `global_rate`, `total_samples`, `total_time` as numbers.
        activities: name to activity. `profiler.<name>` is the activity's value.
        flops: (FLOPs per sample, FLOP/s of the hardware), or None.
    """

    def __init__(self, activities: Iterable[type[Activity]] | None = None):
        self._tracker = RateTracker()
        self.rate_tracker = _Rates(self._tracker)
        self.flops: tuple[float, float] | None = None
        self.activities: dict[str, Activity] = {}
        self._steps = []
        requested = [kind for kind in activities or () if kind not in BUILT_IN]
        for kind in (*BUILT_IN, *requested):
            if not (isinstance(kind, type) and issubclass(kind, Activity)):
                raise TypeError(
                    f"profiler_activities holds {kind!r}; use subclasses of cerebras.pytorch.utils.profiler.Activity "
                    "(the class, not an instance)."
                )
            name = kind.name or kind.__name__
            if name in self.activities:
                raise ValueError(
                    f"profiler_activities: {kind.__qualname__} and {type(self.activities[name]).__qualname__} are both "
                    f"named {name!r}. Set another `name` in one of them."
                )
            activity = self.activities[name] = kind(self)
            if kind.step is not Activity.step:
                self._steps.append(activity.step)

    def __getattr__(self, name: str) -> Any:
        activities = self.__dict__.get("activities", {})
        if name in activities:
            return activities[name].value
        raise AttributeError(f"The profiler has no activity {name!r}. It measures {', '.join(activities)}.")

    def step(self, batch_size: int | None) -> None:
        """Counts one step of `batch_size` samples; None where the batch has no single size counts none."""
        if batch_size:
            self._tracker.total_count += batch_size
        for step in self._steps:
            step(batch_size or 0)

    def skip(self, seconds: float, batch_size: int | None) -> None:
        """Leaves the step that took the last `seconds` out of the rates: it captured or compiled. Totals keep it."""
        self._tracker.skip(seconds, batch_size or 0)

    def reset(self) -> None:
        """Starts count and clock anew."""
        self._tracker.reset()

    def set_flops(self, per_sample: float, supported: float) -> None:
        """Tells the FLOPs of one sample and the hardware's FLOP/s, from which the utilization follows.

        Raises:
            ValueError: a figure that is not above zero.
        """
        if not per_sample > 0 or not supported > 0:
            raise ValueError(f"Profiler.set_flops({per_sample!r}, {supported!r}): both figures must be above zero.")
        self.flops = (float(per_sample), float(supported))

    def as_dict(self) -> dict[str, Any]:
        """Name to value of every activity."""
        return {name: activity.value for name, activity in self.activities.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Writes the values as JSON to the file `path`, or to `performance.json` in the directory `path`.

        Raises:
            TypeError: an activity's value that JSON cannot hold; names the activity.
        """
        path = os.fspath(path)
        if os.path.isdir(path):
            path = os.path.join(path, PERFORMANCE_FILE)
        values = self.as_dict()
        for name, value in values.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"The activity {name!r} has the value {value!r}, which JSON cannot hold ({error}). "
                    "Return numbers, strings, lists or dicts from `value`."
                ) from error
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w") as file:
            json.dump(values, file, sort_keys=True, indent=4)
        os.replace(temporary, path)
