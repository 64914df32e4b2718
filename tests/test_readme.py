"""The README is true: its listing runs, its commands are two, the error that it quotes is the one that comes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def run_listing(backend, environment):
    (listing,) = block("python")
    Path("listing.py").write_text(listing)
    return subprocess.run(
        [sys.executable, "listing.py", backend],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize("backend", ["CPU", "CSX"])
def test_the_listing_runs_and_learns(backend, compile_dir):
    done = run_listing(backend, {"XDG_CACHE_HOME": str(compile_dir)})
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 200 and losses[-1] < losses[0] / 3
    assert "Warning" not in done.stderr


def test_the_quoted_error_is_the_one_without_a_compiler(tmp_path, monkeypatch):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    done = run_listing("CSX", {"PATH": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path)})
    (quoted,) = re.findall(r"`(CompilerMissingError: .*?)`", README)
    assert done.returncode != 0 and quoted in done.stderr, done.stderr[-2000:]


def test_there_are_two_commands():
    commands = [text.strip() for text in block("sh")]
    assert len(commands) == 2 and all(c.startswith("python3 -m venv ") and "\n" not in c for c in commands)
    assert commands[0].endswith("train.py") and commands[1].endswith("-m pytest -n 2")


def test_the_links_lead_somewhere():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
