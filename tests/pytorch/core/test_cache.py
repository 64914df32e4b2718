"""The cache of compiled steps: what is found again, what must not be, and what becomes of damaged entries."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cerebras.pytorch as cstorch
from cerebras.pytorch.core import compiler

SCRIPT = """
    import sys
    import torch, torch.nn as nn
    import cerebras.pytorch as cstorch

    cache, width, wait = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
    if "eager" in sys.argv:
        cstorch.backends.csx.debug.compiler = "eager"
    backend = cstorch.backend("CSX", compile_dir=None if cache == "default" else cache)
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(8, width)
    compiled = cstorch.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @cstorch.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []

    @cstorch.step_closure
    def keep(loss):
        losses.append(loss.item())

    for x in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(lambda: [torch.ones(4, 8)]), num_steps=3):
        keep(step(x))
    report = backend.reports[0].compile
    print("cached:", report["cached"])
    print("entry:", report["entry"])
    print("losses:", losses)
"""


def value(done, name):
    return done.stdout.split(f"{name}: ")[1].split("\n")[0]


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """A cache with the entry of the script's step, and the losses of the run that made it."""
    directory = tmp_path_factory.mktemp("compiled_once")
    script = directory / "script.py"
    import textwrap

    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), str(directory / "cache"), "16"],
        capture_output=True, text=True, cwd=directory, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert value(done, "cached") == "False"
    return directory / "cache", value(done, "losses")


@pytest.fixture
def cache(compiled_once, tmp_path):
    """A copy of that cache, at a path of its own, to be damaged."""
    shutil.copytree(compiled_once[0], tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def watched_compiler(tmp_path):
    """A g++ first on PATH that leaves a mark for each compilation, and does the work; `marks()` are the calls.

    Inductor asks the compiler for its version even where there is nothing to compile.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "g++.log"
    script = folder / "g++"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in -v|--version) ;; *) echo "$@" >> {log};; esac\nexec {shutil.which("g++")} "$@"\n'
    )
    script.chmod(0o755)

    class Watched:
        path = f"{folder}:{os.environ['PATH']}"

        def marks(self):
            return log.read_text().splitlines() if log.exists() else []

    return Watched()


def test_a_second_process_compiles_nothing(run_script, cache, compiled_once, watched_compiler):
    done = run_script(SCRIPT, cache, 16, PATH=watched_compiler.path, CXX=None)
    assert value(done, "cached") == "True" and value(done, "losses") == compiled_once[1]
    assert watched_compiler.marks() == []
    assert "damaged" not in done.text and "not usable" not in done.text


def test_without_a_compiler_the_error_names_the_mend(run_script, tmp_path):
    done = run_script(SCRIPT, tmp_path / "cache", 24, check=False, PATH="/nowhere", CXX=None)
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("CompilerMissingError") :]
    for words in ("apt-get install g++", "CXX", "debug.compiler = 'eager'"):
        assert words in last
    done = run_script(SCRIPT, tmp_path / "cache", 24, "eager", PATH="/nowhere", CXX=None)
    assert value(done, "cached") == "False"
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_a_compiler_that_cxx_names_but_is_not_there(run_script, tmp_path):
    done = run_script(SCRIPT, tmp_path / "cache", 24, check=False, PATH="/nowhere", CXX="no-such-g++")
    assert "CompilerMissingError" in done.stderr and "'no-such-g++' was not found" in done.stderr


def damaged(cache, how):
    (entry,) = cache.iterdir()
    manifest = entry / "manifest.json"
    library = max(entry.rglob("*.so"), key=lambda p: p.stat().st_size)
    if how == "truncated library":
        library.write_bytes(library.read_bytes()[:1000])
    elif how == "changed library":
        raw = bytearray(library.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        library.write_bytes(raw)
    elif how == "missing library":
        library.unlink()
    elif how == "garbage manifest":
        manifest.write_bytes(b"\x80\x00 not json")
    elif how == "manifest of another kind":
        manifest.write_text('["a", "list"]')
    elif how == "no manifest":
        manifest.unlink()
    elif how == "a file in its place":
        shutil.rmtree(entry)
        entry.write_text("not a directory")
    return entry


@pytest.mark.parametrize(
    "how",
    [
        "truncated library", "changed library", "missing library", "garbage manifest", "no manifest",
        "manifest of another kind", "a file in its place",
    ],
)  # fmt: skip
def test_a_damaged_entry_is_not_used(cache, how, caplog):
    """The check of the entry itself; that the step is compiled again is the next test."""
    entry = damaged(cache, how)
    assert not compiler._intact(entry)
    assert str(entry) in caplog.text and "compiled again" in caplog.text
    assert not entry.exists(), "the next process must not stumble over it"


def test_a_damaged_entry_is_compiled_again_and_mended(run_script, cache, compiled_once):
    damaged(cache, "truncated library")
    done = run_script(SCRIPT, cache, 16)
    assert value(done, "cached") == "False" and value(done, "losses") == compiled_once[1]
    assert "is damaged" in done.stderr
    done = run_script(SCRIPT, cache, 16)
    assert value(done, "cached") == "True" and "damaged" not in done.stderr


def test_the_remains_of_a_killed_compilation_do_no_harm(run_script, cache, compiled_once):
    (entry,) = cache.iterdir()
    entry.rename(cache / f".{entry.name}.0badf00d.tmp")
    done = run_script(SCRIPT, cache, 16)
    assert value(done, "cached") == "False" and value(done, "losses") == compiled_once[1]
    assert entry.is_dir(), "and its own entry is complete"


def test_an_entry_can_be_moved_with_its_directory(run_script, cache, compiled_once, tmp_path):
    cache.rename(tmp_path / "elsewhere")
    done = run_script(SCRIPT, tmp_path / "elsewhere", 16)
    assert value(done, "cached") == "True" and value(done, "losses") == compiled_once[1]


def test_two_processes_may_compile_the_same_step_at_once(tmp_path, compiled_once):
    import textwrap

    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "script.py", "cache", "16"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert f"losses: {compiled_once[1]}\n" in out
    entries = [p.name for p in (tmp_path / "cache").iterdir()]
    assert len(entries) == 1 and not entries[0].startswith("."), "one entry and no remains"


def test_an_unwritable_compile_dir_names_the_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match=r"compile_dir '.*file/cache' cannot be written.*\n.*compile_dir=\.\.\."):
        run(compile_dir=tmp_path / "file" / "cache", compiler="inductor")


# which programs share an entry


def run(
    width=16,
    batch=4,
    dtype=torch.float32,
    lr=0.1,
    momentum=0.0,
    make=None,
    fetch=True,
    compiler="eager",
    compile_dir=None,
):
    """One step of a small program; returns the backend. Interpreted, unless told otherwise."""
    cstorch.backends.csx.debug.compiler = compiler
    backend = cstorch.backend("CSX", compile_dir=compile_dir)
    torch.manual_seed(0)
    model = (make or (lambda: nn.Linear(8, width)))().to(dtype)
    compiled = cstorch.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    @cstorch.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss,) if fetch else (loss, loss * 2)

    loader = cstorch.utils.data.DataLoader(lambda: [torch.ones(batch, 8, dtype=dtype)])
    for x in cstorch.utils.data.DataExecutor(loader, num_steps=1):
        step(x)
    return backend


def digest(**kwargs):
    key = compiler.cache_key(run(**kwargs).reports[0].program)
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def test_the_same_program_has_the_same_key_whatever_the_numbers():
    assert digest() == digest()
    assert digest(lr=0.1) == digest(lr=0.2), "a learning rate is an input of the program"


@pytest.mark.parametrize(
    "change",
    [
        {"width": 17}, {"batch": 5}, {"dtype": torch.float64}, {"momentum": 0.9}, {"fetch": False},
        {"make": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh())},
        {"make": lambda: nn.Linear(8, 16, bias=False)},
    ],
    ids=["width", "batch", "dtype", "momentum", "outputs", "layer", "bias"],
)  # fmt: skip
def test_another_program_has_another_key(change):
    assert digest(**change) != digest()


def test_a_constant_in_the_graph_is_in_the_key():

    class Eps(nn.Module):
        def __init__(self, eps):
            super().__init__()
            self.norm = nn.LayerNorm(8, eps=eps)

        def forward(self, x):
            return F.relu(self.norm(x))

    assert digest(make=lambda: Eps(1e-5)) != digest(make=lambda: Eps(1e-6))


def test_threads_and_versions_are_in_the_key(monkeypatch):
    program = run().reports[0].program
    keys = [compiler.cache_key(program)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        keys.append(compiler.cache_key(program))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("cerebras.pytorch._version.__version__", "2.10.0+cstorch.99")
    keys.append(compiler.cache_key(program))
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    keys.append(compiler.cache_key(program))
    assert len({json.dumps(key) for key in keys}) == 4


@pytest.mark.parametrize("setting", ["deterministic", "matmul_precision"])
def test_a_setting_of_torch_that_changes_the_code_has_an_entry_of_its_own(setting):
    program = run().reports[0].program
    before = compiler.cache_key(program)
    try:
        if setting == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            torch.set_float32_matmul_precision("medium")
        assert compiler.cache_key(program) != before
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


# the default directory


def test_the_default_directory_is_the_system_one_where_it_is_writable(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "SYSTEM_COMPILE_DIR", tmp_path / "system")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert compiler.default_compile_dir() == tmp_path / "home" / ".cache" / "cstorch" / "compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compiler.default_compile_dir() == tmp_path / "xdg" / "cstorch" / "compile"
    (tmp_path / "system").mkdir()
    assert compiler.default_compile_dir() == tmp_path / "system"
    assert cstorch.backend("CSX").compile_dir == tmp_path / "system"
    (tmp_path / "system").rmdir()
    (tmp_path / "system").write_text("a file")
    assert compiler.default_compile_dir() == tmp_path / "xdg" / "cstorch" / "compile"


def test_the_default_directory_is_used(run_script, compiled_once, tmp_path):
    if compiler.SYSTEM_COMPILE_DIR.exists():
        pytest.skip("this machine has the system's directory")
    shutil.copytree(compiled_once[0], tmp_path / "xdg" / "cstorch" / "compile")
    done = run_script(SCRIPT, "default", 16, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert value(done, "cached") == "True"
    assert value(done, "entry").startswith(str(tmp_path / "xdg" / "cstorch" / "compile"))
