"""What cannot be part of one static graph is refused by name, with the user's line and the mend."""

import inspect
import io
import math
import pickle
import subprocess
import sys
import textwrap
import traceback
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cerebras.pytorch as cstorch
from cerebras.pytorch.core import tensor as tensor_module
from cerebras.pytorch.core.errors import (
    BatchMismatchError,
    DynamicShapeError,
    FrozenValueError,
    GraphChangedError,
    StaticGraphError,
    TensorReadError,
)


def line_of(function, text) -> int:
    """The line in this file where `text` stands in the source of `function`."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def run(way, body, batches=None, steps=3):
    """A loop around one traced body; returns what it kept."""
    step = way.trace(body)
    for x, y in way.loop(batches or way.batches((4, 4), (4, 3), steps=steps)):
        way.keep(step(x, y))
    return way.kept


# reading
READS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "bool": lambda t: bool(t.sum()),
    "complex": lambda t: complex(t.sum()),
    "if": lambda t: 1 if t.sum() > 0 else 2,
    "while": lambda t: any(v > 0 for v in t[0]),
    "and": lambda t: t.sum() > 0 and 1,
    "print": lambda t: print(t, file=io.StringIO()),
    "repr": lambda t: repr(t),
    "str": lambda t: str(t),
    "f-string": lambda t: f"{t.sum():.3f}",
    "f-string without format": lambda t: f"{t}",
    "format": lambda t: "{}".format(t.sum()),  # noqa: UP032
    "percent": lambda t: "%.3f" % t.sum(),  # noqa: UP031
    "numpy": lambda t: t.detach().numpy(),
    "numpy force": lambda t: t.numpy(force=True),
    "np.asarray": lambda t: np.asarray(t.detach()),
    "np.array": lambda t: np.array(t.detach()),
    "tolist": lambda t: t.tolist(),
    "list of rows": lambda t: [float(v) for v in t[0]],
    "cpu": lambda t: t.cpu(),
    "to cpu": lambda t: t.to("cpu"),
    "to device": lambda t: t.to(torch.device("cpu")),
    "to other": lambda t: t.to(torch.zeros(1)),
    "copy to cpu": lambda t: torch.zeros(4, 4).copy_(t),
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "in": lambda t: 1.0 in t,
    "max of tensors": lambda t: max(t[0, 0], t[0, 1]),
    "range": lambda t: range(t.long().sum()),
    "index": lambda t: [1, 2, 3][t.long().sum()],
    "math": lambda t: math.sqrt(t.sum()),
    "pickle": lambda t: pickle.dumps(t),
    "torch.save": lambda t: torch.save(t, io.BytesIO()),
    "data_ptr": lambda t: t.data_ptr(),
    "is_nonzero": lambda t: t.sum().is_nonzero(),
    "assert": lambda t: torch.testing.assert_close(t, t),
}


@pytest.mark.parametrize("how", READS)
def test_reading_inside_the_step_names_the_line_and_the_mend(way, how):
    read = READS[how]

    def body(x, y):
        z = x * 2
        read(z)
        return z.sum()

    with pytest.raises(TensorReadError) as e:
        run(way, body)
    message = str(e.value)
    line = read.__code__.co_firstlineno
    assert f"{__file__}:{line}" in message, message
    assert e.value.site.line == line
    assert "step_closure" in message and "tensor" in message
    assert tensor_module.active_recorder is None


@pytest.mark.parametrize("how", ["print", "repr", "numpy", "cpu", "tolist", "np.asarray"])
def test_reading_a_parameter_inside_the_step(way, how):
    with way.device:
        model = nn.Linear(4, 4)
    net = way.compile(model)

    def body(x, y):
        READS[how](model.weight)
        return net(x).sum()

    with pytest.raises(TensorReadError, match="'weight'"):
        run(way, body)


@pytest.mark.parametrize("how", ["item", "print", "if", "numpy", "cpu", "tolist", "pickle", "f-string"])
def test_reading_a_result_in_the_loops_body_names_the_line(way, how):
    read = READS[how]
    step = way.trace(lambda x, y: x * 2)
    with pytest.raises(TensorReadError, match="before the step.*has ended") as e:
        for x, y in way.loop(way.batches((4, 4), (4, 3))):
            read(step(x, y))
    assert f"{__file__}:{read.__code__.co_firstlineno}" in str(e.value)


@pytest.mark.parametrize("how", READS)
def test_reading_is_allowed_in_a_closure_and_after_the_loop(way, how):
    read, last = READS[how], None
    step = way.trace(lambda x, y: x.abs() * 0.2)

    @way.closure
    def closure(t):
        read(t)
        way.kept.append(1)

    for x, y in way.loop(way.batches((4, 4), (4, 3), steps=2)):
        last = step(x, y)
        closure(last)
    read(last)
    assert way.kept == [1, 1]


def test_a_debuggers_repr_of_locals_in_a_failing_step_does_not_hide_the_error(way):
    def body(x, y):
        z = x * 2
        raise KeyError("mine", type(z).__name__)

    with pytest.raises(KeyError, match="mine"):
        run(way, body)


def test_reading_a_cpu_tensor_made_from_numbers_is_no_read_of_the_step(way):
    def body(x, y):
        n = torch.tensor(3).item()
        table = torch.arange(4).tolist()
        return (x * n).sum() + table[3]

    want = [[(x * 3).sum() + 3] for x, y in way.batches((4, 4), (4, 3), steps=3)]
    assert run(way, body) == want


def test_reading_a_cpu_tensor_that_lives_on_would_freeze_it(way):
    factor = torch.tensor(2.0)

    def body(x, y):
        return (x * factor.item()).sum()

    with pytest.raises(TensorReadError, match="on the CPU"):
        run(way, body)


def test_a_cpu_tensor_that_lives_on_is_read_at_every_step(way):
    factor = torch.tensor(1.0)

    @way.closure
    def change():
        factor.add_(1)

    step = way.trace(lambda x, y: (x * factor).sum())
    data = way.batches((4, 4), (4, 3), steps=3)
    for x, y in way.loop(data):
        way.keep(step(x, y))
        change()
    assert [k[0] for k in way.kept] == [(x * (i + 1)).sum() for i, (x, _) in enumerate(data)]


# batches and arguments
@pytest.mark.parametrize(
    "second, found",
    [
        ((torch.zeros(3, 4), torch.zeros(4, 3)), r"\(3, 4\)"),
        ((torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 3)), "float64"),
    ],
)
def test_a_batch_of_another_shape_or_dtype(way, second, found):
    data = way.batches((4, 4), (4, 3), steps=1) + [second]
    with pytest.raises(BatchMismatchError, match=rf"x of the traced step(.|\n)*\(4, 4\)(.|\n)*{found}(.|\n)*drop_last"):
        run(way, lambda x, y: x.sum(), data)


def test_a_batch_of_another_structure(way):
    data = [{"a": torch.zeros(2)}, {"b": torch.zeros(2)}]
    step = way.trace(lambda batch: sum(v.sum() for v in batch.values()))
    with pytest.raises(BatchMismatchError, match="another structure"):
        for batch in way.loop(data):
            step(batch)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_batches_may_be_any_nest(way):
    data = [{"p": Pair(torch.ones(2) * i, torch.ones(3)), "l": [torch.ones(1), (torch.ones(1) * 3,)]} for i in range(3)]
    step = way.trace(lambda batch: batch["p"].x.sum() + batch["p"].y.sum() + batch["l"][1][0])
    for batch in way.loop(data):
        way.keep(step(batch))
    assert [k[0].item() for k in way.kept] == [6.0, 8.0, 10.0]


@pytest.mark.parametrize("what", ["module", "object", "generator", "set"])
def test_a_step_returns_only_what_a_program_can_return(way, what):
    model = nn.Linear(2, 2)
    value = {"module": model, "object": object(), "generator": (i for i in ()), "set": {1}}[what]

    def body(x, y):
        return x.sum(), value

    with pytest.raises(StaticGraphError, match=type(value).__name__) as e:
        run(way, body)
    assert f"{__file__}:{body.__code__.co_firstlineno}" in str(e.value)


def test_a_step_may_return_strings_numbers_none_and_nests(way):
    got = []
    step = way.trace(lambda x, y: {"loss": x.sum(), "parts": [x, (y, None)], "name": "train", "k": 2})
    for x, y in way.loop(way.batches((4, 4), (4, 3), steps=2)):
        out = step(x, y)
        assert out["name"] == "train" and out["k"] == 2 and out["parts"][1][1] is None
        got.append(out)
    assert got[1]["loss"].item() == got[1]["parts"][0].sum().item()


# Python numbers
def test_a_number_that_is_passed_follows(same_as_eager):
    def script(way):
        @way.trace
        def step(x, alpha, n):
            way.keep(alpha, n, alpha * 2 + n)
            return (x * alpha).sum() / n + alpha**0.5

        for i, (x,) in enumerate(way.loop(way.batches((4, 4)))):
            way.keep(step(x, 0.1 * (i + 1), i + 1))

    same_as_eager(script)


def test_an_int_that_is_passed_stays_an_int_in_a_closure(same_as_eager):
    def script(way):
        @way.closure
        def check(n, f):
            assert type(n) is int and type(f) is float
            way.kept.append([n, f])

        @way.trace
        def step(x, n):
            check(n + 1, n / 2)
            return x.sum()

        for i, (x,) in enumerate(way.loop(way.batches((4, 4)))):
            way.keep(step(x, i))

    same_as_eager(script)


def test_an_if_on_a_number_holds_until_it_flips(way):
    def body(x, i):
        if i < 2:
            return x.sum()
        return x.sum() * 100

    step = way.trace(body)
    with pytest.raises(FrozenValueError) as e:
        for i, (x,) in enumerate(way.loop(way.batches((4, 4)))):
            way.keep(step(x, i))
    assert f"{__file__}:{line_of(body, 'if i < 2')}" in str(e.value)
    assert len(way.kept) == 2, "the steps before the flip ran"


def test_a_number_that_is_used_as_a_size_must_stay(way):
    def body(x, n):
        return torch.zeros(n, device=x.device).sum() + x[:, :n].sum()

    step = way.trace(body)
    with pytest.raises(FrozenValueError) as e:
        for i, (x,) in enumerate(way.loop(way.batches((4, 4)))):
            way.keep(step(x, 2 + i // 2))
    assert f"{__file__}:{line_of(body, 'torch.zeros(n')}" in str(e.value)
    assert len(way.kept) == 2


def test_a_flag_that_is_passed_must_stay(way):
    step = way.trace(lambda x, flag: x.sum() if flag else x.mean())
    with pytest.raises(FrozenValueError, match="flag.*was True.*is False"):
        for i, (x,) in enumerate(way.loop(way.batches((4, 4)))):
            way.keep(step(x, i < 2))


def test_a_changing_closure_variable_is_refused_by_name(way):
    scale = 1.0
    step = way.trace(lambda x, y: x.sum() * scale)
    with pytest.raises(FrozenValueError, match="'scale', which was 1.0.*is 2.0"):
        for x, y in way.loop(way.batches((4, 4), (4, 3))):
            way.keep(step(x, y))
            scale = 2.0


SCALE = 1.0


def test_a_changing_global_is_refused_by_name(way, monkeypatch):
    def helper(x):
        return x.sum() * SCALE

    step = way.trace(lambda x, y: helper(x))
    with pytest.raises(FrozenValueError, match="'SCALE'"):
        for x, y in way.loop(way.batches((4, 4), (4, 3))):
            way.keep(step(x, y))
            monkeypatch.setitem(globals(), "SCALE", 2.0)


class Settings:
    def __init__(self):
        self.scale = 1.0
        self.table = {"alpha": 1.0}
        self.unread = 0


@pytest.mark.parametrize("where", ["attribute", "key", "module", "dropout", "nested function", "loop variable"])
def test_a_changing_attribute_or_entry_is_refused_by_name(way, where):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = nn.Linear(4, 3), nn.Dropout(0.0)
            self.scale = 1.0

        def forward(self, x):
            return self.drop(self.inner(x)) * self.scale

    settings = Settings()
    with way.device:
        model = Model()
    net = way.compile(model)
    i = 0

    def scaled(t):
        return t * settings.scale

    def body(x, y):
        out = net(x).sum()
        if where == "attribute":
            return out * settings.scale
        if where == "key":
            return out * settings.table["alpha"]
        if where == "nested function":
            return scaled(out)
        return out * i if where == "loop variable" else out

    step = way.trace(body)
    name = {"key": "alpha", "dropout": r"drop.*\.p|p'", "loop variable": "'i'"}.get(where, "scale")
    with pytest.raises(FrozenValueError, match=name):
        for i, (x, y) in enumerate(way.loop(way.batches((4, 4), (4, 3)))):  # noqa: B007
            way.keep(step(x, y))
            settings.unread += 1
            if where in ("attribute", "nested function"):
                settings.scale = 2.0
            elif where == "key":
                settings.table["alpha"] = 2.0
            elif where == "module":
                model.scale = 2.0
            elif where == "dropout":
                model.drop.p = 0.5
    assert len(way.kept) == 1


def test_an_attribute_that_the_step_does_not_read_may_change(way):
    settings = Settings()
    step = way.trace(lambda x, y: x.sum() * settings.scale)
    for x, y in way.loop(way.batches((4, 4), (4, 3))):
        way.keep(step(x, y))
        settings.unread += 1
    assert len(way.kept) == 4


def test_counting_steps_inside_the_step_is_refused(way):
    """The body runs once: the count would stay at one."""
    count = 0

    def body(x, y):
        nonlocal count
        count += 1
        return x.sum()

    with pytest.raises(FrozenValueError, match="'count'"):
        run(way, body)


# effects
def test_a_step_from_which_nothing_is_fetched_warns_once(way):
    with way.device:
        total = torch.zeros(())

    def body(x, y):
        total.add_(x.sum())

    step = way.trace(body)
    data = way.batches((4, 4), (4, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in way.loop(data):
            step(x, y)
    ours = [w for w in caught if "Nothing is fetched" in str(w.message)]
    assert len(ours) == 1 and f"{__file__}:{body.__code__.co_firstlineno}" in str(ours[0].message)
    assert total.item() == pytest.approx(sum(x.sum().item() for x, _ in data), abs=1e-5)


def test_a_step_without_effect_is_an_error(way):
    def body(x, y):
        x.sum()

    with pytest.raises(StaticGraphError, match="has no effect"):
        run(way, body)


# data-dependent shapes
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.nonzero().sum(),
        lambda x: x[x > 0].sum(),
        lambda x: torch.masked_select(x, x > 0).sum(),
        lambda x: torch.bincount(x.long().flatten().abs()).sum(),
        lambda x: torch.unique(x).sum(),
        lambda x: torch.where(x > 0)[0].sum(),
        lambda x: torch.argwhere(x).sum(),
        lambda x: x.nonzero() is None,  # unused
        lambda x: torch.repeat_interleave(x[:, 0], x[:, 0].long()).sum(),
    ],
    ids=["nonzero", "mask", "masked_select", "bincount", "unique", "where", "argwhere", "unused", "repeat_interleave"],
)
def test_shapes_that_depend_on_data_are_refused_with_the_line(way, operation):
    def body(x, y):
        operation(x)
        return x.sum()

    with pytest.raises(DynamicShapeError) as e:
        run(way, body)
    assert f"{__file__}:{operation.__code__.co_firstlineno}" in str(e.value)


def test_one_hot_without_num_classes_is_refused(way):
    with pytest.raises(StaticGraphError, match="test_static_graph"):
        run(way, lambda x, y: F.one_hot(x.long().abs()).sum())


def test_mixing_a_cpu_tensor_in_is_refused(way):
    other = torch.ones(4)
    with pytest.raises(StaticGraphError, match=r"different devices(.|\n)*test_static_graph"):
        run(way, lambda x, y: (x + other).sum())


@pytest.mark.parametrize("operation", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2, 2)])
def test_changing_a_shape_in_place_is_refused(way, operation):
    with pytest.raises(StaticGraphError, match="in place|resize"):
        run(way, lambda x, y: operation(x * 1).sum())


def test_a_generator_of_its_own_is_refused(way):
    g = torch.Generator().manual_seed(0)
    with pytest.raises(StaticGraphError, match="generator"):
        run(way, lambda x, y: x.sum() + torch.rand(2, generator=g, device="cpu").sum().to(x.device))


# errors of the user's
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("from backward")


def failing(where):
    def hook(*args):
        raise KeyError("from hook")

    def body(net, x, optimizer):
        if where == "forward":
            raise KeyError("from forward")
        out = net(x)
        if where == "function":
            out = Broken.apply(out)
        elif where == "tensor hook":
            out.register_hook(hook)
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return out.sum()

    return body, hook


@pytest.mark.parametrize(
    "where", ["forward", "function", "tensor hook", "parameter hook", "optimizer hook", "module hook", "scheduler"]
)
def test_errors_of_the_users_arrive_with_their_traceback_and_leave_nothing_behind(way, where):
    body, hook = failing(where)
    scheduler_step = torch.optim.lr_scheduler.LRScheduler.step
    zero_grad = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    rng = torch.get_rng_state, torch.set_rng_state
    with way.device:
        model = nn.Linear(4, 3)
    net = way.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fail = True

    def schedule(epoch):
        if epoch and fail and where == "scheduler":
            raise KeyError("from schedule")
        return 1.0

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    if where == "parameter hook":
        handle = model.weight.register_hook(hook)
    elif where == "optimizer hook":
        handle = optimizer.register_step_pre_hook(hook)
    elif where == "module hook":
        handle = model.register_full_backward_hook(hook)
    ran = []

    def step_body(x, y):
        value = body(net, x, optimizer) if fail or where not in ("forward", "function", "tensor hook") else net(x).sum()
        scheduler.step()
        return value

    step = way.trace(step_body)
    before = model.weight.detach().cpu().clone()
    with pytest.raises(KeyError, match="from") as e:
        for x, y in way.loop(way.batches((4, 4), (4, 3))):
            step(x, y)
    assert any(frame.filename == __file__ and "raise KeyError" in frame.line for frame in traceback.extract_tb(e.tb))
    assert tensor_module.active_recorder is None
    assert torch.optim.lr_scheduler.LRScheduler.step is scheduler_step
    assert (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == zero_grad
    assert (torch.get_rng_state, torch.set_rng_state) == rng
    assert torch.equal(model.weight.cpu(), before)
    assert model.weight.grad is None and scheduler.last_epoch == 0
    assert type(optimizer.param_groups[0]["lr"]) is float
    fail = False
    if "hook" in where and where != "tensor hook":
        handle.remove()
    for x, y in way.loop(way.batches((4, 4), (4, 3))):
        way.keep(step(x, y))
        ran.append(1)
    assert len(way.kept) == len(ran) == 4


def test_the_process_survives_an_error_in_backward():
    source = textwrap.dedent("""
        import torch, cerebras.pytorch as cstorch
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, grad):
                raise KeyError("mine")
        backend = cstorch.backend("CSX")
        w = torch.ones(3, device=backend.torch_device, requires_grad=True)
        @cstorch.trace
        def step():
            Broken.apply(w).sum().backward()
            return w.grad
        try:
            step()
        except KeyError as e:
            print("caught", e)
    """)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0 and "caught 'mine'" in done.stdout, done.stderr


def test_a_read_in_a_hook_of_the_backward_names_its_line(way):
    with way.device:
        model = nn.Linear(4, 3)
    net = way.compile(model)

    def hook(grad):
        return grad if grad.norm() < 1 else grad / 2

    model.weight.register_hook(hook)

    def body(x, y):
        loss = net(x).sum()
        loss.backward()
        return loss

    with pytest.raises(TensorReadError) as e:
        run(way, body)
    assert f"{__file__}:{line_of(hook, 'grad.norm()')}" in str(e.value)


def test_a_traced_step_inside_another_is_refused(way):
    inner = way.trace(lambda x: x.sum())
    with pytest.raises(StaticGraphError, match="inside another"):
        run(way, lambda x, y: inner(x))


# retracing
def test_retracing_a_steady_step_changes_nothing(csx, same_as_eager):
    def script(way):
        with way.device:
            model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3))
            total = torch.zeros(())
        net = way.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)

        @way.trace
        def step(x, y):
            nonlocal total
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total = total + loss.detach()
            way.keep(loss)
            return loss

        for x, y in way.loop(way.batches((4, 4), (4, 3), steps=5)):
            way.keep(step(x, y))
        return model, optimizer, scheduler, total

    same_as_eager(script, retrace_every_iteration=True)


def test_retracing_finds_the_operation_that_changed(csx):
    backend = csx(retrace_every_iteration=True)
    counter = [0]

    def body(x):
        counter[0] += 1
        if counter[0] > 2:
            x = torch.relu(x)
        return x.sum()

    step = cstorch.trace(body)
    loader = cstorch.utils.data.DataLoader(lambda: [torch.ones(3)] * 5)
    with pytest.raises(GraphChangedError) as e:
        for x in cstorch.utils.data.DataExecutor(loader, num_steps=5):
            step(x)
    assert "relu" in str(e.value) and f"{__file__}:{line_of(body, 'relu')}" in str(e.value)
    assert backend.executor is None


def test_a_variable_that_was_none_and_holds_a_tensor_later_is_refused_by_name(way):
    last = None
    step = way.trace(lambda x, y: x.sum() if last is None else x.sum() + last)
    with pytest.raises(FrozenValueError, match="'last', which was None"):
        for x, y in way.loop(way.batches((4, 4), (4, 3))):
            last = step(x, y)


def test_a_cache_that_the_step_fills_itself_is_computed_at_every_step(way):
    class Model(nn.Module):
        mask = None

        def __init__(self):
            super().__init__()
            self.cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.ones_like(x).triu()
            return x * self.cache

    net = way.compile(Model())
    data = way.batches((4, 4), (4, 3))
    with pytest.warns(UserWarning, match="cache"):
        assert run(way, lambda x, y: net(x).sum(), data) == [[x.triu().sum()] for x, _ in data]
