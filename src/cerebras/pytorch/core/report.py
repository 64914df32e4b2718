"""The program report: what was captured and compiled, for people and as JSON."""

import json
from collections import Counter
from pathlib import Path

import torch

from .program import StepProgram, _numel

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


class ProgramReport:
    """Summary of one program; see `as_dict` for the fields."""

    def __init__(self, program: StepProgram, backend, number: int):
        self.program, self.number = program, number
        self.compile: dict | None = None
        self.mode = "validate_only" if backend.validate_only else "compile_only" if backend.compile_only else "run"
        self.hints = self._hints(backend)
        self.trained = {
            name
            for module in backend.live_modules()
            for name, p in module.named_parameters()
        }

    def compiled(self, result) -> None:
        self.compile = {
            "seconds": round(result.seconds, 3),
            "cached": result.cached,
            "entry": str(result.entry) if result.entry else None,
        }

    def _hints(self, backend) -> dict[str, dict]:
        from ..backends import flags

        hints = {}
        for name, value, default, _ in flags():
            if value != default:
                hints[name] = {"value": _plain(value), "effect": _FLAG_EFFECTS.get(name, _NO_CLUSTER)}
        if backend.use_cs_grad_accum:
            hints["use_cs_grad_accum"] = {"value": True, "effect": "no effect: the whole batch is one micro-batch"}
        config = backend.cluster_config
        if config is not None:
            import dataclasses

            for f in dataclasses.fields(config):
                value = getattr(config, f.name)
                if value != f.default and value:
                    hints[f"cluster_config.{f.name}"] = {"value": _plain(value), "effect": _NO_CLUSTER}
        return hints

    def as_dict(self) -> dict:
        """The report's fields:
        parameters, state_bytes, batch_bytes, flops (of one step), operations (by count), signature, largest
        activations, hints (flags that were set and what they did), notes, compile.
        """
        program = self.program
        inputs = program.inputs
        parameters = [s for s in inputs if s.kind == "state" and s.name in self.trained]
        operations = Counter(
            str(n.target).removeprefix("aten.") for n in program.graph.nodes if n.op == "call_function"
            and not str(n.target).startswith("<built-in")
        )
        activations = sorted(
            (
                (n.meta["val"].numel() * n.meta["val"].dtype.itemsize, n)
                for n in program.graph.nodes
                if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)
                and n.meta.get("phase") != "update"
            ),
            key=lambda pair: -pair[0],
        )[:5]
        return {
            "name": program.name,
            "mode": self.mode,
            "fingerprint": program.fingerprint(),
            "parameters": sum(_numel(s.shape) for s in parameters),
            "state_tensors": sum(s.kind == "state" for s in inputs),
            "state_bytes": sum(s.bytes for s in inputs if s.kind == "state"),
            "flops": flops(program),
            "operations": dict(operations.most_common()),
            "batch": [str(s) for s in inputs if s.kind == "argument"],
            "outputs": [str(s) for s in program.outputs],
            "updated": len(program.updated),
            "lifted_numbers": program.scalar_labels,
            "largest_activations": [
                {"bytes": size, "operation": str(n.target), "shape": list(n.meta["val"].shape), **_where(n)}
                for size, n in activations
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
            f"  state                {d['state_tensors']} tensors, {_size(d['state_bytes'])}, {d['updated']} updated",
            f"  FLOPs of a step      {d['flops']:,}",
            f"  batch                {', '.join(d['batch']) or 'none'}",
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
        suffix = "" if self.number == 0 else f"_{self.number + 1}"
        path = Path(directory) / f"report{suffix}.json"
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        self.program.save(Path(directory) / f"program{suffix}.txt")
        return path


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
