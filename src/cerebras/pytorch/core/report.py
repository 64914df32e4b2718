"""The program report: what was captured and compiled, for people and as JSON."""

import dataclasses
import json
import operator
from collections import Counter
from pathlib import Path

import torch

from .program import StepProgram, _numel
from .tensor import CsxTensor

# What each flag means on an appliance that is one process on an ordinary machine.
_FLAG_EFFECTS = {
    "csx.precision.optimization_level": "no effect: numerics are those of the eager backend",
    "csx.performance.micro_batch_size": "no effect: the whole batch is one micro-batch",
    "csx.performance.transfer_processes": "no effect: the appliance is in this process",
    "csx.performance.max_transfer_bytes": "no effect: the appliance is in this process",
    "csx.performance.compress_weights": "no effect: weights are not transferred",
    "csx.performance.use_speculative_optimizers": "no effect: the optimizer is part of the program",
    "csx.debug.retrace_every_iteration": "honoured: the graph is captured and compared at every iteration",
    "csx.debug.lazy_initialization": "honoured",
    "csx.debug.log_initialization": "honoured",
    "csx.debug.drop_data": "honoured",
    "csx.debug.compiler": "honoured",
    "csx.storage.s3.profile": "honoured: sets AWS_PROFILE",
}
_NO_CLUSTER = "no effect: there is no cluster"
_NOT_CSX = "no effect: it configures the CSX backend"
# Arguments of cstorch.backend("CSX", ...) that are not flags, or not only.
_ARGUMENT_EFFECTS = {
    "use_cs_grad_accum": "no effect: the whole batch is one micro-batch",
    "drop_data": "honoured",
    "retrace_every_iteration": _FLAG_EFFECTS["csx.debug.retrace_every_iteration"],
}


class ProgramReport:
    """Summary of one program; see `as_dict` for the fields."""

    def __init__(self, program: StepProgram, backend, number: int):
        self.program, self.number = program, number
        self.compile: dict | None = None
        self.mode = "validate_only" if backend.validate_only else "compile_only" if backend.compile_only else "run"
        self.hints = hints(backend)
        parameters = {id(p): p for module in backend.live_modules() for p in module.parameters()}
        self.trained = {p._cell.name for p in parameters.values() if isinstance(p, CsxTensor)}

    def compiled(self, result) -> None:
        self.compile = {
            "seconds": round(result.seconds, 3),
            "cached": result.cached,
            "entry": str(result.entry) if result.entry else None,
        }

    def as_dict(self) -> dict:
        """The report's fields:
        name, mode, fingerprint; parameters (numbers in the module parameters that the step uses), unused_parameters
        (names); state_tensors, state_bytes, batch_bytes, flops (of one step), operations (name to count); batch and
        outputs (signatures); updated (state tensors that the step writes), lifted_numbers; largest_activations of the
        forward pass; hints (settings that were made, and what each did), notes, compile.
        """
        program = self.program
        inputs = program.inputs
        parameters = [s for s in inputs if s.kind == "state" and s.name in self.trained]
        operations = Counter(
            str(n.target).removeprefix("aten.")
            for n in program.graph.nodes
            if n.op == "call_function" and not str(n.target).startswith("<built-in")
        )
        activations = sorted(
            (n for n in program.graph.nodes if _is_activation(n)), key=lambda n: -_bytes(n.meta["val"])
        )[:5]
        used = {s.name for s in parameters}
        return {
            "name": program.name,
            "mode": self.mode,
            "fingerprint": program.fingerprint(),
            "parameters": sum(_numel(s.shape) for s in parameters),
            "unused_parameters": sorted(name for name in self.trained if name is not None and name not in used),
            "state_tensors": sum(s.kind == "state" for s in inputs),
            "state_bytes": sum(s.bytes for s in inputs if s.kind == "state"),
            "batch_bytes": sum(s.bytes for s in inputs if s.kind == "argument"),
            "flops": flops(program),
            "operations": dict(operations.most_common()),
            "batch": [str(s) for s in inputs if s.kind == "argument"],
            "outputs": [str(s) for s in program.outputs],
            "updated": len(program.updated),
            "lifted_numbers": program.scalar_labels,
            "largest_activations": [
                {
                    "bytes": _bytes(n.meta["val"]),
                    "operation": str(n.target).removeprefix("aten."),
                    "shape": list(n.meta["val"].shape),
                    "dtype": str(n.meta["val"].dtype).removeprefix("torch."),
                    **_where(n),
                }
                for n in activations
            ],
            "hints": self.hints,
            "notes": program.notes,
            "compile": self.compile,
        }

    def text(self) -> str:
        """The report as printed."""
        d = self.as_dict()
        lines = [
            f"Program {d['name']!r} ({d['mode']})",
            f"  parameters           {d['parameters']:,}",
            *([f"  unused parameters    {_names(d['unused_parameters'])}"] if d["unused_parameters"] else []),
            f"  state                {d['state_tensors']} tensors, {_size(d['state_bytes'])}, {d['updated']} updated",
            f"  FLOPs of a step      {d['flops']:,}",
            f"  batch                {', '.join(d['batch']) or 'none'}; {_size(d['batch_bytes'])}",
            f"  fetched              {', '.join(d['outputs']) or 'none'}",
            f"  lifted numbers       {len(d['lifted_numbers'])}",
        ]
        top = list(d["operations"].items())
        lines.append(f"  operations           {sum(n for _, n in top)}: " + ", ".join(f"{k} x{n}" for k, n in top[:8]))
        for a in d["largest_activations"]:
            where = f" in {a['module']}" if a.get("module") else ""
            lines.append(f"  activation           {_size(a['bytes'])} {a['shape']} {a['operation']}{where}")
        for name, hint in d["hints"].items():
            lines.append(f"  {name} = {hint['value']!r}: {hint['effect']}")
        lines += [f"  note: {n}" for n in d["notes"]]
        if d["compile"]:
            how = "from the cache" if d["compile"]["cached"] else "compiled"
            lines.append(f"  compilation          {how} in {d['compile']['seconds']} s")
        return "\n".join(lines)

    def write(self, directory: Path) -> Path:
        """Writes report and program; returns the report's path."""
        path = Path(directory) / _file_name("report", self.number, ".json")
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        self.program.save(Path(directory) / _file_name("program", self.number, ".txt"))
        return path


def hints(backend) -> dict[str, dict]:
    """The settings that were made for the CSX backend, each with what it does on `backend`."""
    from ..backends import flags

    found = {}
    csx = backend.is_csx
    for name, value, default, _ in flags():
        if value != default:
            effect = _FLAG_EFFECTS.get(name, _NO_CLUSTER) if csx or name.startswith("csx.storage") else _NOT_CSX
            found[name] = {"value": _plain(value), "effect": effect}
    if csx:
        for name, effect in _ARGUMENT_EFFECTS.items():
            if getattr(backend, name):
                found.setdefault(name, {"value": True, "effect": effect})
    config = backend.cluster_config
    if config is not None:
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if value != f.default:
                effect = _NO_CLUSTER if csx else _NOT_CSX
                found[f"cluster_config.{f.name}"] = {"value": _plain(value), "effect": effect}
    return found


def write_eager(backend, directory: Path) -> None:
    """The report of a run without a program (CPU, GPU): which backend, and what became of the settings for CSX."""
    report = {"mode": "eager", "backend": backend.backend_type.name, "hints": hints(backend)}
    (Path(directory) / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def write_failure(backend, name: str, error: Exception) -> None:
    """The report of a step that could not be validated or compiled; the error itself goes on to the user."""
    mode = "validate_only" if backend.validate_only else "compile_only"
    report = {"name": name, "mode": mode, "error": {"type": type(error).__name__, "message": str(error)}}
    site = getattr(error, "site", None)
    if site is not None:
        report["error"]["at"] = f"{site.file}:{site.line}"
    path = backend.artifact_dir / _file_name("report", len(backend.reports), ".json")
    path.write_text(json.dumps(report, indent=1) + "\n")


def flops(program: StepProgram) -> int:
    """Floating-point operations of one step, counted by torch's registry (matrix products, convolutions, attention)."""
    from torch.utils.flop_counter import flop_registry

    total = 0
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        packet = getattr(node.target, "_overloadpacket", None)
        count = flop_registry.get(packet)
        if count is None:
            continue

        def value(n):
            return n.meta["val"] if isinstance(n, torch.fx.Node) else n

        args = torch.fx.map_arg(node.args, value)
        kwargs = torch.fx.map_arg(node.kwargs, value)
        try:
            total += int(count(*args, **kwargs, out_val=node.meta["val"]))
        except (TypeError, AssertionError, AttributeError, IndexError):
            continue
    return total


def _file_name(stem: str, number: int, suffix: str) -> str:
    return f"{stem}{suffix}" if number == 0 else f"{stem}_{number + 1}{suffix}"


def _is_activation(node) -> bool:
    """A tensor of the forward pass with memory of its own: neither a gradient nor a view."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.meta.get("phase") != "forward":
        return False
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is None or not any(r.alias_info is not None for r in schema.returns)


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.dtype.itemsize


def _names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _where(node) -> dict:
    at = node.meta.get("at")
    found = {"module": node.meta["module"]} if node.meta.get("module") else {}
    return found | ({"at": f"{at[0]}:{at[1]}"} if at else {})


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024


def _plain(value):
    try:
        json.dumps(value)
        return value
    except TypeError:
        return str(value)
