"""What public language-model scripts for this API do, in one: real text, warm-up and decay, clipping, save and resume.

The losses of the CPU backend and of the compiled step agree from one seed, and a resumed run goes on where it stopped.
"""

import inspect
import this

import numpy as np
import pytest
import torch
import torch.nn as nn

import cerebras.pytorch as cstorch

LENGTH, BATCH, STEPS = 32, 4, 40
VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask):
        b, t, w = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        # a Python number becomes a 0-d CPU tensor inside the step
        scores = torch.matmul(q * torch.tensor(1 / (w / self.heads) ** 0.5, dtype=q.dtype), k.transpose(-1, -2))
        scores += mask
        scores = self.drop(nn.functional.softmax(scores.float(), dim=-1).type_as(scores))
        x = x + self.out(torch.matmul(scores, v).transpose(1, 2).reshape(b, t, -1))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, width=32, heads=2, depth=2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.tie()
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def tie(self):
        self.head.weight = self.tokens.weight

    def _post_device_transfer(self):
        self.tie()

    def forward(self, ids, labels):
        b, t = ids.shape
        row = torch.arange(t, device=ids.device, dtype=torch.float32)
        ahead = row[None, :].broadcast_to(b, 1, t, t) - row[:, None].broadcast_to(b, 1, t, t)
        mask = torch.where(ahead > 0, torch.tensor(float("-inf")), 0)
        x = self.tokens(ids)
        x += self.positions(torch.arange(t, device=ids.device).expand(b, -1))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        loss = nn.CrossEntropyLoss(reduction="none")(logits.view(-1, VOCABULARY), labels.view(-1).long())
        return loss.sum() / (b * t)


def loader(path, seed):
    data = np.fromfile(path, dtype=np.uint16)

    class Windows(torch.utils.data.Dataset):
        def __len__(self):
            return (len(data) - 1) // LENGTH

        def __getitem__(self, i):
            window = data[i * LENGTH : (i + 1) * LENGTH + 1].astype(np.int32)
            return window[:-1], window[1:]

    order = torch.utils.data.RandomSampler(Windows(), generator=torch.Generator().manual_seed(seed))
    batches = torch.utils.data.BatchSampler(order, BATCH, drop_last=True)
    return torch.utils.data.DataLoader(Windows(), batch_sampler=batches)


def train(kind, directory, compile_dir, checkpoint=None):
    options = {"compile_dir": compile_dir} if kind == "CSX" else {}
    backend = cstorch.backend(kind, cluster_config=cstorch.distributed.ClusterConfig(num_csx=1), **options)
    torch.manual_seed(0)
    with backend.device:
        model = Model()
    compiled = cstorch.compile(model, backend)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = cstorch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, correct_bias=True)
    scheduler = cstorch.optim.lr_scheduler.SequentialLR(
        optimizer,
        schedulers=[
            cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.0, 3e-3, total_iters=10),
            cstorch.optim.lr_scheduler.CosineDecayLR(optimizer, 3e-3, 3e-4, total_iters=30),
        ],
        milestones=[10],
    )
    done = 0
    if checkpoint is not None:
        state = cstorch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        done = state["step"]
    losses = {}

    @cstorch.checkpoint_closure
    def save(step):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        cstorch.save(state | {"step": step}, directory / f"checkpoint_{step}.mdl")

    @cstorch.trace
    def training_step(batch):
        loss = compiled(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    @cstorch.step_closure
    def keep(loss, step):
        losses[step] = loss.item()
        assert executor.profiler.rate_tracker.global_rate >= 0

    executor = cstorch.utils.data.DataExecutor(
        cstorch.utils.data.DataLoader(loader, directory / "train.bin", 1 + done), num_steps=STEPS - done,
        checkpoint_steps=20,
    )  # fmt: skip
    torch.manual_seed(100 + done)  # dropout of the first and of the resumed part
    for step, batch in enumerate(executor, start=done + 1):
        keep(training_step(batch), step)
        save(step)
    return losses


@pytest.fixture
def text(tmp_path):
    source = inspect.getsource(this) + inspect.getsource(inspect)
    np.frombuffer(source.encode(), dtype=np.uint8).astype(np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path


def test_losses_agree_and_resume_continues(text, compile_dir):
    cpu = train("CPU", text, compile_dir)
    assert sorted(p.name for p in text.glob("*.mdl")) == ["checkpoint_20.mdl", "checkpoint_40.mdl"]
    assert cpu[STEPS] < cpu[1] - 1, "it learns"
    saved = cstorch.load(text / "checkpoint_20.mdl", map_location="cpu")
    for name in ("checkpoint_20.mdl", "checkpoint_40.mdl"):
        (text / name).rename(text / f"cpu_{name}")

    csx = train("CSX", text, compile_dir)
    assert list(csx.values()) == pytest.approx(list(cpu.values()), rel=2e-4)
    mine = cstorch.load(text / "checkpoint_20.mdl", map_location="cpu")
    assert mine["model"].keys() == saved["model"].keys() and mine["step"] == 20
    for name, value in saved["model"].items():
        assert torch.allclose(mine["model"][name], value, rtol=1e-3, atol=1e-4), name

    (text / "checkpoint_40.mdl").unlink()
    resumed_csx = train("CSX", text, compile_dir, text / "checkpoint_20.mdl")
    (text / "checkpoint_40.mdl").unlink()
    resumed_cpu = train("CPU", text, compile_dir, text / "cpu_checkpoint_20.mdl")
    assert list(resumed_csx) == list(resumed_cpu) == list(range(21, 41))
    assert list(resumed_csx.values()) == pytest.approx(list(resumed_cpu.values()), rel=5e-4)
