"""Trains a small CNN on scikit-learn's handwritten digits (1,797 real 8x8 images) on CPU, GPU or CSX.

python examples/digits/train.py                                 # captured, compiled, run: the CSX backend
python examples/digits/train.py --backend CPU                   # the same step, eager
python examples/digits/train.py --resume --steps 1200           # goes on from the newest checkpoint
tensorboard --logdir runs/digits
"""

import argparse
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import cerebras.pytorch as cstorch

NUM_VALIDATION = 360  # of the 1,797 images
VALIDATION_BATCH = 120  # a divisor: shapes are static and every image counts


class DigitsCNN(nn.Module):
    """Three convolutions with batch norm, one pooling, dropout before the classifier."""

    def __init__(self, dropout: float = 0.3):
        super().__init__()
        self.features = nn.Sequential(
            *self.block(1, 16),
            *self.block(16, 32),
            nn.MaxPool2d(2),
            *self.block(32, 32),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    @staticmethod
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(self.features(images).flatten(1)))


class BatchesOfSteps:
    """A batch sampler that starts at any step: which images step N trains on depends on the seed and N alone.

    Each epoch is a permutation from a generator seeded with (seed, epoch); images that fill no whole batch sit it out.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, start: int):
        if batch_size > num_samples:
            raise SystemExit(f"--batch_size {batch_size} is above the {num_samples} training images")
        self.num_samples, self.batch_size, self.seed, self.start = num_samples, batch_size, seed, start

    def __iter__(self):
        epoch, skip = divmod(self.start, self.num_samples // self.batch_size)
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            batches = torch.randperm(self.num_samples, generator=generator).split(self.batch_size)
            for batch in batches[skip : self.num_samples // self.batch_size]:
                yield batch.tolist()
            epoch, skip = epoch + 1, 0


def digits(train: bool) -> TensorDataset:
    """Images [N, 1, 8, 8] float32 in [0, 1] and labels [N]; the split is the same for every seed."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[NUM_VALIDATION:] if train else order[:NUM_VALIDATION]
    return TensorDataset(images[chosen], labels[chosen])


# cstorch takes these functions, not their loaders, so that it can call them where the data are to be read.
def training_batches(batch_size: int, seed: int, start: int) -> DataLoader:
    dataset = digits(train=True)
    return DataLoader(dataset, batch_sampler=BatchesOfSteps(len(dataset), batch_size, seed, start))


def validation_batches() -> DataLoader:
    return DataLoader(digits(train=False), batch_size=VALIDATION_BATCH)


def newest_checkpoint(model_dir: Path) -> Path | None:
    """The checkpoint of the highest step."""
    found = [(int(m[1]), p) for p in model_dir.glob("checkpoint_*.mdl") if (m := re.search(r"_(\d+)\.mdl$", p.name))]
    return max(found)[1] if found else None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("CPU", "GPU", "CSX"), default="CSX")
    parser.add_argument("--steps", type=int, default=600, help="steps in all, those before a resume included")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model_dir", type=Path, default=Path("runs/digits"), help="checkpoints, events, reports")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --model_dir, if any")
    parser.add_argument("--checkpoint_path", type=Path, help="go on from this checkpoint")
    parser.add_argument("--checkpoint_steps", type=int, default=200, help="save every so many steps; 0 for never")
    parser.add_argument("--log_steps", type=int, default=100, help="a line every so many steps where there is no bar")
    parser.add_argument("--compile_dir", type=Path, help="cache of compiled steps (CSX); default: the user's cache")
    args = parser.parse_args()
    for name in ("steps", "batch_size", "log_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    checkpoint = newest_checkpoint(args.model_dir)
    if args.resume and args.checkpoint_path is None:
        args.checkpoint_path = checkpoint
    elif checkpoint is not None and args.checkpoint_path is None:
        parser.error(
            f"{args.model_dir} holds the checkpoints of an earlier run, up to {checkpoint.name}. "
            "Go on with --resume (and more --steps), or give another --model_dir"
        )
    return args


def main() -> None:
    args = parse_args()
    own = {"compile_dir": args.compile_dir} if args.backend == "CSX" else {}
    backend = cstorch.backend(args.backend, artifact_dir=args.model_dir, **own)

    torch.manual_seed(args.seed)
    with backend.device:
        model = DigitsCNN()
    compiled_model = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    # A schedule that does not depend on --steps: a run can be prolonged without having been another one.
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=40),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995),
        ],
        milestones=[40],
    )

    global_step = 0
    if args.checkpoint_path is not None:
        state = cstorch.load(args.checkpoint_path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        global_step = int(state["global_step"])
        print(f"Resumed from {args.checkpoint_path} at step {global_step}", flush=True)

    @cstorch.trace
    def training_step(batch):
        images, labels = batch
        loss = F.cross_entropy(compiled_model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    @cstorch.trace
    @torch.no_grad()
    def validation_step(batch):
        images, labels = batch
        return (compiled_model(images).argmax(-1) == labels).sum()

    @cstorch.checkpoint_closure
    def save_checkpoint(step):
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "global_step": step,
        }
        cstorch.save(state, args.model_dir / f"checkpoint_{step}.mdl")

    @cstorch.step_closure
    def report(loss, step):
        loss, rate = loss.item(), executor.profiler.rate_tracker.rate
        writer.add_scalar("train/loss", loss, step)
        writer.add_scalar("train/lr", scheduler.get_last_lr()[0], step)
        writer.add_scalar("train/samples_per_second", rate, step)
        if interactive:
            bar.update(step - bar.n)
            bar.set_postfix(loss=f"{loss:.4f}", samples_per_s=f"{rate:,.0f}", refresh=False)
        elif step % args.log_steps == 0 or step == args.steps:
            print(f"step {step}/{args.steps}  loss {loss:.4f}  {rate:,.0f} samples/s", flush=True)

    writer = cstorch.utils.tensorboard.SummaryWriter(args.model_dir / "events", purge_step=global_step + 1)
    interactive = sys.stderr.isatty()
    bar = tqdm(total=args.steps, initial=global_step, unit="step", disable=not interactive)
    start = time.perf_counter()
    if global_step < args.steps:
        executor = cstorch.utils.data.DataExecutor(
            cstorch.utils.data.DataLoader(training_batches, args.batch_size, args.seed, global_step),
            num_steps=args.steps - global_step,
            checkpoint_steps=args.checkpoint_steps,
        )
        model.train()
        if args.backend == "CSX":
            bar.write("The first step is captured and compiled; later runs take it from the cache.")
        for batch in executor:
            global_step += 1
            # As the data, so the dropout masks: seeded with the step, they are the same after a resume.
            torch.manual_seed(args.seed * 1_000_003 + global_step)
            loss = training_step(batch)
            report(loss, global_step)
            save_checkpoint(global_step)
    bar.close()

    correct = []

    @cstorch.step_closure
    def count(value):
        correct.append(value.item())

    model.eval()
    executor = cstorch.utils.data.DataExecutor(
        cstorch.utils.data.DataLoader(validation_batches), num_steps=NUM_VALIDATION // VALIDATION_BATCH
    )
    for batch in executor:
        count(validation_step(batch))
    accuracy = sum(correct) / NUM_VALIDATION
    writer.add_scalar("validation/accuracy", accuracy, global_step)
    writer.close()
    print(
        f"Validation accuracy {accuracy:.2%} ({sum(correct)} of {NUM_VALIDATION}) after {global_step} steps "
        f"on {args.backend}, {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
