"""Shared by the tests of storage."""

import pytest

from cerebras.appliance.storage import h5_storage


@pytest.fixture(autouse=True)
def no_probe(monkeypatch):
    """Files without seal are not first opened in another process, which takes a third of a second for each."""
    monkeypatch.setattr(h5_storage, "PROBE_SECONDS", 0)


@pytest.fixture
def probe(monkeypatch, no_probe):
    monkeypatch.setattr(h5_storage, "PROBE_SECONDS", 10)
