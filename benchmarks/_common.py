"""What the benchmarks share: the models, and the description of the machine that goes into every result."""

import datetime
import json
import os
import platform
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers=4, vocabulary=256, length=128, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Recommender(nn.Module):
    def __init__(self, items=10000, width=32, dense=13):
        super().__init__()
        self.items = nn.EmbeddingBag(items, width, mode="sum")
        self.top = nn.Sequential(nn.Linear(width + dense, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids, dense):
        return self.top(torch.cat([self.items(ids), dense], 1)).squeeze(1)


def _mlp(*widths):
    layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def _classes(*shape, classes=10):
    return lambda: (torch.randn(*shape), torch.randint(0, classes, (shape[0],)))


def _tokens():
    return torch.randint(0, 256, (8, 128)), torch.randint(0, 256, (8 * 128,))


def _clicks():
    return torch.randint(0, 10000, (256, 20)), torch.randn(256, 13), torch.rand(256)


# name -> (what it is, model, batch: inputs and target last, loss)
CASES = {
    "mlp": ("MLP 784-256-256-10, batch 64", lambda: _mlp(784, 256, 256, 10), _classes(64, 784), F.cross_entropy),
    "cnn": ("CNN 16-32, 28x28, batch 64", _cnn, _classes(64, 1, 28, 28), F.cross_entropy),
    "gpt64": ("GPT 4 layers, width 64, 8x128", lambda: GPT(64), _tokens, F.cross_entropy),
    "gpt256": ("GPT 4 layers, width 256, 8x128", lambda: GPT(256), _tokens, F.cross_entropy),
    "rec": ("embedding-bag recommender", Recommender, _clicks, F.binary_cross_entropy_with_logits),
    "tiny": ("MLP 8-16-4, batch 4", lambda: _mlp(8, 16, 4), _classes(4, 8, classes=4), F.cross_entropy),
}


def environment() -> dict:
    """Versions, processor and date of a result."""
    import cerebras.pytorch as cstorch

    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cstorch": cstorch.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def write_json(path, result) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def table(head: list[str], rows: list[list]) -> str:
    """Columns of text, the first to the left."""
    text = [head, *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in text
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
