"""Plain torch optimizers and schedulers follow eager PyTorch's trajectory from one compilation."""

import copy
import inspect
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from cerebras.pytorch.core.errors import FrozenValueError, StaticGraphError, TensorReadError

SCHED = torch.optim.lr_scheduler
SHAPES = (8, 4), (8, 3)


def mlp():
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))


def state_of(optimizer):
    """State and learning rates; flags such as `fused` may differ."""
    return optimizer.state_dict()["state"], [float(g["lr"]) for g in optimizer.param_groups]


def train(way, make_optimizer, make_scheduler=None, steps=5, inside=True, after=None, make=mlp):
    with way.device:
        model = make()
    net = way.compile(model)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None

    @way.trace
    def step(x, y):
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None and inside:
            scheduler.step()
        optimizer.zero_grad()
        return loss

    for i, (x, y) in enumerate(way.loop(way.batches(*SHAPES, steps=steps))):
        way.keep(step(x, y))
        if scheduler is not None and not inside:
            scheduler.step()
        if after is not None:
            after(way, i, optimizer, model)
    return model, state_of(optimizer), scheduler


O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "sgd": lambda p: O.SGD(p, lr=0.1),
    "sgd weight decay": lambda p: O.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd dampening": lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd maximize": lambda p: O.SGD(p, lr=0.01, momentum=0.9, maximize=True),
    "adam": lambda p: O.Adam(p, lr=0.05, weight_decay=0.1),
    "amsgrad": lambda p: O.Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: O.AdamW(p, lr=0.05, weight_decay=0.1),
    "adamw amsgrad": lambda p: O.AdamW(p, lr=0.05, amsgrad=True),
    "rmsprop": lambda p: O.RMSprop(p, lr=0.02),
    "rmsprop momentum": lambda p: O.RMSprop(p, lr=0.02, momentum=0.9, centered=True, weight_decay=0.01),
    "adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.3),
    "adamax": lambda p: O.Adamax(p, lr=0.05, weight_decay=0.01),
    "nadam": lambda p: O.NAdam(p, lr=0.05, weight_decay=0.01, decoupled_weight_decay=True),
    "adadelta": lambda p: O.Adadelta(p, lr=1.0, weight_decay=0.01),
    "rprop": lambda p: O.Rprop(p, lr=0.05),
    "muon": lambda p: O.Muon(p, lr=0.05),
    "asgd": lambda p: O.ASGD(p, lr=0.05),
    "adamw capturable": lambda p: O.AdamW(p, lr=0.05, capturable=True),
}
CLOSE = {
    "radam": lambda p: O.RAdam(p, lr=0.05, weight_decay=0.01),
    "radam decoupled": lambda p: O.RAdam(p, lr=0.05, weight_decay=0.01, decoupled_weight_decay=True),
    "adam fused": lambda p: O.Adam(p, lr=0.05, fused=True),
    "sgd fused": lambda p: O.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adagrad fused": lambda p: O.Adagrad(p, lr=0.05, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_eager_bit_for_bit(same_as_eager, name):
    def script(way):
        def make(model):
            optimizer = OPTIMIZERS[name](model.parameters())
            if not way.captured and name == "adamw capturable":  # eager PyTorch refuses it on the CPU
                optimizer.param_groups[0]["capturable"] = False
            return optimizer

        return train(way, make, steps=7)

    same_as_eager(script)


def test_adafactor_of_torch_reads_norms_and_is_refused(way):
    """cstorch.optim.Adafactor does not."""
    with pytest.raises(TensorReadError, match="linalg_vector_norm"):
        train(way, lambda m: O.Adafactor(m.parameters(), lr=0.05))


@pytest.mark.parametrize("name", CLOSE)
def test_optimizer_in_another_form_is_close_to_eager(same_as_eager, name):
    """RAdam branches on its step count and is captured in its capturable form; fused kernels are written out."""

    def script(way):
        model, (state, rates), _ = train(way, lambda m: CLOSE[name](m.parameters()), steps=8)
        for entries in state.values():
            if "step" in entries:  # RAdam counts in float64
                entries["step"] = float(entries["step"])
        return model, state, rates

    same_as_eager(script, tolerance=1e-6)


FOREACH = ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adamax", "nadam", "adadelta", "rprop", "asgd"]


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_is_eager_foreach(same_as_eager, name):
    def make(model):
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.param_groups[0]["foreach"] = True
        return optimizer

    # ASGD's foreach form raises a float32 counter to a power: powf there, pow rounded to float32 on our host
    same_as_eager(lambda way: train(way, make, steps=5), tolerance=1e-6 if name == "asgd" else None)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "nadam"])
def test_two_groups_keep_their_own_numbers(same_as_eager, name):
    def make(model):
        optimizer = OPTIMIZERS[name](model[0].parameters())
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01, "weight_decay": 0.3})
        return optimizer

    same_as_eager(lambda way: train(way, make, lambda o: SCHED.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)])))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_learning_rate_as_a_tensor(same_as_eager, name):
    def script(way):
        def make(model):
            return getattr(O, name)(model.parameters(), lr=torch.tensor(0.05))

        return train(way, make, lambda o: SCHED.ExponentialLR(o, 0.8))

    same_as_eager(script, tolerance=1e-6)


# schedulers
def one_cycle(o):
    return SCHED.OneCycleLR(o, 0.2, total_steps=12)


SCHEDULERS = {
    "LambdaLR": lambda o: SCHED.LambdaLR(o, lambda e: 1 / (1 + e)),
    "StepLR": lambda o: SCHED.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: SCHED.MultiStepLR(o, [1, 4], 0.5),
    "CosineAnnealingLR": lambda o: SCHED.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: SCHED.CosineAnnealingWarmRestarts(o, 3),
    "ExponentialLR": lambda o: SCHED.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: SCHED.PolynomialLR(o, 6),
    "CyclicLR": lambda o: SCHED.CyclicLR(o, 0.01, 0.2, 3),
    "OneCycleLR": one_cycle,
    "SequentialLR": lambda o: SCHED.SequentialLR(
        o, [SCHED.LinearLR(o, 0.1, total_iters=3), SCHED.CosineAnnealingLR(o, 4)], [3]
    ),
    "ChainedScheduler": lambda o: SCHED.ChainedScheduler(
        [SCHED.ConstantLR(o, 0.5, 3), SCHED.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "in the loop"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_follows_eager(same_as_eager, name, inside):
    def make(model):
        return O.SGD(model.parameters(), lr=0.1, momentum=0.9)

    same_as_eager(lambda way: train(way, make, SCHEDULERS[name], steps=8, inside=inside))


def test_one_cycle_moves_betas_too(same_as_eager):
    same_as_eager(lambda way: train(way, lambda m: O.AdamW(m.parameters(), lr=0.1), one_cycle, steps=8))


def test_scheduler_in_a_step_closure(same_as_eager):
    def script(way):
        def after(way, i, optimizer, model):
            if not schedulers:
                schedulers.append(SCHED.StepLR(optimizer, 2, 0.5))
            way.closure(lambda: schedulers[0].step())()

        schedulers = []
        return train(way, lambda m: O.Adam(m.parameters(), lr=0.1), after=after, steps=6)

    same_as_eager(script)


def test_plateau_driven_by_a_step_closure_takes_effect_at_the_next_step(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = O.SGD(model.parameters(), lr=0.5)
        scheduler = SCHED.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        rates = []

        @way.closure
        def watch(loss):
            scheduler.step(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch(loss)
            return loss

        for x, y in way.loop(way.batches(*SHAPES, steps=8)):
            way.keep(step(x, y))
        assert len(set(rates)) > 1
        return model, rates, state_of(optimizer)

    same_as_eager(script)


@pytest.mark.parametrize("how", ["in the loop", "closure"])
def test_learning_rate_set_by_hand_between_steps(same_as_eager, how):
    def script(way):
        def after(way, i, optimizer, model):
            def set_rate():
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
                optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * i, 0.99)

            set_rate() if how == "in the loop" else way.closure(set_rate)()

        return train(way, lambda m: O.AdamW(m.parameters(), lr=0.1), after=after)

    same_as_eager(script)


def test_learning_rate_set_by_hand_inside_the_step(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = O.SGD(model.parameters(), lr=0.5, momentum=0.9)

        @way.trace
        def step(x, y, rate):
            for group in optimizer.param_groups:
                group["lr"] = rate * 0.5
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for i, (x, y) in enumerate(way.loop(way.batches(*SHAPES))):
            way.keep(step(x, y, 0.2 / (i + 1)))
        return model, state_of(optimizer)

    same_as_eager(script)


def test_learning_rate_is_reported_from_inside_the_step(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = O.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = SCHED.ExponentialLR(optimizer, 0.5)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            way.keep(scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"])
            return loss

        for x, y in way.loop(way.batches(*SHAPES)):
            way.keep(step(x, y))
        return model, state_of(optimizer)

    same_as_eager(script)


def test_two_optimizers_with_two_schedulers(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        first, second = O.AdamW(model[0].parameters(), lr=0.1), O.Adagrad(model[2].parameters(), lr=0.1)
        a, b = SCHED.StepLR(first, 1, 0.5), SCHED.ExponentialLR(second, 0.7)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            for o in (first, second):
                o.step()
                o.zero_grad()
            a.step()
            b.step()
            return loss

        for x, y in way.loop(way.batches(*SHAPES)):
            way.keep(step(x, y))
        return model, state_of(first), state_of(second), a, b

    same_as_eager(script)


def test_two_optimizer_steps_in_one_traced_step(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = O.Adam(model.parameters(), lr=0.1)
        scheduler = SCHED.ExponentialLR(optimizer, 0.7)

        @way.trace
        def step(x, y):
            for _ in range(2):
                loss = F.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            return loss

        for x, y in way.loop(way.batches(*SHAPES)):
            way.keep(step(x, y))
        return model, state_of(optimizer), scheduler

    same_as_eager(script)


# optimizers of others
class CountsInState(O.Optimizer):
    """Keeps Python numbers in the state, as many third-party optimizers do."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                correction = 1 - group["beta"] ** state["step"]
                p.add_(state["mean"], alpha=-group["lr"] / correction)


class RebindsState(CountsInState):
    """Makes new state tensors at each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] = state["step"] + 1
                state["mean"] = group["beta"] * state["mean"] + (1 - group["beta"]) * p.grad
                p.sub_(group["lr"] * state["mean"] / (1 - group["beta"] ** state["step"]))


class CountsInGroup(CountsInState):
    def __init__(self, params):
        torch.optim.Optimizer.__init__(self, params, dict(lr=0.05, step=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            rate = group["lr"] / group["step"] ** 0.5
            for p in group["params"]:
                p.add_(p.grad, alpha=-rate)


class CountsInGroupFromNothing(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["count"])


class CountsOnDevice(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.zeros((), device=p.device)
                    state["seen"] = torch.full_like(p, 2.0)
                state["step"] += 1
                state["seen"].mul_(0.5).add_(p.grad.abs())
                p.sub_(group["lr"] * p.grad / state["seen"] / state["step"].sqrt())


class KeepsFirstGradient(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["first"] = p.grad.clone() * 2
                p.add_(state["first"], alpha=-group["lr"])


@pytest.mark.parametrize("cls", [CountsInState, RebindsState, CountsInGroup, CountsOnDevice])
def test_custom_optimizer(same_as_eager, cls):
    same_as_eager(lambda way: train(way, lambda m: cls(m.parameters()), lambda o: SCHED.ExponentialLR(o, 0.9)))


def test_custom_optimizer_whose_state_is_made_of_the_first_gradient_is_refused(way):
    with pytest.raises(StaticGraphError, match="'first' from the first gradient"):
        train(way, lambda m: KeepsFirstGradient(m.parameters()))


def test_a_number_that_appears_in_a_group_within_the_step_is_refused(way):
    with pytest.raises(FrozenValueError, match="'count'"):
        train(way, lambda m: CountsInGroupFromNothing(m.parameters()))


class RootOfRate(CountsInState):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            root = math.sqrt(group["lr"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-root)


def test_math_on_a_learning_rate_that_stays_is_a_guarded_constant(same_as_eager):
    same_as_eager(lambda way: train(way, lambda m: RootOfRate(m.parameters())))


def test_math_on_a_learning_rate_that_changes_names_the_line(way):
    def after(way, i, optimizer, model):
        optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(FrozenValueError) as e:
        train(way, lambda m: RootOfRate(m.parameters()), after=after)
    lines, first = inspect.getsourcelines(RootOfRate)
    line = first + next(i for i, text in enumerate(lines) if "math.sqrt" in text)
    assert f"{__file__}:{line}" in str(e.value) and "lr" in str(e.value), str(e.value)
    assert len(way.kept) == 1


def test_closure_of_an_optimizer_step(same_as_eager):
    """optimizer.step(closure) computes the loss in the optimizer."""

    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @way.trace
        def step(x, y):
            def loss():
                optimizer.zero_grad()
                value = F.mse_loss(net(x), y)
                value.backward()
                return value

            return optimizer.step(loss)

        for x, y in way.loop(way.batches(*SHAPES)):
            way.keep(step(x, y))
        return model, state_of(optimizer)

    same_as_eager(script)


def test_lbfgs_is_refused(way):
    """Its line search is Python control flow on losses."""
    with way.device:
        model = mlp()
    net = way.compile(model)
    optimizer = O.LBFGS(model.parameters())

    @way.trace
    def step(x, y):
        def loss():
            optimizer.zero_grad()
            value = F.mse_loss(net(x), y)
            value.backward()
            return value

        return optimizer.step(loss)

    with pytest.raises(StaticGraphError, match="LBFGS"):
        for x, y in way.loop(way.batches(*SHAPES)):
            step(x, y)


@pytest.mark.parametrize("name", ["sgd momentum", "sgd dampening", "adamw", "rmsprop momentum", "adagrad", "nadam"])
def test_resuming_from_a_state_dict_goes_on_as_if_uninterrupted(same_as_eager, name):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = OPTIMIZERS[name](model.parameters())

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        data = way.batches(*SHAPES, steps=6)
        for x, y in way.loop(data[:3]):
            way.keep(step(x, y))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with way.device:
            again = mlp()
        again.load_state_dict(saved[0])
        other = OPTIMIZERS[name](again.parameters())
        net2 = way.compile(again)
        other.load_state_dict(saved[1])

        @way.trace
        def resumed(x, y):
            loss = F.mse_loss(net2(x), y)
            loss.backward()
            other.step()
            other.zero_grad()
            return loss

        for x, y in way.loop(data[3:]):
            way.keep(resumed(x, y))
        for x, y in way.loop(data[3:]):
            way.keep(step(x, y))
        return model, again, state_of(optimizer), state_of(other)

    same_as_eager(script, captures=2)


def test_a_parameter_that_gets_its_first_gradient_later(same_as_eager):
    """Frozen for two steps, then trained: the graph changes, so it is captured again, and state appears."""

    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = O.AdamW(model.parameters(), lr=0.1)

        @way.trace
        def warm(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            model[0].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            return loss

        @way.trace
        def full(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for i, (x, y) in enumerate(way.loop(way.batches(*SHAPES, steps=6))):
            way.keep((warm if i < 2 else full)(x, y))
        return model, state_of(optimizer)

    same_as_eager(script, captures=2)
