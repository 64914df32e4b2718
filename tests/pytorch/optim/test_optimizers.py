"""Every optimizer against its counterpart in torch, or against its published definition."""

import copy
import io

import pytest
import torch

from cerebras.pytorch import optim

STEPS = 100


def mlp(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def train(model, optimizer, steps=STEPS, first=0):
    """Steps number `first`, `first` + 1, ... of the same data stream."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=generator).to(next(model.parameters()).dtype)
        y = torch.randn(16, 3, generator=generator).to(x.dtype)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return model


def compare(ours, ours_optimizer, theirs, theirs_optimizer, atol):
    for name, a, b in zip(dict(ours.named_parameters()), ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
        mine, reference = ours_optimizer.state[a], theirs_optimizer.state[b]
        for key in mine:
            if key in reference:
                torch.testing.assert_close(
                    mine[key], reference[key], rtol=0, atol=atol, msg=lambda m, k=f"{name}.{key}": f"{k}: {m}"
                )


EXACT = [
    ("SGD", dict(lr=0.1)),
    ("SGD", dict(lr=0.1, momentum=0.9)),
    ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    ("SGD", dict(lr=0.01, momentum=0.5, maximize=True)),
    ("Adam", dict(lr=0.01)),
    ("Adam", dict(lr=0.01, weight_decay=0.1, amsgrad=True, betas=(0.8, 0.95))),
    ("AdamW", dict(lr=0.01)),
    ("AdamW", dict(lr=0.01, weight_decay=0.1, eps=1e-3)),
    ("AdamW", dict(lr=0.01, weight_decay=0.1, amsgrad=True)),
    ("RMSprop", dict(lr=0.01)),
    ("RMSprop", dict(lr=0.01, momentum=0.9, centered=True, weight_decay=0.01)),
    ("Adagrad", dict(lr=0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1)),
    ("Adadelta", dict(lr=1.0, weight_decay=0.01)),
    ("Adamax", dict(lr=0.01, weight_decay=0.01)),
    ("NAdam", dict(lr=0.01, weight_decay=0.01)),
    ("RAdam", dict(lr=0.01, weight_decay=0.01)),
    ("Rprop", dict(lr=0.01)),
    ("ASGD", dict(lr=0.1, weight_decay=0.01)),
]
CLOSE = [("ASGD", dict(lr=0.1, t0=10.0, lambd=0.01))]  # torch's average rounds otherwise
DEFAULT_EPS = {"Adam": 1e-6, "AdamW": 1e-6, "Adagrad": 1e-6, "Adamax": 1e-6, "RAdam": 1e-6}


@pytest.mark.parametrize(
    "name, settings, atol", [(n, s, 0.0) for n, s in EXACT] + [(n, s, 1e-6) for n, s in CLOSE], ids=str
)
def test_follows_torch(name, settings, atol):
    ours, theirs = mlp(), mlp()
    optimizer = getattr(optim, name)(ours.parameters(), **settings)
    settings = dict(settings)
    if name in DEFAULT_EPS:
        settings.setdefault("eps", DEFAULT_EPS[name])
    if name == "AdamW":
        settings.setdefault("weight_decay", 0.0)
    reference = getattr(torch.optim, name)(theirs.parameters(), foreach=False, **settings)
    train(ours, optimizer)
    train(theirs, reference)
    assert not torch.equal(next(ours.parameters()), next(mlp().parameters()))
    compare(ours, optimizer, theirs, reference, atol)


def test_adam_family_follows_torch_in_bfloat16():
    ours, theirs = mlp(dtype=torch.bfloat16), mlp(dtype=torch.bfloat16)
    optimizer = optim.AdamW(ours.parameters(), lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1, eps=1e-6, foreach=False)
    compare(train(ours, optimizer), optimizer, train(theirs, reference), reference, 0.0)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_follows_torch():
    ours, theirs = (torch.nn.Linear(6, 3, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = optim.Muon(ours.parameters())
    reference = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.01)
    compare(train(ours, optimizer), optimizer, train(theirs, reference), reference, 0.0)


def test_muon_refuses_vectors_and_names_the_shape():
    with pytest.raises(ValueError, match=r"shape \(8,\)"):
        optim.Muon(mlp().parameters())


def matrix_problem(optimizer_class, steps=5, **settings):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = optimizer_class([p], **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        (p - torch.eye(4, 3)).square().sum().backward()
        optimizer.step()
    return p.detach().flatten()[:5]


@pytest.mark.parametrize(
    "name, settings, expected",
    [
        # values of the original package 2.10.0
        ("Lamb", dict(lr=0.1, weight_decay=0.01), [1.094652, 0.098792, -1.714407, 0.121212, -0.621405]),
        ("Lamb", dict(lr=0.1, weight_decay=0.01, adam=True), [0.730735, -0.164283, 0.046611, -0.311799, 1.123147]),
        ("Lion", dict(lr=0.1, weight_decay=0.01), [1.034305, 0.007036, -1.668916, 0.066594, -0.580109]),
        ("Adafactor", dict(lr=0.1, weight_decay=0.01), [1.176757, -0.203278, -1.664579, 0.217708, -0.513353]),
        ("Adafactor", dict(lr=0.1, scale_parameter=False), [1.146934, -0.193271, -1.608267, 0.183457, -0.444734]),
    ],
)
def test_follows_the_original(name, settings, expected):
    got = matrix_problem(getattr(optim, name), **settings)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=2e-6)


def test_adamw_without_bias_correction():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(3))
    optimizer = optim.AdamW([p], lr=0.1, weight_decay=0.1, eps=1e-2, correct_bias=False)
    w, m, v = p.detach().clone(), torch.zeros(3), torch.zeros(3)
    for _ in range(50):
        optimizer.zero_grad()
        (p * torch.arange(1.0, 4.0) - 1).square().sum().backward()
        optimizer.step()
        g = 2 * (w * torch.arange(1.0, 4.0) - 1) * torch.arange(1.0, 4.0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - 0.01) - 0.1 * m / (v.sqrt() + 1e-2)
    torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [dict(warmup_init=True), {}])
def test_adafactor_relative_step_and_momentum(settings):
    p = matrix_problem(optim.Adafactor, steps=3, lr=None, relative_step=True, beta1=0.9, **settings)
    assert torch.isfinite(p).all()
    with pytest.raises(ValueError, match="relative_step"):
        optim.Adafactor([torch.nn.Parameter(torch.ones(2))], lr=0.1, relative_step=True)


ALL = [(n, s) for i, (n, s) in enumerate(EXACT) if n not in [x for x, _ in EXACT[:i]] or "momentum" in s] + [
    ("Lamb", {}),
    ("Lion", {}),
    ("Adafactor", dict(lr=0.01)),
]


@pytest.mark.parametrize("name, settings", ALL, ids=str)
def test_resume_is_exact_and_state_exists_before_the_first_step(name, settings):
    whole = mlp()
    optimizer = getattr(optim, name)(whole.parameters(), **settings)
    keys = {p: set(optimizer.state.get(p, ())) for p in whole.parameters()}
    train(whole, optimizer, 10)
    assert keys == {p: set(optimizer.state.get(p, ())) for p in whole.parameters()}, "step() made state"

    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    half = copy.deepcopy(whole)
    resumed = getattr(optim, name)(half.parameters(), **{**settings, "lr": 123.0})
    before = [t for state in resumed.state.values() for t in state.values()]
    resumed.load_state_dict(torch.load(buffer))
    after = [t for state in resumed.state.values() for t in state.values()]
    assert all(a is b for a, b in zip(before, after)), "a captured step would lose sight of the state"
    train(whole, optimizer, 10, first=10)
    train(half, resumed, 10, first=10)
    compare(half, resumed, whole, optimizer, 0.0)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam"])
def test_a_state_of_torch_loads(name):
    theirs = mlp()
    settings = dict(lr=0.01, momentum=0.9, dampening=0.3) if name == "SGD" else dict(lr=0.01, eps=1e-6)
    reference = getattr(torch.optim, name)(theirs.parameters(), foreach=False, **settings)
    train(theirs, reference, 5)
    ours = copy.deepcopy(theirs)
    optimizer = getattr(optim, name)(ours.parameters(), **settings)
    optimizer.load_state_dict(reference.state_dict())
    compare(train(ours, optimizer, 5, 5), optimizer, train(theirs, reference, 5, 5), reference, 0.0)


def test_a_state_of_the_original_package_loads():
    p = torch.nn.Parameter(torch.zeros(2))
    powers = dict(beta1_power=torch.tensor(0.9**8), beta2_power=torch.tensor(0.999**8))
    saved = dict(
        state={0: dict(exp_avg=torch.ones(2), exp_avg_sq=torch.ones(2), **powers)},
        param_groups=[dict(lr=0.5, betas=[0.9, 0.999], l2_regularization_rate=0.2, weight_decay=0.0, params=[0])],
    )
    optimizer = optim.Adam([p])
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"] == 7
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_power_that_underflowed_still_loads():
    p = torch.nn.Parameter(torch.zeros(2))
    powers = dict(beta1_power=torch.tensor(0.0), beta2_power=torch.tensor(0.999**5001))
    saved = dict(
        state={0: dict(exp_avg=torch.ones(2), exp_avg_sq=torch.ones(2), **powers)},
        param_groups=[dict(lr=0.5, betas=(0.9, 0.999), params=[0])],
    )
    optimizer = optim.AdamW([p])
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"] == 5000


def test_a_wrong_shape_names_the_parameter_and_changes_nothing():
    optimizer = optim.AdamW(mlp().parameters(), lr=0.5)
    saved = copy.deepcopy(optim.AdamW(mlp().parameters(), lr=0.1).state_dict())
    saved["state"][3]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"Parameter 3 .*exp_avg.*\(4,\).*\(3,\)"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_other_groups_are_refused():
    saved = optim.SGD(mlp().parameters(), lr=0.1).state_dict()
    params = list(mlp().parameters())
    with pytest.raises(ValueError, match="1 parameter groups, this one 2"):
        optim.SGD([dict(params=params[:2]), dict(params=params[2:])], lr=0.1).load_state_dict(saved)
    with pytest.raises(ValueError, match="4 parameters, here it has 2"):
        optim.SGD(params[:2], lr=0.1).load_state_dict(saved)


def test_parameters_added_or_thawed_later_get_state():
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    b.requires_grad_(False)
    optimizer = optim.Adam([a, b])
    assert b not in optimizer.state
    optimizer.add_param_group(dict(params=[c], lr=0.5))
    assert "exp_avg" in optimizer.state[c]
    b.requires_grad_(True)
    (a + b + c).sum().backward()
    optimizer.step()
    assert optimizer.state[b]["step"] == 1


def test_weight_decay_driven_by_a_scheduler_is_in_the_step_even_while_it_is_zero():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([p], weight_decay=0.0)
    assert not optimizer._decays(optimizer.param_groups[0])
    optim.weight_decay_scheduler.LinearWD(optimizer, 0.0, 0.1, 10)
    assert optimizer._decays(optimizer.param_groups[0])


def test_global_step():
    class Counting(optim.Optimizer):
        def step(self, closure=None):
            pass

    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Counting([p], dict(lr=0.1), enable_global_step=True)
    assert optimizer.increment_global_step(p) == 1
    assert optimizer.increment_global_step(p) == 2
    with pytest.raises(RuntimeError, match="enable_global_step=True"):
        Counting([p], dict(lr=0.1)).increment_global_step(p)


def test_visit_state_replaces_what_is_returned():
    optimizer = optim.SGD(mlp().parameters(), lr=0.1, momentum=0.9)
    seen = []
    optimizer.visit_state(lambda t: seen.append(t))
    assert len(seen) == 4
    optimizer.visit_state(lambda t: t + 1)
    assert all((state["momentum_buffer"] == 1).all() for state in optimizer.state.values())


def test_apply_hands_over_the_optimizer():
    optimizer = optim.SGD(mlp().parameters(), lr=0.1)
    seen = []
    optimizer.apply(seen.append)
    assert seen == [optimizer]


def test_zero_grad_drops_gradients_between_its_hooks():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.1)
    calls = []
    optimizer.register_zero_grad_pre_hook(lambda o, args, kwargs: calls.append(("pre", p.grad is None, kwargs)))
    handle = optimizer.register_zero_grad_post_hook(lambda o, args, kwargs: calls.append(("post", p.grad is None)))
    p.sum().backward()
    optimizer.zero_grad()
    assert calls == [("pre", False, {}), ("post", True)]
    handle.remove()
    p.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert calls[2:] == [("pre", False, {"set_to_none": False})]
    assert (p.grad == 0).all()


def test_closure_and_deepcopy():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.1)

    def closure():
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2.0
    optimizer._scheduled_keys.add("weight_decay")
    copied = copy.deepcopy(optimizer)
    assert copied._scheduled_keys == {"weight_decay"}
    copied.zero_grad()
    copied.step()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: optim.SGD(p, lr=-1), "lr must be at least 0"),
        (lambda p: optim.AdamW(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: optim.SGD(p, lr=0.1, nesterov=True), "nesterov"),
        (lambda p: optim.Rprop(p, etas=(1.2, 0.5)), "etas"),
        (lambda p: optim.Muon(p, ns_steps=0), "ns_steps"),
    ],
)
def test_settings_that_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.ones(2))])


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
