"""Every schedule against torch's, against its formula, or against values of the original package."""

import copy
import inspect
import itertools
import math
import pickle

import pytest
import torch

from cerebras.pytorch import optim
from cerebras.pytorch.optim import lr_scheduler as lrs
from cerebras.pytorch.optim import scheduler as base
from cerebras.pytorch.optim import weight_decay_scheduler as wds

STEPS = 100


def make_optimizer(groups=1, lr=0.5, **extra):
    return optim.SGD(
        [dict(params=[torch.nn.Parameter(torch.zeros(2))], tags=[f"t{i}"], **extra) for i in range(groups)], lr=lr
    )


def trajectory(make, key="lr", steps=STEPS):
    optimizer = make_optimizer()
    scheduler = make(optimizer)
    values = [optimizer.param_groups[0][key]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        values.append(optimizer.param_groups[0][key])
    assert all(type(value) is float for value in values)
    return values


def torch_trajectory(make, lr, steps=STEPS):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    scheduler = make(optimizer)
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


T = torch.optim.lr_scheduler
AGAINST_TORCH = {
    "constant": (lambda o: lrs.ConstantLR(o, 0.3), lambda o: T.ConstantLR(o, 1.0), 0.3),
    "linear": (lambda o: lrs.LinearLR(o, 0.1, 1.0, 30), lambda o: T.LinearLR(o, 0.1, 1.0, 30), 1.0),
    "polynomial": (lambda o: lrs.PolynomialLR(o, 1.0, 0.0, 30, 2.0), lambda o: T.PolynomialLR(o, 30, 2.0), 1.0),
    "step": (lambda o: lrs.StepLR(o, 1.0, 7, 0.5), lambda o: T.StepLR(o, 7, 0.5), 1.0),
    "multi step": (
        lambda o: lrs.MultiStepLR(o, 1.0, 0.5, [9, 4, 70]),
        lambda o: T.MultiStepLR(o, [4, 9, 70], 0.5),
        1.0,
    ),
    "multiplicative": (lambda o: lrs.MultiplicativeLR(o, 1.0, 0.9), lambda o: T.ExponentialLR(o, 0.9), 1.0),
    "cosine": (lambda o: lrs.CosineAnnealingLR(o, 1.0, 13, 0.1), lambda o: T.CosineAnnealingLR(o, 13, 0.1), 1.0),
    "warm restarts": (
        lambda o: lrs.CosineAnnealingWarmRestarts(o, 1.0, 5, 2, 0.1),
        lambda o: T.CosineAnnealingWarmRestarts(o, 5, 2, 0.1),
        1.0,
    ),
    "warm restarts of one length": (
        lambda o: lrs.CosineAnnealingWarmRestarts(o, 1.0, 5, 1, 0.1),
        lambda o: T.CosineAnnealingWarmRestarts(o, 5, 1, 0.1),
        1.0,
    ),
    "triangular": (
        lambda o: lrs.CyclicLR(o, 0.1, 1.0, 4, 6),
        lambda o: T.CyclicLR(o, 0.1, 1.0, 4, 6, cycle_momentum=False),
        0.1,
    ),
    "triangular2": (
        lambda o: lrs.CyclicLR(o, 0.1, 1.0, 4, mode="triangular2"),
        lambda o: T.CyclicLR(o, 0.1, 1.0, 4, mode="triangular2", cycle_momentum=False),
        0.1,
    ),
    "exp_range": (
        lambda o: lrs.CyclicLR(o, 0.1, 1.0, 4, mode="exp_range", gamma=0.9),
        lambda o: T.CyclicLR(o, 0.1, 1.0, 4, mode="exp_range", gamma=0.9, cycle_momentum=False),
        0.1,
    ),
    "sequential": (
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1.0, 5), lrs.MultiplicativeLR(o, 1.0, 0.9)], [5]),
        lambda o: T.SequentialLR(o, [T.LinearLR(o, 0.1, 1.0, 5), T.ExponentialLR(o, 0.9)], [5]),
        1.0,
    ),
    "chained": (
        lambda o: lrs.ChainedLR([lrs.LinearLR(o, 0.5, 1.0, 5), lrs.MultiplicativeLR(o, 1.0, 0.9)]),
        lambda o: T.ChainedScheduler([T.LinearLR(o, 0.5, 1.0, 5), T.ExponentialLR(o, 0.9)]),
        1.0,
    ),
}


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_follows_torch(name):
    ours, theirs, lr = AGAINST_TORCH[name]
    assert trajectory(ours) == pytest.approx(torch_trajectory(theirs, lr), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_one_cycle_follows_torch_and_stays_at_its_end(strategy, three_phase):
    settings = dict(pct_start=0.3, final_div_factor=100.0, three_phase=three_phase, anneal_strategy=strategy)

    def reference(o):
        return T.OneCycleLR(o, 1.0, 40, div_factor=10.0, cycle_momentum=False, **settings)

    values = trajectory(lambda o: lrs.OneCycleLR(o, 0.1, 1.0, 40, **settings))
    assert values[:40] == pytest.approx(torch_trajectory(reference, 0.1, 39), rel=1e-9)
    assert values[40:] == [pytest.approx(0.001)] * 61


def half_cosine(start, end, x):
    return end + (start - end) * (1 + math.cos(math.pi * x)) / 2


FORMULAS = {
    "linear": (lambda o: lrs.LinearLR(o, 0.0, 2.0, 30), lambda t: 2.0 * min(t, 30) / 30),
    "linear with cycle": (
        lambda o: lrs.LinearLR(o, 1.0, 0.0, 10, cycle=True),
        lambda t: 1 - t / (10 * max(1, math.ceil(t / 10))),
    ),
    "cosine decay": (lambda o: lrs.CosineDecayLR(o, 1.0, 0.1, 30), lambda t: half_cosine(1.0, 0.1, min(t, 30) / 30)),
    "exponential": (lambda o: lrs.ExponentialLR(o, 2.0, 10, 0.5), lambda t: 2 * 0.5 ** (t / 10)),
    "exponential staircase": (lambda o: lrs.ExponentialLR(o, 2.0, 10, 0.5, True), lambda t: 2 * 0.5 ** (t // 10)),
    "inverse time": (
        lambda o: lrs.InverseExponentialTimeDecayLR(o, 1.0, 2, 10, 0.5),
        lambda t: 1 / (1 + 0.5 * t**2 / 10),
    ),
    "inverse time staircase": (
        lambda o: lrs.InverseExponentialTimeDecayLR(o, 1.0, 2, 10, 0.5, True),
        lambda t: 1 / (1 + 0.5 * (t**2 // 10)),
    ),
    "inverse root": (lambda o: lrs.InverseSquareRootDecayLR(o, 1.0, 2.0, 5), lambda t: 2 / math.sqrt(max(t, 5))),
    "piecewise": (
        lambda o: lrs.PiecewiseConstantLR(o, [0.1, 0.2, 0.3], [4, 9]),
        lambda t: 0.1 if t < 4 else 0.2 if t < 9 else 0.3,
    ),
    "lambda": (lambda o: Lambda(o, 0.5), lambda t: 0.5 * (t + 1) * 3),
    "gigaGPT": (
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.0, 1.0, 10), lrs.CosineDecayLR(o, 1.0, 0.1, 50)], [10]),
        lambda t: t / 10 if t < 10 else half_cosine(1.0, 0.1, min(t - 10, 50) / 50),
    ),
    "no warm-up": (
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.0, 1.0, 0), lrs.CosineDecayLR(o, 1.0, 0.1, 50)], [0]),
        lambda t: half_cosine(1.0, 0.1, min(t, 50) / 50),
    ),
    "nested": (
        lambda o: lrs.SequentialLR(
            o,
            [
                lrs.ConstantLR(o, 0.7),
                lrs.SequentialLR(o, [lrs.LinearLR(o, 0.0, 1.0, 5), lrs.StepLR(o, 1.0, 10, 0.5)], [5]),
            ],
            [20],
        ),
        lambda t: 0.7 if t < 20 else (t - 20) / 5 if t < 25 else 0.5 ** ((t - 25) // 10),
    ),
}


class Lambda(lrs.LambdaLR):
    def set_value_lambda(self):
        return [lambda t: t + 1, lambda t: 3]


@pytest.mark.parametrize("name", FORMULAS)
def test_follows_its_formula(name):
    make, formula = FORMULAS[name]
    assert trajectory(make) == pytest.approx([formula(t) for t in range(STEPS + 1)], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    "make, expected",
    [
        # values of the original package 2.10.0
        (lambda o: lrs.PolynomialLR(o, 1.0, 0.1, 10, 2.0), [1.0, 0.829, 0.676, 0.541, 0.424, 0.325]),
        (lambda o: lrs.InverseSquareRootDecayLR(o), [1.0, 1.0, 0.7071068, 0.5773503]),
        (lambda o: lrs.OneCycleLR(o, 0.1, 1.0, 20), [0.1, 0.1859424, 0.4109424, 0.6890577, 0.9140577, 1.0, 0.9874641]),
        (
            lambda o: lrs.ChainedLR([lrs.ConstantLR(o, 0.5, 5), lrs.LinearLR(o, 0.5, 1.0, 5)]),
            [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0],
        ),
        (lambda o: lrs.LambdaLR(o, 1.0), [0.0, 0.0316667]),
    ],
)
def test_follows_the_original(make, expected):
    assert trajectory(make, steps=len(expected) - 1) == pytest.approx(expected, abs=2e-7)


EVERYTHING = {**{k: v[0] for k, v in AGAINST_TORCH.items()}, **{k: v[0] for k, v in FORMULAS.items()}}
EVERYTHING["one cycle"] = lambda o: lrs.OneCycleLR(o, 0.1, 1.0, 40)
EVERYTHING["scaled"] = lambda o: lrs.ScalePerParamLR(o, lrs.LinearLR(o, 0.0, 1.0, 50))


@pytest.mark.parametrize("as_tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_resumes_in_the_middle(name, as_tensors):
    def tensors(value):
        if isinstance(value, dict):
            return {k: tensors(v) for k, v in value.items()}
        if isinstance(value, list):
            return [tensors(v) for v in value]
        return torch.tensor(value) if type(value) is int else value

    make = EVERYTHING[name]
    whole = trajectory(make)
    first, second = make_optimizer(), make_optimizer()
    scheduler = make(first)
    for _ in range(37):
        scheduler.step()
    state = pickle.loads(pickle.dumps(scheduler.state_dict()))
    resumed = make(second)
    resumed.load_state_dict(tensors(state) if as_tensors else state)
    second.load_state_dict(first.state_dict())
    values = [second.param_groups[0]["lr"]]
    assert resumed.get_last_lr() == values
    for _ in range(STEPS - 37):
        resumed.step()
        values.append(second.param_groups[0]["lr"])
    assert values == whole[37:]


def test_state_has_the_names_of_the_original_and_settings_of_the_checkpoint_win():
    optimizer = make_optimizer()
    scheduler = lrs.LinearLR(optimizer, 0.0, 1.0, 10)
    state = scheduler.state_dict()
    assert {"initial_learning_rate", "end_learning_rate", "total_iters", "last_epoch", "_step_count"} <= set(state)
    assert scheduler.initial_learning_rate == scheduler.initial_val == 0.0
    other = lrs.LinearLR(optimizer, 0.0, 5.0, 20)
    other.load_state_dict(state)
    assert (other.end_learning_rate, other.total_iters) == (1.0, 10)
    other.load_state_dict({"last_epoch": torch.tensor(5), "_get_called_within_step": False})
    assert other.last_epoch == 5


ARGUMENTS = dict(
    val=0.3,
    initial_val=0.3,
    end_val=0.1,
    total_iters=10,
    decay_rate=0.5,
    step_exponent=2,
    step_size=3,
    gamma=0.5,
    milestones=[3, 6],
    T_max=5,
    T_0=5,
    coefficient=0.9,
    base_val=0.1,
    max_val=0.5,
    total_steps=20,
    vals=[0.1, 0.2, 0.3],
)
WD_CLASSES = [cls for name, cls in vars(wds).items() if name.endswith("WD")]


@pytest.mark.parametrize("cls", WD_CLASSES, ids=lambda cls: cls.__name__)
def test_weight_decay_takes_the_same_values(cls):
    twin = getattr(lrs, cls.__name__.replace("WD", "LR"), lrs.CosineAnnealingWarmRestarts)
    names = list(inspect.signature(cls).parameters)

    def build(cls, optimizer, linear, multiplicative, constant):
        inner = [linear(optimizer, 0.5, 1.0, 5), multiplicative(optimizer, 1.0, 0.9), constant(optimizer, 0.2)]
        values = {**ARGUMENTS, "optimizer": optimizer, "schedulers": inner, "scheduler": inner[0]}
        return cls(*[values[name] for name in itertools.takewhile(values.__contains__, names)])

    decay = trajectory(
        lambda o: build(cls, o, wds.LinearWD, wds.MultiplicativeWD, wds.ConstantWD), key="weight_decay", steps=20
    )
    rate = trajectory(lambda o: build(twin, o, lrs.LinearLR, lrs.MultiplicativeLR, lrs.ConstantLR), steps=20)
    assert decay == rate
    assert len(WD_CLASSES) == 19


def test_scale_per_param():
    optimizer = make_optimizer(groups=2)
    optimizer.param_groups[0]["adjust_learning_rate"] = 0.5
    scheduler = lrs.ScalePerParamLR(optimizer, lrs.LinearLR(optimizer, 0.1, 1.1, 10))
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.2])
    inside = lrs.SequentialLR(optimizer, [scheduler, lrs.ConstantLR(optimizer, 0.4)], [2])
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.1])
    inside.step(), inside.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.4, 0.4]


def test_tags_select_groups():
    optimizer = make_optimizer(groups=3)
    scheduler = lrs.LinearLR(optimizer, 0.1, 1.1, 10, param_group_tags="t1")
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, pytest.approx(0.2), 0.5]
    assert scheduler.param_group_tags == {"t1"}
    assert scheduler.get_last_lr() == [None, pytest.approx(0.2), None]
    optimizer.param_groups[2]["tags"] = None
    lrs.ConstantLR(optimizer, 0.9, param_group_tags=["t0", None])
    assert [g["lr"] for g in optimizer.param_groups] == [0.9, pytest.approx(0.2), 0.9]
    with pytest.raises(ValueError, match=r"\['zz'\]; the groups have"):
        lrs.ConstantLR(optimizer, 0.9, param_group_tags="zz")


def test_works_with_optimizers_of_torch_and_learning_rates_in_tensors():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=torch.tensor(0.1))
    lr = optimizer.param_groups[0]["lr"]
    scheduler = lrs.LinearLR(optimizer, 0.1, 1.1, 10)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.2)


def test_own_schedules():
    class Square(lrs.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer, factor: float):
            self.factor = factor
            super().__init__(optimizer, total_iters=None)

        def _get_closed_form(self):
            return self.factor * self.last_epoch**2

    assert trajectory(lambda o: Square(o, 0.1), steps=3) == pytest.approx([0.0, 0.1, 0.4, 0.9])
    optimizer = make_optimizer()
    assert isinstance(Square(optimizer, 1.0), torch.optim.lr_scheduler.LRScheduler)
    copied = copy.deepcopy(Square(optimizer, 1.0))
    copied.step()


def test_constructors_carry_real_annotations():
    # configuration classes are generated from them
    for module in (lrs, wds, base):
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, base.Scheduler):
                for parameter in inspect.signature(cls.__init__).parameters.values():
                    if parameter.name != "self":
                        assert parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
    classes = {c for c in vars(lrs).values() if isinstance(c, type) and issubclass(c, lrs.LRScheduler)}
    names = [c.__name__.lower() for c in classes]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda o: lrs.LinearLR(o, 0.1, 1.0, -1), "total_iters"),
        (lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1)], [3]), "1 schedulers need 0 milestones, got 1"),
        (lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1)] * 3, [9, 4]), "milestones must rise"),
        (lambda o: lrs.SequentialLR(o, [wds.ConstantWD(o, 0.1)], []), "sets 'weight_decay', not 'lr'"),
        (lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(make_optimizer(), 0.1)], []), "another optimizer"),
        (lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, param_group_tags="t0")], []), "param_group_tags"),
        (lambda o: lrs.PiecewiseConstantLR(o, [0.1], [3]), "need 2 values"),
        (lambda o: lrs.ChainedLR([lrs.ConstantLR(o, 1.0), lrs.LinearLR(o, 0.0, 1.0, 3)]), "starts at 0"),
        (lambda o: lrs.CyclicLR(o, 0.1, 1.0, mode="square"), "mode"),
        (lambda o: lrs.OneCycleLR(o, 0.1, 1.0, anneal_strategy="exp"), "anneal_strategy"),
        (lambda o: lrs.StepLR(o, 0.1, 0, 0.5), "step_size"),
        (lambda o: lrs.CosineAnnealingWarmRestarts(o, 0.1, 0), "T_0"),
        (lambda o: lrs.ExponentialLR(o, 0.1, 0, 0.5), "total_iters"),
    ],
)
def test_settings_that_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_optimizer())
