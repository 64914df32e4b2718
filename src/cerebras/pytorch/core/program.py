"""`StepProgram`: the contract between capture, compilers and executors."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import fx

from .scalars import Scalars


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a program's signature.

    Attributes:
        name: unique within the program; parameters and buffers carry their module's path.
        kind: "argument" (bound at each call), "state" (lives on, may be updated), "host" (a CPU tensor read at each
            step), "constant", or "output".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return _numel(self.shape) * self.dtype.itemsize

    def __str__(self):
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def _numel(shape) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


@dataclass(eq=False)
class StepProgram:
    """A whole step as one functional graph.

    The graph's placeholders are the tensors of `inputs`, in order, and the lifted numbers of `scalar_expressions`. It
    returns the `num_fetched` tensors that closures and the caller see, then the new values of `updated` inputs.

    Attributes:
        graph: functional ATen graph, without decompositions.
        inputs: signature of the tensor inputs.
        scalar_expressions: how the host computes each scalar input, leaves numbered.
        scalar_labels: the same for people.
        updated: indices into `inputs` that get a new value.
        outputs: signature of the fetched tensors.
        constants: input index -> value, for inputs of kind "constant".
        notes: what was decided on the way, for the report.
    """

    graph: fx.Graph
    inputs: list[TensorSpec]
    scalar_expressions: list[str]
    scalar_labels: list[str]
    updated: list[int]
    outputs: list[TensorSpec]
    constants: dict[int, torch.Tensor]
    scalars: Scalars
    name: str = "step"
    notes: list[str] = field(default_factory=list)

    @property
    def num_fetched(self) -> int:
        return len(self.outputs)

    def lines(self) -> list[str]:
        """The graph as text: one operation a line, names by position, shapes and dtypes of results."""
        names, lines = {}, []
        for node in self.graph.nodes:
            names[node] = f"%{len(names)}"
            val = node.meta.get("val")
            if node.op == "placeholder":
                what = "scalar" if node.meta["kind"] == "scalar" else f"{node.meta['kind']} {_meta_text(val)}"
                lines.append(f"{names[node]} = input {what}")
            elif node.op == "output":
                lines.append(f"return {_args_text(node.args, names)}")
            else:
                kwargs = "".join(f", {k}={_args_text(v, names)}" for k, v in node.kwargs.items())
                args = ", ".join(_args_text(a, names) for a in node.args)
                lines.append(f"{names[node]} = {node.target}({args}{kwargs}) -> {_meta_text(val)}")
        return lines

    def fingerprint(self) -> str:
        """A hash of everything that the compiled code depends on, apart from flags and versions."""
        h = hashlib.sha256()
        for line in self.lines():
            h.update(line.encode() + b"\n")
        h.update(repr((self.updated, self.scalar_expressions, self.num_fetched)).encode())
        for index, value in sorted(self.constants.items()):
            raw = value.detach().cpu().contiguous().reshape(-1)
            h.update(f"{index} {value.dtype} {tuple(value.shape)}".encode() + raw.view(torch.uint8).numpy().tobytes())
        return h.hexdigest()

    def difference(self, other: "StepProgram") -> str | None:
        """The first difference to another capture of the step, for people; None where they are the same."""
        mine, theirs = self.lines(), other.lines()
        nodes = list(other.graph.nodes)
        for i, (a, b) in enumerate(zip(mine, theirs)):
            if a != b:
                at = nodes[i].meta.get("at") if i < len(nodes) else None
                where = f", from {at[0]}:{at[1]}" if at else ""
                return f"operation {i} was\n    {a}\n  and is now\n    {b}{where}"
        if len(mine) != len(theirs):
            return f"the graph had {len(mine)} operations and has {len(theirs)} now"
        if self.scalar_expressions != other.scalar_expressions:
            return f"the lifted numbers were {self.scalar_expressions} and are {other.scalar_expressions}"
        for index, value in self.constants.items():
            if not torch.equal(value, other.constants[index]):
                return f"the constant {self.inputs[index].name} changed its value"
        return None

    def __str__(self):
        head = [f"StepProgram {self.name!r}"]
        head += [f"  {s.kind} {s}" for s in self.inputs]
        head += [f"  scalar {label}" for label in self.scalar_labels]
        return "\n".join(head + ["  " + line for line in self.lines()])

    def save(self, path: str | Path) -> None:
        """Writes the program as text, and its signature as JSON beside it."""
        path = Path(path)
        path.write_text(str(self) + "\n")
        signature = {
            "name": self.name,
            "fingerprint": self.fingerprint(),
            "inputs": [_spec_json(s) | {"updated": i in set(self.updated)} for i, s in enumerate(self.inputs)],
            "outputs": [_spec_json(s) for s in self.outputs],
            "scalars": self.scalar_labels,
        }
        path.with_suffix(".json").write_text(json.dumps(signature, indent=1) + "\n")


def _spec_json(spec: TensorSpec) -> dict:
    return asdict(spec) | {"dtype": str(spec.dtype).removeprefix("torch.")}


def _meta_text(val) -> str:
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}/{list(val.stride())}"
    if isinstance(val, (list, tuple)):
        return "(" + ", ".join(_meta_text(v) for v in val) + ")"
    return type(val).__name__ if val is not None else "none"


def _args_text(value, names) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_args_text(v, names) for v in value) + "]"
    return repr(value)


def spec_of(name: str, kind: str, val: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, kind, tuple(val.shape), tuple(val.stride()), val.dtype)
