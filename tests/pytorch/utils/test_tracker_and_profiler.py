"""Rates, activities and performance.json."""

import json
import time

import pytest

from cerebras.pytorch.utils import tracker
from cerebras.pytorch.utils.profiler import Activity, Profiler
from cerebras.pytorch.utils.tracker import RateTracker


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    stopped = Clock()
    monkeypatch.setattr(tracker, "time", stopped)
    return stopped


def test_rate_is_of_the_interval_since_the_last_query(clock):
    rates = RateTracker(smooth_factor=0)
    assert rates.rate() == rates.global_rate() == 0.0
    clock.now += 2
    rates.add(10)
    assert rates.rate() == 5.0
    clock.now += 1
    rates.add(20)
    assert rates.rate() == 20.0
    assert rates.global_rate() == 10.0
    assert rates.elapsed_seconds() == 3.0
    assert rates.total_count == 30


def test_rate_is_smoothed_with_the_previous(clock):
    rates = RateTracker(smooth_factor=0.25)
    for count in (10, 20):
        clock.now += 1
        rates.add(count)
        rate = rates.rate()
    assert rate == 0.25 * 10 + 0.75 * 20


def test_a_second_query_at_once_does_not_disturb_the_rate(clock):
    rates = RateTracker()
    clock.now += 1
    rates.add(10)
    assert rates.rate() == rates.rate() == 10.0


def test_no_time_between_reset_and_query_is_no_division_by_zero(clock):
    rates = RateTracker()
    rates.add(1)
    assert rates.rate() > 0 and rates.global_rate() > 0
    rates.reset()
    assert rates.total_count == 0 and rates.rate() == 0.0


@pytest.mark.parametrize("factor", [1, -0.1, "0.5", True])
def test_smooth_factor_is_checked(factor):
    with pytest.raises((TypeError, ValueError), match="smooth_factor"):
        RateTracker(factor)


def test_rates_of_the_profiler_are_numbers(clock):
    profiler = Profiler()
    clock.now += 2
    profiler.step(4)
    profiler.step(None)
    assert f"{profiler.rate_tracker.rate:.2f} {profiler.rate_tracker.global_rate:.2f}" == "2.00 2.00"
    assert (profiler.rate_tracker.total_samples, profiler.rate_tracker.total_time) == (4, 2.0)
    assert profiler.total_samples == 4


class Largest(Activity):
    name = "largest_batch"

    def __init__(self, profiler):
        super().__init__(profiler)
        self.largest = 0

    def step(self, batch_size):
        self.largest = max(self.largest, batch_size)

    @property
    def value(self):
        return self.largest


def test_an_activity_of_the_user_sees_each_step_and_is_saved(tmp_path, clock):
    profiler = Profiler([Largest])
    for size in (3, 5, 2):
        profiler.step(size)
    clock.now += 1
    profiler.set_flops(per_sample=2.0, supported=100.0)
    profiler.save(tmp_path)
    assert json.loads((tmp_path / "performance.json").read_text()) == {
        "flops_utilization": 20.0,
        "global_rate": 10.0,
        "largest_batch": 5,
        "rate": 10.0,
        "samples_per_sec": 10.0,
        "total_samples": 10,
        "total_time": 1.0,
    }
    assert profiler.largest_batch == 5
    assert [file.name for file in tmp_path.iterdir()] == ["performance.json"]


def test_unknown_flops_are_null_and_not_zero(tmp_path):
    Profiler().save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["flops_utilization"] is None


def test_what_is_no_activity_is_refused():
    with pytest.raises(TypeError, match="class, not an instance"):
        Profiler([Largest(Profiler())])
    with pytest.raises(ValueError, match="largest_batch"):
        Profiler([Largest, type("Other", (Largest,), {})])
    with pytest.raises(AttributeError, match="total_samples"):
        getattr(Profiler(), "samples")  # noqa: B009


def test_a_value_that_json_cannot_hold_is_named(tmp_path):
    class Odd(Activity):
        value = {1, 2}

    with pytest.raises(TypeError, match="'Odd'"):
        Profiler([Odd]).save(tmp_path)


def test_resetting_leaves_compilation_out_of_the_rates(clock):
    profiler = Profiler()
    clock.now += 60
    profiler.reset()
    clock.now += 1
    profiler.step(7)
    assert profiler.rate_tracker.global_rate == 7.0


def test_the_clock_that_is_used_is_the_real_one():
    rates = RateTracker()
    time.sleep(0.01)
    assert 0.005 < rates.elapsed_seconds() < 5
