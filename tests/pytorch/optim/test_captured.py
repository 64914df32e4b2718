"""Optimizers, schedulers and loss scaling inside a captured step: the losses of the CPU backend, bit for bit.

The captured program is interpreted, so that each operation has the numerics of eager PyTorch.
"""

import pytest
import torch

import cerebras.pytorch as cstorch
from cerebras.pytorch import amp, optim
from cerebras.pytorch.optim import lr_scheduler as lrs
from cerebras.pytorch.optim import weight_decay_scheduler as wds

STEPS = 8


@pytest.fixture(autouse=True)
def interpreted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = cstorch.backends.csx.debug.compiler
    cstorch.backends.csx.debug.compiler = "eager"
    yield
    cstorch.backends.csx.debug.compiler = before


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)) for _ in range(STEPS)]


def losses(backend_type, make_optimizer, make_schedulers=None, scaler_settings=None, overflow_after=None):
    backend = cstorch.backend(backend_type)
    torch.manual_seed(0)
    with backend.device:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    compiled = cstorch.compile(model, backend)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = make_optimizer([dict(params=matrices), dict(params=vectors, weight_decay=0.0)])
    schedulers = make_schedulers(optimizer) if make_schedulers else []
    scaler = amp.GradScaler(**(scaler_settings or {}))
    seen = []

    @cstorch.trace
    def training_step(batch):
        x, y = batch
        loss = (compiled(x) - y).square().mean()
        scaler.scale(loss if overflow_after is None else loss * (overflow_after / x.max())).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
        return loss

    @cstorch.step_closure
    def log(loss):
        seen.append(loss.item())

    for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), num_steps=STEPS):
        log(training_step(batch))
    if scaler.dynamic:
        seen.append(scaler.get_num_skipped_steps().item())
    return seen


def warm_up(optimizer):
    decay = lrs.CosineDecayLR(optimizer, 0.1, 0.01, 4)
    return [lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer, 0.0, 0.1, 3), decay], [3])]


@pytest.mark.parametrize(
    "name, settings",
    [
        ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1)),
        ("Adam", dict(weight_decay=0.1)),
        ("AdamW", dict(weight_decay=0.1, amsgrad=True)),
        ("AdamW", dict(weight_decay=0.1, correct_bias=False)),
        ("RMSprop", dict(momentum=0.9, centered=True)),
        ("Adagrad", dict(lr_decay=0.1)),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),  # its rectification starts within these steps
        ("Rprop", {}),
        ("ASGD", dict(t0=4.0)),
        ("Lamb", dict(weight_decay=0.1)),
        ("Lion", dict(weight_decay=0.1)),
        ("Adafactor", dict(lr=0.1, weight_decay=0.1)),
    ],
)
def test_captured_once_follows_eager(name, settings):
    def make(params):
        return getattr(optim, name)(params, **settings)

    assert losses("CSX", make, warm_up) == losses("CPU", make, warm_up)


def test_weight_decay_that_starts_at_zero_is_not_frozen_out_of_the_graph():
    def make(params):
        return optim.AdamW(params, lr=0.1)

    def schedule(optimizer):
        return [wds.LinearWD(optimizer, 0.0, 0.5, 4)]

    captured = losses("CSX", make, schedule)
    assert captured == losses("CPU", make, schedule)
    assert captured != losses("CPU", make)


@pytest.mark.parametrize("settings", [dict(lr=0.1), dict(lr=0.1, momentum=0.9)])
def test_dynamic_loss_scaling(settings):
    scaling = dict(loss_scale="dynamic", init_scale=2.0**120, max_loss_scale=2.0**126, steps_per_increase=2)

    def make(params):
        return optim.SGD(params, **settings)

    captured = losses("CSX", make, None, scaling, overflow_after=2.0**8)
    assert captured == losses("CPU", make, None, scaling, overflow_after=2.0**8)
    assert 0 < captured[-1] < STEPS  # skipped steps
