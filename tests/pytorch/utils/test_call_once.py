"""call_once."""

import pytest

from cerebras.pytorch.utils.call_once import call_once


def test_only_the_first_call_runs():
    calls = []

    @call_once()
    def note(value):
        """doc"""
        calls.append(value)
        return value

    assert note(1) == 1
    assert note(2) is None
    assert calls == [1] and note.__doc__ == "doc"


def test_a_call_that_raised_does_not_count():
    calls = []

    @call_once()
    def fail_first():
        calls.append(1)
        if len(calls) == 1:
            raise OSError("first")

    with pytest.raises(OSError):
        fail_first()
    fail_first()
    fail_first()
    assert len(calls) == 2
