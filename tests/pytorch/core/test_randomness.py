"""Random operations in a captured step draw eager PyTorch's numbers, at each step new ones."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cerebras.pytorch as cstorch
from cerebras.pytorch.core.errors import StaticGraphError

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_dropout": lambda x: F.dropout1d(x[None], 0.5)[0],
    "dropout of a transpose": lambda x: F.dropout(x.t(), 0.5),
    "dropout of a stride": lambda x: F.dropout(x[:, ::2], 0.5),
    "rand": lambda x: x + torch.rand(8, 6, device=x.device),
    "randn": lambda x: x + torch.randn(8, 6, device=x.device),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 9, (5,), device=x.device),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randperm": lambda x: torch.randperm(8, device=x.device),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "normal": lambda x: torch.normal(x, x.abs() + 0.1),
    "poisson": lambda x: torch.poisson(x.abs()),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "categorical": lambda x: torch.distributions.Categorical(logits=x, validate_args=False).sample(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.4),
    "cpu draw": lambda x: x + torch.rand(8, 6).to(x.device),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_eagers_and_differ_from_step_to_step(same_as_eager, name):
    def script(way):
        step = way.trace(lambda x, y: DRAWS[name](x))
        same = [way.batches((8, 6), (1,), steps=1)[0]] * 4
        for x, y in way.loop(same):
            way.keep(step(x, y))
        values = [k[0] for k in way.kept]
        assert all(not torch.equal(values[0], v) for v in values[1:])

    same_as_eager(script)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def loop(way, seeds=(), steps=4, forward=None):
    with way.device:
        model = Net()
    net = way.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @way.trace
    def step(x, y):
        loss = F.mse_loss(net(x) if forward is None else forward(net, x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for i, (x, y) in enumerate(way.loop(way.batches((8, 6), (8, 3), steps=steps))):
        if i in seeds:
            torch.manual_seed(i)
        way.keep(step(x, y))
    return model


def test_the_generator_ends_where_eagers_does(same_as_eager):
    """`same_as_eager` compares the state of torch's generator at the end."""
    same_as_eager(loop)


def test_seeding_between_steps(same_as_eager):
    same_as_eager(lambda way: loop(way, seeds=(1, 3)))


def test_the_same_seed_gives_the_same_masks_again(way):
    step = way.trace(lambda x, y: F.dropout(x, 0.5))
    runs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        way.kept.clear()
        for x, y in way.loop(way.batches((8, 6), (1,))):
            way.keep(step(x, y))
        runs.append([k[0] for k in way.kept])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1]))
    assert not any(torch.equal(a, b) for a, b in zip(runs[0], runs[2]))


def test_draws_between_steps_and_in_closures_interleave_as_in_eager(same_as_eager):
    def script(way):
        extra = []

        @way.closure
        def draw():
            extra.append(torch.rand(2))

        step = way.trace(lambda x, y: F.dropout(x, 0.5))
        for x, y in way.loop(way.batches((8, 6), (1,))):
            extra.append(torch.rand(3))
            way.keep(step(x, y))
            draw()
        return extra

    same_as_eager(script)


def test_resuming_from_a_saved_generator_state(same_as_eager):
    def script(way):
        step = way.trace(lambda x, y: F.dropout(x, 0.5))
        data = way.batches((8, 6), (1,), steps=6)
        for x, y in way.loop(data[:3]):
            way.keep(step(x, y))
        state = torch.get_rng_state()
        for _ in range(2):
            torch.set_rng_state(state)
            for x, y in way.loop(data[3:]):
                way.keep(step(x, y))

    same_as_eager(script)


def test_an_unused_draw_still_advances_the_generator(same_as_eager):
    def script(way):
        def body(x, y):
            torch.rand(3, device=x.device)
            return x.sum()

        step = way.trace(body)
        for x, y in way.loop(way.batches((8, 6), (1,))):
            way.keep(step(x, y))

    same_as_eager(script)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_dropout_has_the_mask_of_the_forward(same_as_eager, reentrant):
    def forward(net, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = x + checkpoint(lambda t: F.dropout(torch.tanh(t), 0.4), x, use_reentrant=reentrant)
        return net(F.dropout(x, 0.2))

    same_as_eager(lambda way: loop(way, forward=forward))


def test_fork_rng_inside_a_step(same_as_eager):
    def script(way):
        def body(x, y):
            with torch.random.fork_rng(devices=[]):
                a = torch.rand_like(x)
            return a, torch.rand_like(x)

        step = way.trace(body)
        for x, y in way.loop(way.batches((8, 6), (1,))):
            way.keep(*step(x, y))

    same_as_eager(script)


def test_seeding_inside_a_step_is_refused(way):
    """It would give the same numbers at every step, or none of eager PyTorch's."""

    def body(x, y):
        torch.manual_seed(3)
        return F.dropout(x, 0.5)

    step = way.trace(body)
    with pytest.raises(StaticGraphError, match="seed"):
        for x, y in way.loop(way.batches((8, 6), (1,))):
            step(x, y)


def test_deferred_initialisation_then_draws(same_as_eager):
    """Parameters draw when they are made, though they are filled later."""

    def script(way):
        with way.device:
            first = nn.Linear(3, 3)
        between = torch.rand(2)
        with way.device:
            second = nn.Linear(3, 3)
            noise = torch.randn(4)
        after = torch.rand(2)
        way.keep(1)
        return first, second, noise, between, after

    same_as_eager(script, captures=0)


def test_compiled_draws_are_eagers_too(compile_dir):
    """Inductor keeps ATen's random operations."""
    want, got = [], []
    torch.manual_seed(0)
    x = torch.ones(6, 4)
    for _ in range(3):
        want.append(F.dropout(x.t(), 0.5) + torch.rand(4, 6))
    cstorch.backend("CSX", compile_dir=compile_dir)
    torch.manual_seed(0)
    step = cstorch.trace(lambda x: F.dropout(x.t(), 0.5) + torch.rand(4, 6, device=x.device))
    keep = cstorch.step_closure(lambda v: got.append(v))
    loader = cstorch.utils.data.DataLoader(lambda: [x] * 3)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=3):
        keep(step(batch))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
