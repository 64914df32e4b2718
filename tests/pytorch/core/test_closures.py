"""Step closures and checkpoint closures: order, arguments, errors, and when they run. The same on CPU and CSX."""

import dataclasses
import traceback
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cerebras.pytorch as cstorch


class Run:
    """A loop over four batches of ones times 1, 2, 3, 4."""

    def __init__(self, kind, compile_dir):
        cstorch.backends.csx.debug.compiler = "eager"
        self.backend = cstorch.backend(kind, **({"compile_dir": compile_dir} if kind == "CSX" else {}))
        self.captured = kind == "CSX"

    def __call__(self, num_steps=4, **kwargs):
        loader = cstorch.utils.data.DataLoader(lambda: [torch.ones(3) * (i + 1) for i in range(4)])
        self.executor = cstorch.utils.data.DataExecutor(loader, num_steps=num_steps, **kwargs)
        return self.executor


@pytest.fixture(params=["CPU", "CSX"])
def run(request, compile_dir):
    return Run(request.param, compile_dir)


def test_order_is_the_order_of_the_calls_inside_and_outside_the_step(run):
    seen = []

    @cstorch.step_closure
    def note(*what):
        seen.append(tuple(float(w) if isinstance(w, torch.Tensor) else w for w in what))

    @cstorch.trace
    def step(x):
        note("first inside", x.sum())
        y = x * 2
        note("second inside", y.sum())
        return y.sum()

    for i, x in enumerate(run()):
        note("before", i)
        y = step(x)
        note("after", y)
        seen.append("body") if run.captured else None
    if run.captured:
        seen = [s for s in seen if s != "body"]
    expected = []
    for i in range(4):
        expected += [
            ("before", i),
            ("first inside", 3.0 * (i + 1)),
            ("second inside", 6.0 * (i + 1)),
            ("after", 6.0 * (i + 1)),
        ]
    assert seen == expected


def test_closures_run_after_the_loops_body(run):
    seen = []
    note = cstorch.step_closure(lambda x: seen.append("closure"))
    step = cstorch.trace(lambda x: x.sum())
    for x in run():
        note(step(x))
        seen.append("body")
    assert seen == ["body", "closure"] * 4


class Named(NamedTuple):
    a: torch.Tensor
    b: object


@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    parts: list
    name: str = "r"
    total: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_arguments_in_any_nest_arrive_as_values_on_the_cpu(run, inside):
    seen = []

    def check(t, value):
        assert type(t) is torch.Tensor and t.device.type == "cpu" and not t.requires_grad
        assert t.item() == value

    @cstorch.step_closure
    def look(i, nest, *rest, key, **more):
        v = 3.0 * (i + 1)
        check(nest["list"][0], v)
        check(nest["list"][1][1], v + 1)
        assert type(nest["list"][1]) is tuple
        assert type(nest["named"]) is Named and nest["named"].b == "text"
        check(nest["named"].a, v)
        assert type(nest["record"]) is Record and nest["record"].name == "r"
        check(nest["record"].loss, v)
        check(nest["record"].parts[0]["x"], v)
        check(nest["frozen"].loss, v)
        assert type(nest["ordered"]) is OrderedDict and list(nest["ordered"]) == ["z", "a"]
        check(nest["ordered"]["z"], v)
        assert rest == (None, 2.5, "s", True, marker)
        check(key, v)
        check(more["other"][0], v)
        seen.append(i)

    marker = object()
    with run.backend.device:
        weight = nn.Parameter(torch.ones(()))

    def call(i, x):
        s = x.sum() * weight
        look(
            i,
            {
                "list": [s, (1, s + 1)], "named": Named(s, "text"), "record": Record(s, [{"x": s}]), "frozen": Frozen(s),
                "ordered": OrderedDict(z=s, a=1),
            },
            None, 2.5, "s", True, marker, key=s, other=[s],
        )  # fmt: skip
        return s

    if inside:
        step = cstorch.trace(call)
        for i, x in enumerate(run()):
            step(i, x)
    else:
        step = cstorch.trace(lambda x: x.sum() * weight)
        for i, x in enumerate(run()):
            s = step(x)
            one = step(x)
            look(
                i,
                {
                    "list": [s, (1, one + 1)], "named": Named(s, "text"), "record": Record(s, [{"x": s}]),
                    "frozen": Frozen(s), "ordered": OrderedDict(z=s, a=1),
                },
                None, 2.5, "s", True, marker, key=s, other=[s],
            )  # fmt: skip
    assert seen == [0, 1, 2, 3]


def test_methods(run):
    class Trainer:
        def __init__(self, name):
            self.name, self.seen = name, []

        @cstorch.trace
        def step(self, x):
            self.log(x.sum(), kind="inside")
            return x.sum()

        @cstorch.step_closure
        def log(self, value, kind):
            self.seen.append((self.name, kind, value.item()))

    a, b = Trainer("a"), Trainer("b")
    for x in run(2):
        a.log(a.step(x), kind="outside")
        b.step(x)
    assert a.seen == [("a", "inside", 3.0), ("a", "outside", 3.0), ("a", "inside", 6.0), ("a", "outside", 6.0)]
    assert b.seen == [("b", "inside", 3.0), ("b", "inside", 6.0)]


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_an_exception_has_the_closures_own_traceback(run, inside):
    ran = []

    @cstorch.step_closure
    def fail(value):
        ran.append(value)
        if value > 3:
            raise ZeroDivisionError("mine")

    @cstorch.step_closure
    def later(value):
        ran.append("later")

    @cstorch.trace
    def step(x):
        if inside:
            fail(x.sum())
            later(x.sum())
        return x.sum()

    with pytest.raises(ZeroDivisionError, match="mine") as e:
        for x in run():
            out = step(x)
            if not inside:
                fail(out)
                later(out)
    frame = traceback.extract_tb(e.tb)[-1]
    assert frame.filename == __file__ and frame.name == "fail" and "raise ZeroDivisionError" in frame.line
    assert ran == [3.0, "later", 6.0], "the second step's remaining closures are dropped"
    assert run.backend.executor is None
    for x in run(1):  # the backend is usable again
        step(x)


def test_closures_may_call_closures(run):
    seen = []

    @cstorch.step_closure
    def inner(value):
        seen.append(("inner", value.item()))

    @cstorch.step_closure
    def outer(value):
        seen.append(("outer", value.item()))
        inner(value * 10)

    @cstorch.step_closure
    def last(value):
        seen.append(("last", value.item()))

    @cstorch.trace
    def step(x):
        outer(x.sum())
        last(x.sum())
        return x.sum()

    for x in run(2):
        step(x)
    assert [s for s in seen if s[0] == "inner"] == [("inner", 30.0), ("inner", 60.0)]
    assert [s for s in seen if s[0] != "inner"] == [("outer", 3.0), ("last", 3.0), ("outer", 6.0), ("last", 6.0)]


def test_parameters_and_buffers_arrive_as_they_are_after_the_step(run):
    seen = []
    with run.backend.device:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        count = torch.zeros(())
    net = cstorch.compile(model, run.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    @cstorch.step_closure
    def look(weight, count):
        seen.append((weight.tolist(), count.item()))
        assert not isinstance(weight, nn.Parameter)

    @cstorch.trace
    def step(x):
        look(model.weight, count)
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count.add_(1)
        return loss

    for x in run(2):
        step(x)
    assert seen == [([[0.5] * 3], 1.0), ([[-0.5] * 3], 2.0)]


def test_a_closures_tensor_is_a_value_that_stays(compile_dir):
    """What a closure keeps is not overwritten by the next step (on the CPU backend it is the tensor itself)."""
    run = Run("CSX", compile_dir)
    kept = []
    with run.backend.device:
        total = torch.zeros(3)

    @cstorch.step_closure
    def keep(a, b):
        kept.append((a, b))

    @cstorch.trace
    def step(x):
        total.add_(x)
        keep(total, x * 2)
        return x.sum()

    for x in run(3):
        step(x)
    assert [a.tolist() for a, _ in kept] == [[1.0] * 3, [3.0] * 3, [6.0] * 3]
    assert [b.tolist() for _, b in kept] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]


def test_a_closure_may_change_what_it_was_given(run):
    seen = []
    step = cstorch.trace(lambda x: x.sum())

    @cstorch.step_closure
    def change(value):
        value.mul_(100)
        seen.append(value.item())

    for x in run(2):
        change(step(x) * 1)
    assert seen == [300.0, 600.0]


def test_the_result_of_a_queued_closure_is_none_and_outside_a_run_it_is_the_closures(run):
    double = cstorch.step_closure(lambda v: v * 2)
    assert double(torch.ones(())).item() == 2.0
    step = cstorch.trace(lambda x: x.sum())
    for x in run(1):
        assert double(step(x)) is None


def test_a_traced_step_outside_a_run_calls_its_closures_at_once(run):
    seen = []
    note = cstorch.step_closure(lambda v: seen.append(v.item()))

    @cstorch.trace
    def step(x):
        note(x.sum())
        return x.sum()

    x = torch.ones(3, device=run.backend.torch_device)
    assert step(x).item() == 3.0
    assert step(x + 1).item() == 6.0
    assert seen == [3.0, 6.0]


def test_a_closure_may_call_a_traced_step_and_read_its_result(run):
    seen = []
    step = cstorch.trace(lambda x: x.sum())
    other = cstorch.trace(lambda x: x.max())

    @cstorch.step_closure
    def call(x):
        seen.append(float(other(x.to(run.backend.torch_device))))

    for x in run(2):
        step(x)
        call(x)
    assert seen == [1.0, 2.0]


# checkpoint closures
def saved_at(run, where="outside", **kwargs):
    seen = []

    @cstorch.checkpoint_closure
    def save(value):
        seen.append(run.executor.user_iteration)
        assert value.item() == 3.0 * run.executor.user_iteration

    @cstorch.trace
    def step(x):
        if where == "inside":
            save(x.sum())
        return x.sum()

    for x in run(**kwargs):
        out = step(x)
        if where == "outside":
            save(out)
    return seen


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    "steps, expected", [(None, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3, 4]), (10, [4])], ids=str
)
def test_checkpoint_closures_run_at_multiples_and_at_the_end(run, where, steps, expected):
    assert saved_at(run, where, checkpoint_steps=steps) == expected


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checkpoint_closures_follow_a_schedule(run, where):
    """A Schedule counts from zero and says all: the last step is not added."""
    schedule = cstorch.utils.data.Schedule(
        [cstorch.utils.data.Schedule.Range(start=0, end=3, step=2, include_last=False)]
    )
    assert saved_at(run, where, checkpoint_steps=schedule) == [1, 3]


def test_checkpoint_closure_outside_a_run_runs_at_once(run):
    seen = []
    save = cstorch.checkpoint_closure(lambda v: seen.append(v) or "saved")
    assert save(5) == "saved" and seen == [5]


def test_a_checkpoint_closure_saves_what_the_step_made(run, tmp_path):
    with run.backend.device:
        model = nn.Linear(3, 1)
    net = cstorch.compile(model, run.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @cstorch.checkpoint_closure
    def save():
        cstorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.mdl")

    @cstorch.trace
    def step(x):
        loss = F.relu(net(x)).sum() + net(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x in run(checkpoint_steps=4):
        step(x)
        save()
    saved = cstorch.load(tmp_path / "c.mdl")
    assert torch.equal(saved["model"]["weight"], model.weight.detach().cpu())
    buffer = optimizer.state[model.weight]["momentum_buffer"].cpu()
    assert torch.equal(saved["optimizer"]["state"][0]["momentum_buffer"], buffer)


# the end of a run
def test_break_runs_the_closures_of_the_last_step(run):
    seen = []
    note = cstorch.step_closure(lambda v: seen.append(v.item()))
    step = cstorch.trace(lambda x: x.sum())
    for i, x in enumerate(run()):
        note(step(x))
        if i == 1:
            break
    import gc

    gc.collect()
    assert seen == [3.0, 6.0]
    assert run.backend.executor is None


def test_an_error_in_the_body_drops_the_closures_of_its_step(run):
    seen = []
    note = cstorch.step_closure(lambda v: seen.append(v.item()))
    step = cstorch.trace(lambda x: x.sum())
    with pytest.raises(KeyError):
        for i, x in enumerate(run()):
            note(step(x))
            if i == 1:
                raise KeyError("mine")
    assert seen[:1] == [3.0]
    for x in run(1):
        note(step(x))
    assert seen[-1] == 3.0


def test_a_closures_number_follows_on_csx(compile_dir):
    run = Run("CSX", compile_dir)
    seen = []
    note = cstorch.step_closure(lambda n, s: seen.append((n, s)))

    @cstorch.trace
    def step(x, n):
        note(n, f"step {2}")
        return x.sum() * n

    for i, x in enumerate(run()):
        step(x, i)
    assert seen == [(i, "step 2") for i in range(4)]


def test_fetching_an_undetached_argument_of_the_step(run):
    """The batch itself may be passed on."""
    seen = []
    note = cstorch.step_closure(lambda v: seen.append(v.tolist()))

    @cstorch.trace
    def step(x):
        note(x)
        return x.sum()

    for x in run(2):
        step(x)
        note(x)
    assert seen == [[1.0] * 3, [1.0] * 3, [2.0] * 3, [2.0] * 3]
