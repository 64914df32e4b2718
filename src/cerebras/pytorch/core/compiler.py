"""Compilers: TorchInductor with a cache of artefacts on disk, and the eager interpreter for debugging.

A compiled program is called with a list: the tensors of `program.inputs` in order, then the float64 tensor of lifted
numbers where there are any. It returns the fetched tensors and has written the state updates in place.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from . import artefact
from . import device as dev
from .errors import CompilerMissingError
from .program import StepProgram

logger = logging.getLogger("cerebras.pytorch")

SYSTEM_COMPILE_DIR = Path("/opt/cerebras/cached_compile")
MANIFEST = "manifest.json"

# The dropout masks and initial values of eager PyTorch are reproduced, so random operations stay ATen's.
INDUCTOR_OPTIONS = {"fallback_random": True, "size_asserts": False, "alignment_asserts": False}


@dataclass
class CompileResult:
    """What a compilation did.

    Attributes:
        call: the compiled program.
        cached: True where nothing was compiled.
        seconds: wall time.
        entry: the cache entry, None where there is none.
    """

    call: object
    cached: bool
    seconds: float
    entry: Path | None


def default_compile_dir() -> Path:
    """The seeds' directory where it exists and is writable, else the user's cache directory."""
    if SYSTEM_COMPILE_DIR.is_dir() and os.access(SYSTEM_COMPILE_DIR, os.W_OK):
        return SYSTEM_COMPILE_DIR
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cstorch" / "compile"


def compile_program(program: StepProgram, compiler: str, compile_dir: Path) -> CompileResult:
    """Compiles with "inductor" or "eager".

    Raises:
        CompilerMissingError: no C++ compiler for TorchInductor.
        PermissionError: `compile_dir` cannot be written.
    """
    start = time.perf_counter()
    if compiler == "eager":
        return CompileResult(interpret(program), False, time.perf_counter() - start, None)
    call, cached, entry = _inductor(program, compile_dir)
    return CompileResult(call, cached, time.perf_counter() - start, entry)


def interpret(program: StepProgram):
    """Runs the functional graph operation by operation: the numbers of eager PyTorch, bit for bit."""
    module = fx.GraphModule({}, program.graph)
    order = [n.meta["kind"] == "scalar" for n in program.graph.nodes if n.op == "placeholder"]
    kinds = [n.meta["scalar"].kind for n in program.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "scalar"]
    fetched, updated = program.num_fetched, program.updated

    def call(inputs):
        scalars = iter(int(v) if kind is int else v for kind, v in zip(kinds, inputs[-1].tolist() if kinds else ()))
        tensors = iter(inputs)
        results = module(*(next(scalars) if is_scalar else next(tensors) for is_scalar in order))
        for index, value in zip(updated, results[fetched:]):
            inputs[index].copy_(value)
        return results[:fetched]

    return call


def check_compiler() -> None:
    """Raises CompilerMissingError where TorchInductor would find no C++ compiler."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None and shutil.which("clang++") is None:
        raise CompilerMissingError(
            f"TorchInductor needs a C++ compiler to build the step, and {name!r} was not found.\n"
            "  Instead: install g++ (Debian: apt-get install g++), set CXX, or run without compiling: "
            "cstorch.backends.csx.debug.compiler = 'eager'"
        )


def cache_key(program: StepProgram) -> dict[str, str]:
    """Everything that decides whether a cached artefact is this program's."""
    from .._version import __version__

    return {
        "program": program.fingerprint(),
        "cstorch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(dev.execution_device()),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_flags()}",
        "threads": str(torch.get_num_threads()),
        "lowering": _lowering_version(),
        "options": repr(sorted(INDUCTOR_OPTIONS.items())),
        "numerics": repr(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory,
                torch.get_float32_matmul_precision(),
            )
        ),
        "cuda": torch.cuda.get_device_name() if dev.execution_device().type == "cuda" else "",
    }


@functools.cache
def _cpu_flags() -> str:
    """A hash of the processor's instruction sets, which TorchInductor compiles for; no import of it is needed."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return hashlib.sha256(" ".join(sorted(line.split())).encode()).hexdigest()[:16]
    return platform.processor()


@functools.cache
def _lowering_version() -> str:
    """A hash of the code between a program and TorchInductor: its results are in the cached artefacts."""
    sources = (
        Path(__file__).with_name(name).read_bytes()
        for name in ("artefact.py", "compiler.py", "lowering.py", "optimize.py")
    )
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _inductor(program: StepProgram, compile_dir: Path):
    key = cache_key(program)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    entry = Path(compile_dir) / digest
    if os.path.lexists(entry) and _intact(entry):
        try:
            call = artefact.load(entry)
        except (ImportError, OSError, ValueError, SyntaxError) as e:
            logger.warning("The compile cache entry %s cannot be loaded (%s); trying TorchInductor's cache", entry, e)
            call = None
        if call is not None:
            return call, True, entry
        call, compiled = _run_inductor(program, entry / "inductor")
        if not compiled:
            return call, True, entry
        logger.warning("The compile cache entry %s was not usable by torch; the step was compiled again", entry)
        return call, False, entry
    check_compiler()
    try:
        Path(compile_dir).mkdir(parents=True, exist_ok=True)
        work = Path(compile_dir) / f".{digest}.{uuid.uuid4().hex[:8]}.tmp"
        work.mkdir()
    except OSError as e:
        raise PermissionError(
            f"compile_dir {str(compile_dir)!r} cannot be written ({e.strerror}).\n"
            "  Instead: pass a writable directory, cstorch.backend('CSX', compile_dir=...)"
        ) from e
    try:
        call, _ = _run_inductor(program, work / "inductor")
        call = artefact.save(call, work, work / "inductor") or call
        files = {str(p.relative_to(work)): _sha256(p) for p in sorted(work.rglob("*")) if p.is_file()}
        manifest = {"key": key, "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
        with contextlib.suppress(OSError):  # another process was faster: its entry is as good
            work.rename(entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return call, False, entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _intact(entry: Path) -> bool:
    """True for a complete entry; a damaged one is named, removed and compiled again."""
    try:
        files = json.loads((entry / MANIFEST).read_text())["files"]
        bad = [name for name, digest in files.items() if _sha256(entry / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        bad = [f"{MANIFEST}: {e}"]
    if bad:
        logger.warning("The compile cache entry %s is damaged (%s); the step is compiled again", entry, bad[0])
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return not bad


def _run_inductor(program: StepProgram, cache: Path):
    """Lowers and compiles with `cache` as Inductor's cache; returns the call and whether anything was compiled."""
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.utils import clear_caches

    from .lowering import lower
    from .optimize import lowerings, optimize
    from .tensor import fake_mode

    module = lower(program)
    with fake_mode:
        optimize(module)
    examples = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    saved = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    clear_caches()
    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]
    try:
        with torch.no_grad(), inductor_config.patch(INDUCTOR_OPTIONS), lowerings(), tracing(TracingContext(fake_mode)):
            _recursive_joint_graph_passes(module)
            compiled = compile_fx_inner(module, examples)
    finally:
        if saved is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = saved
    missed = counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"] - misses
    return compiled, missed > 0
