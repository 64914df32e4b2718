"""Shared by all tests: one directory and one set of flags a test, and no backend left over."""

import pytest
import torch


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Artefacts of a run go to the test's own directory; compiled steps are shared within a session."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def clean_state():
    """Flags, deferred initialisation and the current backend are process-wide."""
    yield
    import sys

    backends = sys.modules.get("cerebras.pytorch.backends")
    if backends is not None:
        backends.reset()
    tensor = sys.modules.get("cerebras.pytorch.core.tensor")
    if tensor is not None:
        tensor.tape.records.clear()
        tensor.tape.mode, tensor.tape.validating = "defer", False
    backend = sys.modules.get("cerebras.pytorch.backend")
    if backend is not None:
        backend._current = None
    torch.set_default_device(None)


@pytest.fixture(scope="session")
def compile_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("compile_dir")
