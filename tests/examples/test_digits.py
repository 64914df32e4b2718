"""examples/digits/train.py as a user runs it: real processes, real data, each backend."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cerebras.pytorch as cstorch

SCRIPT = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def run(*options, fails=False):
    """Runs the script in a process of its own, on one thread; returns what it printed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(model_dir):
    reader = cstorch.utils.tensorboard.SummaryReader(model_dir)
    return {event.step: event.value for event in reader.read_scalar("train/loss")}


def test_cpu_and_csx_give_the_same_losses(tmp_path, compile_dir):
    for backend in ("CPU", "CSX"):
        text = run(
            "--backend", backend, "--steps", 30, "--checkpoint_steps", 20, "--log_steps", 10,
            "--model_dir", tmp_path / backend, "--compile_dir", compile_dir,
        )  # fmt: skip
        assert re.findall(r"^step (\d+)/30  loss [\d.]+  [\d,]+ samples/s$", text, re.M) == ["10", "20", "30"]
        assert re.search(rf"^Validation accuracy \d\d\.\d\d% .* after 30 steps on {backend}", text, re.M)
        assert "step/s" not in text, "there is no progress bar where there is no terminal"
        saved = sorted(p.name for p in (tmp_path / backend).glob("*.mdl"))
        assert saved == ["checkpoint_20.mdl", "checkpoint_30.mdl"]
        assert list((tmp_path / backend / "events").glob("events.out.tfevents.*"))
    cpu, csx = losses(tmp_path / "CPU"), losses(tmp_path / "CSX")
    assert list(cpu) == list(csx) == list(range(1, 31))
    assert csx == pytest.approx(cpu, rel=1e-4, abs=1e-4)
    assert cpu[30] < cpu[1] / 2, "it learns"


@pytest.mark.parametrize("backend", ["CPU", "CSX"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, compile_dir, backend):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    common = ("--backend", backend, "--compile_dir", compile_dir, "--seed", 3)
    run(*common, "--model_dir", whole, "--steps", 40, "--checkpoint_steps", 8)
    resumed.mkdir()
    for step in (8, 24):  # the newest is found by number: as text, "8" comes after "24"
        shutil.copy(whole / f"checkpoint_{step}.mdl", resumed)
    text = run(*common, "--model_dir", resumed, "--steps", 40, "--resume")
    assert f"checkpoint_24.mdl at step 24{os.linesep}" in text
    expected = {step: loss for step, loss in losses(whole).items() if step > 24}
    assert losses(resumed) == pytest.approx(expected, abs=1e-6), "data order or dropout masks differ"
    assert (resumed / "checkpoint_40.mdl").exists()
    ends = [cstorch.load(d / "checkpoint_40.mdl", map_location="cpu") for d in (whole, resumed)]
    for name, value in ends[0]["model"].items():
        assert torch.allclose(ends[1]["model"][name], value, atol=1e-5), name


def test_a_second_run_does_not_write_over_the_first(tmp_path):
    (tmp_path / "checkpoint_20.mdl").touch()
    text = run("--model_dir", tmp_path, fails=True)
    assert "checkpoint_20.mdl" in text and "--resume" in text and "Traceback" not in text


def test_a_full_run_reaches_97_percent(tmp_path, compile_dir):
    text = run("--model_dir", tmp_path, "--compile_dir", compile_dir)
    accuracy = float(re.search(r"Validation accuracy ([\d.]+)%.*after 600 steps on CSX", text)[1])
    assert accuracy >= 97
