"""One script, run as plain PyTorch and as a captured step: everything that it keeps and returns must be equal.

A script is a function of one argument, the *way* it is run, which offers what a user's script takes from cstorch:

    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @way.trace
        def step(x, y): ...

        for x, y in way.loop(way.batches((8, 4), (8, 3), steps=4)):
            way.keep(step(x, y))
        return model, optimizer
"""

import contextlib

import pytest
import torch

import cerebras.pytorch as cstorch

SEED = 7
RELEASED = object()


class _Plain:
    """A plain PyTorch loop."""

    captured = False
    device = contextlib.nullcontext()
    torch_device = torch.device("cpu")

    def __init__(self):
        self.kept = []
        torch.manual_seed(SEED)

    def compile(self, model):
        return model

    def trace(self, fn):
        return fn

    def closure(self, fn):
        return fn

    def loop(self, data):
        yield from data

    def keep(self, *values):
        self.kept.append([_value(v) for v in values])

    @staticmethod
    def batches(*shapes, steps=4, seed=1):
        g = torch.Generator().manual_seed(seed)
        return [tuple(torch.randn(shape, generator=g) for shape in shapes) for _ in range(steps)]


class _Csx(_Plain):
    """The same, captured."""

    captured = True

    def __init__(self, backend):
        self.backend, self.device, self.torch_device = backend, backend.device, backend.torch_device
        super().__init__()

        @cstorch.step_closure
        def keep(*values):
            self.kept.append([_value(v) for v in values])

        self.keep = keep

    def compile(self, model):
        return cstorch.compile(model, self.backend)

    def trace(self, fn):
        return cstorch.trace(fn)

    def closure(self, fn):
        return cstorch.step_closure(fn)

    def loop(self, data):
        loader = cstorch.utils.data.DataLoader(lambda: data)
        return cstorch.utils.data.DataExecutor(loader, num_steps=len(data))


def _value(v):
    return v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v


def _flat(value, path, found):
    if isinstance(value, torch.nn.Module):
        _flat(value.state_dict(), path, found)
        for name, p in value.named_parameters():
            if p.grad is not None:
                released = getattr(p.grad, "_cell", None) is not None and p.grad._cell.status == "released"
                found[f"{path}.{name}.grad"] = RELEASED if released else _value(p.grad)
    elif hasattr(value, "state_dict"):
        state = value.state_dict()
        _flat(state, path, found)
    elif isinstance(value, torch.Tensor):
        found[path] = _value(value)
    elif isinstance(value, dict):
        for k, v in value.items():
            _flat(v, f"{path}.{k}", found)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            _flat(v, f"{path}[{i}]", found)
    elif isinstance(value, (int, float, str, bool, type(None))):
        found[path] = value


def assert_same(got, want, tolerance=None):
    mine, theirs = {}, {}
    _flat(got, "", mine)
    _flat(want, "", theirs)
    assert mine.keys() == theirs.keys()
    for key, expected in theirs.items():
        value = mine[key]
        if value is RELEASED:  # a gradient that the step clears before its backward is not kept; reading it is an error
            continue
        if isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype and value.shape == expected.shape, key
            if tolerance is None:
                assert torch.equal(value, expected), f"{key}: {value} instead of {expected}"
            else:
                torch.testing.assert_close(
                    value, expected, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
                )
        elif isinstance(expected, float) and tolerance is not None:
            assert value == pytest.approx(expected, rel=tolerance), key
        else:
            assert value == expected, f"{key}: {value} instead of {expected}"


@pytest.fixture
def csx(compile_dir):
    """`csx(**arguments)` makes a CSX backend whose steps are interpreted."""

    def make(**arguments):
        cstorch.backends.csx.debug.compiler = "eager"
        return cstorch.backend("CSX", **({"compile_dir": compile_dir} | arguments))

    return make


@pytest.fixture
def same_as_eager(csx):
    """`same_as_eager(script, tolerance=None, captures=1, **backend_arguments)`; returns the backend."""

    def check(script, tolerance=None, captures=1, **arguments):
        plain = _Plain()
        want = script(plain)
        generator = torch.get_rng_state()
        way = _Csx(csx(**arguments))
        got = script(way)
        assert way.kept, "the script keeps nothing"
        assert_same(way.kept, plain.kept, tolerance)
        assert_same(got, want, tolerance)
        assert torch.equal(torch.get_rng_state(), generator), "the generator's state differs at the end"
        if captures is not None:
            assert len(way.backend.reports) == captures, "the step was captured more than once"
        return way.backend

    return check


@pytest.fixture
def way(csx):
    """A captured way to run, without an oracle."""
    return _Csx(csx())
