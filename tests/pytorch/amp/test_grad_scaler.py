"""Loss scaling against torch.amp.GradScaler, and what it must not do on an overflow."""

import copy

import pytest
import torch

from cerebras.pytorch import amp, optim

OVERFLOWS = {0, 1, 2, 6, 11}
DYNAMIC = dict(loss_scale="dynamic", init_scale=2.0**10, steps_per_increase=3, max_loss_scale=2.0**15)


def model_and_batches(steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model, [torch.randn(8, 4) for _ in range(steps)]


def loss_of(model, batch, step):
    loss = model(batch).square().mean()
    return loss * float("inf") if step in OVERFLOWS else loss


OPTIMIZERS = [
    ("SGD", dict(lr=0.1)),
    ("SGD", dict(lr=0.1, momentum=0.9)),
    ("AdamW", dict(lr=0.01, weight_decay=0.1)),
    ("RMSprop", dict(lr=0.01, momentum=0.9)),
    ("NAdam", dict(lr=0.01)),
]


@pytest.mark.parametrize("name, settings", OPTIMIZERS)
def test_dynamic_scaling_follows_torch(name, settings):
    model, batches = model_and_batches(20)
    twin = copy.deepcopy(model)
    optimizer = getattr(optim, name)(model.parameters(), **settings)
    torch_settings = dict(settings, eps=1e-6) if name == "AdamW" else settings
    reference = getattr(torch.optim, name)(twin.parameters(), foreach=False, **torch_settings)
    scaler = amp.GradScaler(**DYNAMIC)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        torch_scaler.scale(loss_of(twin, batch, step)).backward()
        torch_scaler.step(reference)
        torch_scaler.update()
        assert scaler.get_scale().item() == torch_scaler.get_scale()
        for a, b in zip(model.parameters(), twin.parameters()):
            assert torch.equal(a, b)
    assert scaler.get_num_skipped_steps() == len(OVERFLOWS)
    for a, b in zip(model.parameters(), twin.parameters()):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, reference.state[b][key]), key


def test_an_overflow_changes_neither_parameters_nor_state():
    model, (batch,) = model_and_batches(1)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    scaler = amp.GradScaler(**DYNAMIC)
    scaler.scale(loss_of(model, batch, 0)).backward()
    assert not amp.isfinite(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = (model.state_dict(), optimizer.state_dict())
    assert all(torch.equal(a, after[0][k]) for k, a in before[0].items())
    for i, state in before[1]["state"].items():
        assert all(torch.equal(v, after[1]["state"][i][k]) for k, v in state.items())


def test_an_overflow_in_the_first_step_of_a_torch_optimizer_leaves_no_nan():
    model, batches = model_and_batches(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = amp.GradScaler(**DYNAMIC)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.isfinite(v).all() for state in optimizer.state.values() for v in state.values())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("loss_scale", [128.0, "128"])
def test_a_constant_scale_changes_nothing_but_the_loss(loss_scale):
    model, batches = model_and_batches(10)
    twin = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(loss_scale=loss_scale)
    assert scaler.get_scale() == 128.0
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        reference.zero_grad()
        twin(batch).square().mean().backward()
        reference.step()
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b)
    assert scaler.state_dict() == {} and scaler.get_num_skipped_steps() == 0


def scales(finite, **settings):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = optim.SGD([p], lr=0.0), amp.GradScaler(loss_scale="dynamic", **settings)
    result = []
    for ok in finite:
        p.grad = torch.full((2,), 1.0 if ok else float("nan"))
        scaler.step(optimizer)
        scaler.update()
        result.append((scaler.get_scale().item(), scaler.get_non_clamped_scale().item()))
    return result


def test_the_scale_stays_between_its_bounds():
    settings = dict(init_scale=8.0, min_loss_scale=4.0, max_loss_scale=16.0, steps_per_increase=1)
    assert scales([True, True, False, False, False], **settings) == [
        (16.0, 16.0),
        (16.0, 32.0),
        (8.0, 8.0),
        (4.0, 4.0),
        (4.0, 2.0),
    ]


def test_tolerated_overflows_do_not_halve_the_scale():
    settings = dict(init_scale=8.0, steps_per_increase=100, overflow_tolerance=0.5)
    assert [s for s, _ in scales([True, True, False, False], **settings)] == [8.0, 8.0, 8.0, 4.0]


def test_defaults_and_new_scale():
    scaler = amp.GradScaler(loss_scale="dynamic")
    assert scaler.get_scale() == 2.0**15
    scaler.update(new_scale=4.0)
    assert scaler.get_scale() == 4.0
    off = amp.GradScaler()
    loss = torch.ones(())
    assert off.scale(loss) is loss


def test_resume():
    first, second = amp.GradScaler(**DYNAMIC), amp.GradScaler(**DYNAMIC)
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.1)
    for value in (1.0, float("inf"), 1.0):
        p.grad = torch.full((2,), value)
        first.step(optimizer)
        first.update()
    kept = second._loss_scale
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    assert second._loss_scale is kept
    assert {k: v.item() for k, v in second.state_dict().items()} == {k: v.item() for k, v in first.state_dict().items()}
    second.load_state_dict({})
    with pytest.raises(KeyError, match="_num_skipped_steps"):
        second.load_state_dict({"_loss_scale": 1.0})


def test_gradients_are_clipped_to_the_norm():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    scaler = amp.GradScaler(loss_scale="dynamic", init_scale=8.0, max_gradient_norm=1.0)
    scaler.scale((p * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("scaler", [amp.GradScaler(), amp.GradScaler(loss_scale=64.0), amp.GradScaler("dynamic")])
@pytest.mark.parametrize(
    "clip, expected",
    [({}, [-3.0, -4.0]), (dict(max_gradient_norm=1.0), [-0.6, -0.8]), (dict(max_gradient_value=3.5), [-3.0, -3.5])],
)
def test_optimizer_step(scaler, clip, expected):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), 100.0)
    optimizer = amp.setup_optimizer(optim.SGD([p], lr=1.0))
    amp.optimizer_step((p * torch.tensor([3.0, 4.0])).sum(), optimizer, scaler, **clip)
    torch.testing.assert_close(p.detach(), torch.tensor(expected))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(loss_scale="static"), "must be a number"),
        (dict(loss_scale=-1.0), "positive"),
        (dict(loss_scale="dynamic", init_scale=1.0, min_loss_scale=2.0), "init_scale 1.0"),
        (dict(loss_scale="dynamic", min_loss_scale=2.0, max_loss_scale=1.0), "in this order"),
        (dict(loss_scale="dynamic", steps_per_increase=0), "steps_per_increase"),
        (dict(loss_scale="dynamic", overflow_tolerance=2.0), "overflow_tolerance"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        amp.GradScaler(**settings)


def test_clipping_both_ways_is_refused():
    p = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="not by both"):
        amp.optimizer_step(p.sum(), optim.SGD([p], lr=1.0), amp.GradScaler(), 1.0, 1.0)
    with pytest.raises(TypeError, match="NoneType"):
        amp.optimizer_step(p.sum(), optim.SGD([p], lr=1.0), None)


def test_the_update_can_be_captured_as_one_graph():
    # no tensor is read: the whole of unscale_, step and update traces on fake tensors
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        p = torch.nn.Parameter(torch.ones(2))
        optimizer, scaler = optim.SGD([p], lr=0.1, momentum=0.9), amp.GradScaler("dynamic")
        p.grad = torch.ones(2)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
