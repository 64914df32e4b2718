"""Twenty steps of four models: plain PyTorch, the CPU backend, CSX interpreted and CSX compiled, from one seed."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cerebras.pytorch as cstorch

STEPS = 20


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    @staticmethod
    def batch(g):
        return torch.randn(8, 16, generator=g), torch.randint(0, 4, (8,), generator=g)


class CNN(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 4),
        )  # fmt: skip

    @staticmethod
    def batch(g):
        return torch.randn(8, 1, 8, 8, generator=g), torch.randint(0, 4, (8,), generator=g)


class GPT(nn.Module):
    """Two pre-norm blocks with dropout in the attention and after each projection; tied embeddings."""

    def __init__(self, width=32, heads=2, vocab=17, length=12, depth=2):
        super().__init__()
        self.heads, self.vocab = heads, vocab
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    norm1=nn.LayerNorm(width),
                    qkv=nn.Linear(width, 3 * width, bias=False),
                    out=nn.Linear(width, width),
                    norm2=nn.LayerNorm(width),
                    up=nn.Linear(width, 4 * width),
                    down=nn.Linear(4 * width, width),
                )  # fmt: skip
            )
            for _ in range(depth)
        )
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        b, t = ids.shape
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(t, device=ids.device)))
        for block in self.blocks:
            q, k, v = (
                z.view(b, t, self.heads, -1).transpose(1, 2) for z in block["qkv"](block["norm1"](x)).chunk(3, -1)
            )
            a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            x = x + self.drop(block["out"](a.transpose(1, 2).reshape(b, t, -1)))
            x = x + self.drop(block["down"](F.gelu(block["up"](block["norm2"](x)))))
        return self.head(self.norm(x)).flatten(0, 1)

    @staticmethod
    def batch(g):
        ids = torch.randint(0, 17, (4, 13), generator=g)
        return ids[:, :-1].contiguous(), ids[:, 1:].flatten()


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 12, num_layers=2, batch_first=True), nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])

    @staticmethod
    def batch(g):
        return torch.randn(5, 7, 6, generator=g), torch.randint(0, 4, (5,), generator=g)


MODELS = [MLP, CNN, GPT, LSTM]


def batches(model):
    g = torch.Generator().manual_seed(1)
    return [model.batch(g) for _ in range(STEPS)]


def make_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=STEPS + 1)


def trajectory(model, optimizer, losses):
    state = {
        f"{i}.{key}": value.detach().cpu().clone()
        for i, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }
    return losses, {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}, state


def plain(cls):
    data = batches(cls)
    torch.manual_seed(0)
    model = cls()
    optimizer, scheduler = make_optimizer(model)
    losses = []
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return trajectory(model, optimizer, losses)


def traced(cls, kind, compile_dir):
    data = batches(cls)
    backend = cstorch.backend(kind, **({"compile_dir": compile_dir} if kind == "CSX" else {}))
    torch.manual_seed(0)
    with backend.device:
        model = cls()
    compiled = cstorch.compile(model, backend)
    optimizer, scheduler = make_optimizer(model)
    losses = []

    @cstorch.trace
    def step(batch):
        x, y = batch
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    @cstorch.step_closure
    def keep(loss):
        losses.append(loss.item())

    loader = cstorch.utils.data.DataLoader(lambda: data)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
        keep(step(batch))
    return trajectory(model, optimizer, losses)


def assert_equal(got, want):
    assert got[0] == want[0]
    for mine, theirs in zip(got[1:], want[1:]):
        assert mine.keys() == theirs.keys()
        for key in theirs:
            assert torch.equal(mine[key], theirs[key]), key


@pytest.mark.parametrize("cls", MODELS)
def test_cpu_backend_is_plain_pytorch_bit_for_bit(cls, compile_dir):
    assert_equal(traced(cls, "CPU", compile_dir), plain(cls))


@pytest.mark.parametrize("cls", MODELS)
def test_interpreted_step_is_plain_pytorch_bit_for_bit(cls, compile_dir):
    cstorch.backends.csx.debug.compiler = "eager"
    assert_equal(traced(cls, "CSX", compile_dir), plain(cls))


@pytest.mark.parametrize("cls", MODELS)
def test_compiled_step_follows_plain_pytorch(cls, compile_dir):
    """Stated tolerance of the compiled step over 20 steps: losses 1e-4 relative, parameters and state 1e-3."""
    losses, params, state = traced(cls, "CSX", compile_dir)
    want_losses, want_params, want_state = plain(cls)
    assert losses == pytest.approx(want_losses, rel=1e-4, abs=1e-5)
    for mine, theirs in ((params, want_params), (state, want_state)):
        for key in theirs:
            assert torch.allclose(mine[key], theirs[key], rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("cls", MODELS)
def test_deferred_initialisation_equals_eager_bit_for_bit(cls):
    torch.manual_seed(3)
    eager, after = cls(), torch.randn(3)
    torch.manual_seed(3)
    with cstorch.backend("CSX").device:
        deferred = cls()
    assert torch.equal(torch.randn(3), after), "what draws after the model gets other numbers"
    for (name, a), b in zip(eager.state_dict().items(), deferred.state_dict().values()):
        assert b.device.type == "csx"
        assert torch.equal(a, b.cpu()), name
