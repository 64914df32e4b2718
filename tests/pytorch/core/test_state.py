"""State is found wherever it comes from, and follows plain PyTorch bit for bit."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cerebras.pytorch as cstorch
from cerebras.pytorch.core.errors import StaticGraphError, TensorReadError


def mlp(width=6):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def sgd(*models, lr=0.1, **kwargs):
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr, momentum=0.9, **kwargs)


def regress(way, make, make_optimizer=sgd, loss=F.mse_loss, shapes=((8, 4), (8, 3)), steps=4, forward=None, after=None):
    """The plainest training script over the model that `make` returns."""
    with way.device:
        model = make()
    net = way.compile(model)
    optimizer = make_optimizer(model)

    @way.trace
    def step(x, y):
        out = net(x) if forward is None else forward(net, x)
        value = loss(out, y)
        value.backward()
        if after is not None:
            after(model)
        optimizer.step()
        optimizer.zero_grad()
        return value

    for x, y in way.loop(way.batches(*shapes, steps=steps)):
        way.keep(step(x, y))
    return model, optimizer


# models and optimizers
def test_two_modules_compiled_apart_train_in_one_step(same_as_eager):
    def script(way):
        with way.device:
            encoder, decoder = nn.Linear(4, 6), nn.Linear(6, 3)
        f, g = way.compile(encoder), way.compile(decoder)
        optimizer = sgd(encoder, decoder)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(g(torch.tanh(f(x))), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return encoder, decoder, optimizer

    same_as_eager(script)


def test_gan_with_two_optimizers_in_one_step(same_as_eager):
    def script(way):
        with way.device:
            maker, judge = nn.Linear(3, 4), nn.Linear(4, 1)
        make, rate = way.compile(maker), way.compile(judge)
        for_maker, for_judge = torch.optim.Adam(maker.parameters(), lr=0.01), sgd(judge, lr=0.05)

        @way.trace
        def step(x, z):
            for_judge.zero_grad()
            fake = make(z)
            judged = F.softplus(-rate(x)).mean() + F.softplus(rate(fake.detach())).mean()
            judged.backward()
            for_judge.step()
            for_maker.zero_grad()
            fooled = F.softplus(-rate(fake)).mean()
            fooled.backward()
            for_maker.step()
            return judged, fooled

        for x, z in way.loop(way.batches((8, 4), (8, 3), steps=5)):
            way.keep(*step(x, z))
        return maker, judge, for_maker, for_judge

    same_as_eager(script)


def test_two_optimizers_alternate_as_two_traced_steps_of_one_loop(same_as_eager):
    def script(way):
        with way.device:
            a, b = nn.Linear(4, 3), nn.Linear(3, 3)
        f, g = way.compile(a), way.compile(b)
        first, second = sgd(a), torch.optim.Adam(b.parameters(), lr=0.01)

        @way.trace
        def one(x, y):
            loss = F.mse_loss(g(f(x)), y)
            loss.backward()
            first.step()
            first.zero_grad()
            second.zero_grad()
            return loss

        @way.trace
        def two(x, y):
            loss = F.l1_loss(g(f(x)), y)
            loss.backward()
            second.step()
            second.zero_grad()
            first.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3), steps=5)):
            way.keep(one(x, y))
            way.keep(two(x, y))
        return a, b, first, second

    same_as_eager(script, captures=2)


def test_a_tensor_of_one_step_is_an_argument_of_the_next(same_as_eager):
    def script(way):
        with way.device:
            a, b = nn.Linear(4, 3), nn.Linear(3, 3)
        f, g = way.compile(a), way.compile(b)
        optimizer = sgd(b)

        @way.trace
        def features(x):
            return f(x).detach()

        @way.trace
        def step(h, y):
            loss = F.mse_loss(g(h), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(features(x), y))
        return a, b, optimizer

    same_as_eager(script, captures=2)


def test_methods_of_two_objects_are_two_steps(same_as_eager):
    def script(way):
        class Trainer:
            def __init__(self, lr):
                with way.device:
                    self.model = nn.Linear(4, 3)
                self.net = way.compile(self.model)
                self.optimizer = sgd(self.model, lr=lr)

            @way.trace
            def step(self, x, y):
                loss = F.mse_loss(self.net(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                return loss

        slow, fast = Trainer(0.01), Trainer(0.1)
        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(slow.step(x, y))
            way.keep(fast.step(x, y))
        return slow.model, fast.model, slow.optimizer, fast.optimizer

    same_as_eager(script, captures=2)


def test_tied_weights_stay_tied(same_as_eager):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    def script(way):
        with way.device:
            model = Tied()
        net = way.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        @way.trace
        def step(ids):
            loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        g = torch.Generator().manual_seed(0)
        for (ids,) in way.loop([(torch.randint(0, 11, (4, 7), generator=g),) for _ in range(4)]):
            way.keep(step(ids))
        assert model.head.weight is model.table.weight
        return model, optimizer

    same_as_eager(script)


def test_batch_norm_counts_its_batches(same_as_eager):
    def make():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def script(way):
        model, optimizer = regress(way, make)
        assert model[1].num_batches_tracked.cpu() == 4
        return model, optimizer

    same_as_eager(script)


def test_batch_norm_of_cumulative_average(same_as_eager):
    """momentum=None weighs by 1 / num_batches_tracked, a Python number made from a tensor."""

    def make():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))

    def check(way):
        return regress(way, make)

    with pytest.raises(TensorReadError, match="num_batches_tracked"):
        same_as_eager(check)


# copies that the step updates
@pytest.mark.parametrize("how", ["lerp_", "foreach", "copy_", "rebind buffer", "rebind attribute", "data"])
def test_ema_copy_is_updated(same_as_eager, how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)
            self.register_buffer("ema", self.inner.weight.detach().clone())
            self.mean = torch.zeros(3)

        def forward(self, x):
            return self.inner(x)

        @torch.no_grad()
        def follow(self):
            w = self.inner.weight
            if how == "lerp_":
                self.ema.lerp_(w, 0.1)
            elif how == "foreach":
                torch._foreach_lerp_([self.ema], [w], 0.1)
            elif how == "copy_":
                self.ema.copy_(0.9 * self.ema + 0.1 * w)
            elif how == "rebind buffer":
                self.ema = 0.9 * self.ema + 0.1 * w
            elif how == "rebind attribute":
                self.mean = 0.5 * self.mean + w.sum(1)
            else:
                self.ema.data.mul_(0.9).add_(w.data, alpha=0.1)

    def script(way):
        with way.device:
            model = Model()
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.follow()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer, model.mean

    same_as_eager(script)


def test_ema_model_made_with_deepcopy(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        ema = copy.deepcopy(model).requires_grad_(False)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters()):
                    e.lerp_(p, 0.2)
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, ema, optimizer

    same_as_eager(script)


def test_torch_swa_averaged_model(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_lerp_(list(averaged.module.parameters()), list(model.parameters()), 0.1)
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, averaged, optimizer

    same_as_eager(script)


def test_tensors_of_the_enclosing_function_are_rebound(same_as_eager):
    def script(way):
        with way.device:
            model, total = nn.Linear(4, 3), torch.zeros(())
            history = torch.ones(3)
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            nonlocal total, history
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss.detach()
            history = history * 0.5 + y.mean(0)
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer, total, history

    same_as_eager(script)


GLOBAL = None


def test_global_tensor_is_rebound(same_as_eager):
    def script(way):
        global GLOBAL
        with way.device:
            GLOBAL = torch.zeros(3)

        @way.trace
        def step(x, y):
            global GLOBAL
            GLOBAL = GLOBAL + y.mean(0)
            return x.sum()

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return GLOBAL.detach().cpu()

    same_as_eager(script)


def test_tensor_in_a_dict_or_list_is_rebound(same_as_eager):
    def script(way):
        with way.device:
            running, history = {"mean": torch.zeros(3)}, [torch.zeros(4), torch.ones(4)]

        @way.trace
        def step(x, y):
            running["mean"] = 0.9 * running["mean"] + y.mean(0)
            history[1] = history[0]
            history[0] = x.mean(0)
            return x.sum() + history[1].sum()

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return running, history

    same_as_eager(script)


def test_two_attributes_swap_their_tensors(same_as_eager):
    def script(way):
        class Holder:
            pass

        held = Holder()
        with way.device:
            held.a, held.b = torch.zeros(3), torch.ones(3)

        @way.trace
        def step(x, y):
            held.a, held.b = held.b, held.a + y.mean(0)
            return x.sum() + held.a.sum()

        for x, y in way.loop(way.batches((8, 4), (8, 3), steps=5)):
            way.keep(step(x, y))
        return held.a, held.b

    same_as_eager(script)


def test_an_alias_of_a_rebound_tensor_keeps_the_old_value(same_as_eager):
    """Rebinding makes a new tensor in eager PyTorch: another name of the old one must not follow."""

    def script(way):
        class Holder:
            pass

        held = Holder()
        with way.device:
            held.first = torch.zeros(3)
        held.now = held.first

        @way.trace
        def step(x, y):
            held.now = held.now + y.mean(0)
            return held.first.sum() + x.sum()

        for x, y in way.loop(way.batches((8, 4), (8, 3), steps=4)):
            way.keep(step(x, y))
        return held.first, held.now

    same_as_eager(script)


# what is not trained
def test_frozen_parameters_stay(same_as_eager):
    def make():
        model = mlp()
        model[0].requires_grad_(False)
        return model

    same_as_eager(
        lambda way: regress(way, make, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.5))
    )


def test_parameters_without_gradient_have_no_state_and_do_not_decay(same_as_eager):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    def script(way):
        model, optimizer = regress(way, Partly, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.5))
        assert model.unused.weight not in optimizer.state
        return model, optimizer

    same_as_eager(script)


# gradients
@pytest.mark.parametrize("how", ["never", "in place", "module", "in place outside", "by hand", "before backward"])
def test_gradients_are_dropped_or_carried_as_in_eager(same_as_eager, how):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = sgd(model, lr=0.01)

        @way.trace
        def step(x, y):
            if how == "before backward":
                optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            if how == "in place":
                optimizer.zero_grad(set_to_none=False)
            elif how == "module":
                model.zero_grad()
            elif how == "by hand":
                for p in model.parameters():
                    p.grad = None
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
            if how == "in place outside":
                optimizer.zero_grad(set_to_none=False)
        return model, optimizer

    same_as_eager(script)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_over_micro_batches(same_as_eager, to_none):
    """Two traced functions: one adds gradients, the other applies them every third time."""

    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

        @way.trace
        def accumulate(x, y):
            loss = F.mse_loss(net(x), y) / 3
            loss.backward()
            return loss

        @way.trace
        def update():
            optimizer.step()

        for i, (x, y) in enumerate(way.loop(way.batches((8, 4), (8, 3), steps=9))):
            way.keep(accumulate(x, y))
            if i % 3 == 2:
                update()
                optimizer.zero_grad(set_to_none=to_none)
        return model, optimizer

    same_as_eager(script, captures=2)


def test_zero_grad_outside_the_traced_function(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            optimizer.zero_grad()
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


def test_backward_inside_and_optimizer_step_in_another_traced_function(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def gradients(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        @way.trace
        def update():
            optimizer.step()
            optimizer.zero_grad()

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(gradients(x, y))
            update()
        return model, optimizer

    same_as_eager(script, captures=2)


def test_closure_reads_gradients(same_as_eager):
    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            way.keep(model.weight.grad)
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            step(x, y)
        return model, optimizer

    same_as_eager(script)


# autograd
def test_custom_autograd_function(same_as_eager):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            ctx.save_for_backward(x)
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * ctx.factor * torch.cos(x), None

    same_as_eager(lambda way: regress(way, mlp, forward=lambda net, x: Scale.apply(net(x), 1.5)))


def test_tensor_hooks(same_as_eager):
    def script(way):
        def forward(net, x):
            out = net(x)
            out.register_hook(lambda g: g * 2)
            return out

        return regress(way, mlp, forward=forward)

    same_as_eager(script)


def test_parameter_hooks(same_as_eager):
    def make():
        model = mlp()
        model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return model

    same_as_eager(lambda way: regress(way, make))


def test_parameter_hook_registered_after_compile(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        for p in model.parameters():
            p.register_hook(lambda g: g * 0.5)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


def test_module_hooks(same_as_eager):
    def make():
        model = mlp()
        model[0].register_forward_hook(lambda m, args, out: out * 1.5)
        model[2].register_forward_pre_hook(lambda m, args: (args[0] + 0.1,))
        model[1].register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 0.5,))
        return model

    same_as_eager(lambda way: regress(way, make))


def test_optimizer_hooks(same_as_eager):
    def with_hooks(model):
        optimizer = sgd(model)

        def halve(opt, args, kwargs):
            for group in opt.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        def shrink(opt, args, kwargs):
            with torch.no_grad():
                for group in opt.param_groups:
                    for p in group["params"]:
                        p.mul_(0.99)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(shrink)
        return optimizer

    same_as_eager(lambda way: regress(way, mlp, with_hooks))


def test_optimizer_step_in_backward_hook(same_as_eager):
    """Fused backward and update: each gradient is applied and dropped as soon as it is made."""

    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def apply(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(apply)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, list(optimizers.values())

    same_as_eager(script)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_dropout_is_drawn_once(same_as_eager, reentrant):
    same_as_eager(
        lambda way: regress(
            way,
            lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3)),
            forward=lambda net, x: checkpoint(net, x.requires_grad_(), use_reentrant=reentrant),
        )  # fmt: skip
    )


@pytest.mark.parametrize("clip", ["value", "norm", "norm of inf", "foreach", "get_total_norm"])
def test_gradient_clipping(same_as_eager, clip):
    def after(model):
        params = list(model.parameters())
        if clip == "value":
            nn.utils.clip_grad_value_(params, 0.01)
        elif clip == "norm":
            nn.utils.clip_grad_norm_(params, 0.05, foreach=False)
        elif clip == "norm of inf":
            nn.utils.clip_grad_norm_(params, 0.05, norm_type=float("inf"))
        elif clip == "foreach":
            nn.utils.clip_grad_norm_(params, 0.05, foreach=True)
        else:
            total = nn.utils.get_total_norm([p.grad for p in params])
            nn.utils.clip_grads_with_norm_(params, 0.05, total)

    same_as_eager(lambda way: regress(way, mlp, after=after))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "old weight_norm", "orthogonal"])
def test_parametrized_weights(same_as_eager, kind):
    def make():
        model = mlp()
        if kind == "weight_norm":
            nn.utils.parametrizations.weight_norm(model[0])
        elif kind == "spectral_norm":
            nn.utils.parametrizations.spectral_norm(model[0])
        elif kind == "orthogonal":
            nn.utils.parametrizations.orthogonal(model[0], "weight", "householder")
        else:
            nn.utils.weight_norm(model[0])
        return model

    same_as_eager(lambda way: regress(way, make))


def test_double_backward(same_as_eager):
    """A gradient penalty differentiates through a gradient."""

    def script(way):
        with way.device:
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            x = x.requires_grad_()
            out = net(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.mean() + (g.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


# what clients use
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer(same_as_eager, norm_first):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Transformer(
                8, 2, 1, 1, dim_feedforward=16, batch_first=True, dropout=0.1, norm_first=norm_first
            )

        def forward(self, x, y):
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
            return self.inner(x, y, tgt_mask=mask, tgt_is_causal=True)

    def script(way):
        with way.device:
            model = Model()
        net = way.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x, y), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((3, 5, 8), (3, 4, 8), steps=3)):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


def test_encoder_in_evaluation_with_a_padding_mask(same_as_eager):
    """torch's encoder reads the mask in its fast path, in evaluation mode only."""

    def script(way):
        with way.device:
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model.eval()
        net = way.compile(model)

        @way.trace
        def step(x, y):
            padding = (y[..., 0] > 0.5).triu(1)
            with torch.no_grad():
                return net(x, src_key_padding_mask=padding)

        for x, y in way.loop(way.batches((3, 5, 8), (3, 5, 1), steps=3)):
            way.keep(step(x, y))
        return model

    same_as_eager(script, tolerance=1e-6)


def test_operations_that_clients_use(same_as_eager):
    def script(way):
        with way.device:
            table = torch.zeros(5, 4)

        @way.trace
        def step(x, y):
            labels = (y[:, 0].abs() * 2).long().clamp(max=4)
            hot = F.one_hot(labels, num_classes=5).float()
            causal = torch.ones(8, 8, dtype=torch.bool, device=x.device).triu(1)
            z = x.clone()
            z[:, 1:3] = 0
            z[z < 0] = 0.25
            z = z.masked_fill(causal[:, :4], -1.0)
            table.index_add_(0, labels, x)
            table[1, ::2] += 1
            counts = hot.sum(0)
            picked = x[torch.arange(8, device=x.device), labels.clamp(max=3)]
            best = torch.topk(x, 2, dim=1).values
            parts = torch.cat([z, hot, picked[:, None], best, x.cumsum(1), torch.sort(x, 1).values], 1)
            return parts, counts, torch.where(x > 0, x, 0.0), x.flip(0), torch.einsum("ij,kj->ik", x, x)

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(*step(x, y))
        return table

    same_as_eager(script)


@pytest.mark.parametrize("kind", ["torch", "cstorch"])
def test_autocast_bfloat16(same_as_eager, kind):
    def forward(net, x):
        if kind == "torch":
            with torch.autocast("cpu", torch.bfloat16):
                return net(x).float()
        cstorch.amp.set_half_dtype(torch.bfloat16)
        with cstorch.amp.autocast():
            return net(x).float()

    def script(way):
        if not way.captured and kind == "cstorch":
            cstorch.backend("CPU")
        return regress(way, mlp, forward=forward)

    same_as_eager(script)


def test_vmap_is_right_or_refused(same_as_eager):
    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)

        @way.trace
        def step(x, y):
            return torch.func.vmap(torch.dot)(x, y[:, :1].expand(8, 4)), net(x)

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(*step(x, y))
        return model

    same_as_eager(script)


def test_functional_gradients_are_right_or_refused(same_as_eager):
    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)

        @way.trace
        def step(x, y):
            weights = dict(model.named_parameters())

            def loss(w):
                return F.mse_loss(torch.func.functional_call(model, w, (x,)), y)

            grads = torch.func.grad(loss)(weights)
            return net(x), grads["weight"]

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(*step(x, y))
        return model

    same_as_eager(script)


# before, between and after steps
def test_deepcopy_of_a_model_is_another_model(same_as_eager):
    def script(way):
        with way.device:
            first = mlp()
        model = copy.deepcopy(first)
        assert model[0].weight is not first[0].weight
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return first, model, copy.deepcopy(model), optimizer

    same_as_eager(script)


def test_optimizer_made_before_compile_on_a_cpu_model(same_as_eager):
    def script(way):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        net = way.compile(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


def test_model_trained_in_eager_before_goes_on(same_as_eager):
    """Gradients and optimizer state made on the CPU move along."""

    def script(way):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in way.batches((8, 4), (8, 3), steps=2, seed=3):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        net = way.compile(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_model_in_another_dtype(same_as_eager, dtype):
    def make():
        return mlp().to(dtype)

    same_as_eager(lambda way: regress(way, make, forward=lambda net, x: net(x.to(dtype)).float()))


def test_two_kinds_of_load_state_dict_before_the_first_step(same_as_eager):
    def script(way):
        torch.manual_seed(5)
        saved = mlp().state_dict()
        with way.device:
            model = mlp()
        model.load_state_dict(saved)
        net = way.compile(model)
        model[2].load_state_dict({k: v + 1 for k, v in model[2].state_dict().items()})
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad", "nadam"])
def test_state_is_taken_and_put_back_in_the_middle_of_a_run(same_as_eager, kind):
    """Back to the state of step 2 after step 4: model, optimizer and scheduler."""

    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)
        params = model.parameters()
        optimizer = {
            "sgd": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
            "adamw": lambda: torch.optim.AdamW(params, lr=0.1),
            "adagrad": lambda: torch.optim.Adagrad(params, lr=0.1),
            "nadam": lambda: torch.optim.NAdam(params, lr=0.1),
        }[kind]()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            return loss

        @way.closure
        def save_or_load(i):
            if i == 1:
                saved["all"] = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
            elif i == 3:
                weights, state, schedule = copy.deepcopy(saved["all"])
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
                scheduler.load_state_dict(schedule)

        saved = {}
        for i, (x, y) in enumerate(way.loop(way.batches((8, 4), (8, 3), steps=6))):
            way.keep(step(x, y))
            save_or_load(i)
        return model, optimizer, scheduler

    same_as_eager(script)


def test_state_dict_of_a_running_model_holds_values_not_handles(same_as_eager):
    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)
        optimizer = sgd(model)
        copies = []

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
            copies.append({k: v.cpu().clone() for k, v in model.state_dict().items()})
        return copies, model

    same_as_eager(script)


def test_evaluation_between_training_steps(same_as_eager):
    """A second executor with another traced function sees the state of the first."""

    def script(way):
        with way.device:
            model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
        net = way.compile(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

        @way.trace
        def train(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        @way.trace
        @torch.no_grad()
        def evaluate(x, y):
            return F.mse_loss(net(x), y)

        for epoch in range(2):
            model.train()
            for x, y in way.loop(way.batches((8, 4), (8, 3), seed=epoch)):
                way.keep(train(x, y))
            model.eval()
            for x, y in way.loop(way.batches((5, 4), (5, 3), seed=9)):
                way.keep(evaluate(x, y))
        return model, optimizer

    same_as_eager(script, captures=2)


def test_parameters_changed_by_hand_between_steps(same_as_eager):
    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        @way.closure
        def meddle(i):
            with torch.no_grad():
                if i == 0:
                    model.weight.mul_(0.5)
                elif i == 1:
                    model.weight.data = torch.ones(3, 4)
                elif i == 2:
                    model.bias.copy_(torch.arange(3.0))

        for i, (x, y) in enumerate(way.loop(way.batches((8, 4), (8, 3), steps=5))):
            way.keep(step(x, y))
            meddle(i)
        return model, optimizer

    same_as_eager(script)


def test_a_batch_tensor_changed_in_place(same_as_eager):
    def script(way):
        @way.trace
        def step(x, y):
            x.mul_(2)
            x[0] = 1
            return x.sum()

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
            way.keep(x)
        return 0

    same_as_eager(script)


def test_hand_written_sgd_through_data(same_as_eager):
    def script(way):
        with way.device:
            model = mlp()
        net = way.compile(model)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(net(x), y)
            loss.backward()
            for p in model.parameters():
                p.data = p.data - 0.1 * p.grad
                p.grad = None
            model[0].bias.data.mul_(0.9)
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model

    same_as_eager(script)


def test_hand_written_sgd_with_autograd_grad(same_as_eager):
    def script(way):
        with way.device:
            w, b = torch.randn(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)

        @way.trace
        def step(x, y):
            loss = F.mse_loss(x @ w + b, y)
            gw, gb = torch.autograd.grad(loss, (w, b))
            with torch.no_grad():
                w.sub_(0.1 * gw)
                b.sub_(0.1 * gb)
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return w.detach(), b.detach()

    same_as_eager(script)


def test_leaves_made_within_the_step_are_not_state(same_as_eager):
    """An inner loop over a copy of the weight, as in meta-learning or adversarial training."""

    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        net = way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def step(x, y):
            fast = model.weight.detach().clone().requires_grad_()
            delta = torch.zeros_like(x).requires_grad_()
            F.mse_loss((x + delta) @ fast.t(), y).backward()
            loss = F.mse_loss(net(x + delta.grad.sign() * 0.1), y) + fast.grad.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return model, optimizer

    same_as_eager(script)


def test_gradient_that_is_not_kept_says_so(way):
    with way.device:
        model = nn.Linear(4, 3)
    net = way.compile(model)

    @way.trace
    def step(x, y):
        model.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss, model.weight.grad.norm()

    @way.trace
    def other(x):
        return x.sum() + model.weight.grad.sum()

    with pytest.raises(StaticGraphError, match="'weight.grad'.*not kept"):
        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(*step(x, y))
            other(x)
    with pytest.raises(StaticGraphError, match="'weight.grad'.*not kept"):
        print(model.weight.grad)


def test_gradients_of_the_user_between_steps_are_seen(same_as_eager):
    """Gradients that appear, or vanish, between steps make another program, not a wrong one."""

    def script(way):
        with way.device:
            model = nn.Linear(4, 3)
        way.compile(model)
        optimizer = sgd(model)

        @way.trace
        def update(x):
            optimizer.step()
            return model.weight.sum() + x.sum()

        for i, (x, _) in enumerate(way.loop(way.batches((8, 4), (8, 3), steps=6))):
            if i in (0, 3):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.5 + i)
            elif i == 2:
                optimizer.zero_grad()
            way.keep(update(x))
        return model, optimizer

    same_as_eager(script, captures=2)


def test_nested_objects_hold_state(same_as_eager):
    class Meter:
        def __init__(self, device):
            self.total = torch.zeros((), device=device)

        def update(self, value):
            self.total = self.total + value

    class Run:
        def __init__(self, device):
            self.meters = {"loss": Meter(device), "list": [Meter(device)]}

    def script(way):
        run = Run(way.torch_device)

        @way.trace
        def step(x, y):
            run.meters["loss"].update(x.sum())
            run.meters["list"][0].update(y.sum())
            return x.mean()

        for x, y in way.loop(way.batches((8, 4), (8, 3))):
            way.keep(step(x, y))
        return run.meters["loss"].total, run.meters["list"][0].total

    same_as_eager(script)
