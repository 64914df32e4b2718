"""From a `StepProgram` to what TorchInductor takes.

The lifted numbers arrive as one float64 tensor. Operations that took one as a Python scalar are rewritten to take a
0-d tensor; the computation is the same, rounded once more at most. State updates become in-place writes at the end.
"""

import functools

import torch
from torch import fx

from . import device as dev
from .capture import Recorder
from .errors import StaticGraphError
from .passes import _fresh, _placeholders_first, replay
from .program import StepProgram
from .tensor import Cell, CsxTensor, aten, fake_mode, map_tensors


class _Lifted:
    """A number of the host as a 0-d float64 tensor of the graph."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype: torch.dtype):
        if not dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.float32
        return aten._to_copy.default(self.tensor, dtype=dtype)


def _has_lifted(args, kwargs) -> bool:
    def visit(v):
        return isinstance(v, _Lifted) or (isinstance(v, (list, tuple)) and any(visit(x) for x in v))

    return visit(args) or visit(list(kwargs.values()))


def _dtype(node, *values):
    val = node.meta["val"] if node is not None else None
    if isinstance(val, torch.Tensor) and val.dtype is not torch.bool:
        return val.dtype
    return next(v.dtype for v in values if isinstance(v, torch.Tensor))


def _plain(value, dtype):
    return value.to(dtype) if isinstance(value, _Lifted) else value


def _binary(op):
    def rule(node, a, b, alpha=1, **kwargs):
        dtype = _dtype(node, a, b)
        b = _plain(b, dtype)
        if isinstance(alpha, _Lifted):
            b = b * alpha.to(dtype)
        elif alpha != 1:
            b = b * alpha
        return op(_plain(a, dtype), b, **kwargs)

    return rule


def _compare(op):
    return lambda node, a, b: op(_plain(a, b.dtype if isinstance(b, torch.Tensor) else a.dtype), _plain(b, a.dtype))


def _lerp(node, start, end, weight):
    return aten.lerp.Tensor(start, end, _plain(weight, start.dtype))


def _addcmul(node, base, a, b, value=1):
    return base + _plain(value, base.dtype) * a * b


def _addcdiv(node, base, a, b, value=1):
    return base + _plain(value, base.dtype) * (a / b)


def _filled(node, *args, **kwargs):
    value = next(v for v in args if isinstance(v, _Lifted))
    val = node.meta["val"]
    return aten.expand.default(value.to(val.dtype), list(val.shape)).clone().to(val.dtype)


def _clamp(node, x, low=None, high=None):
    x = x if low is None else torch.maximum(x, _as_tensor(low, x))
    return x if high is None else torch.minimum(x, _as_tensor(high, x))


def _as_tensor(value, like):
    return value.to(like.dtype) if isinstance(value, _Lifted) else aten.scalar_tensor.default(value, dtype=like.dtype)


def _where(node, condition, a, b):
    other = a if isinstance(a, torch.Tensor) else b
    return torch.where(condition, _plain(a, other.dtype), _plain(b, other.dtype))


RULES = {
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "pow": _binary(torch.pow),
    "remainder": _binary(torch.remainder),
    "rsub": lambda node, a, b, alpha=1: _binary(torch.sub)(node, b, a, alpha),
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "fill": _filled,
    "full": _filled,
    "full_like": _filled,
    "new_full": _filled,
    "scalar_tensor": _filled,
    "clamp": _clamp,
    "clamp_min": lambda node, x, low: _clamp(node, x, low),
    "clamp_max": lambda node, x, high: _clamp(node, x, None, high),
    "where": _where,
    "gt": _compare(torch.gt),
    "ge": _compare(torch.ge),
    "lt": _compare(torch.lt),
    "le": _compare(torch.le),
    "eq": _compare(torch.eq),
    "ne": _compare(torch.ne),
}


def _foreach(name, args, kwargs):
    """One operation of a _foreach_ list operation after the other."""
    rule, length = RULES.get(name), len(args[0])
    if rule is None:
        return None
    out = []
    for i in range(length):
        each = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        extra = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        if name in ("addcmul", "addcdiv") and len(each) == 4:
            extra["value"] = each.pop()
        if name in ("add", "sub") and "scalar" in extra:
            each.append(extra.pop("scalar"))
        out.append(rule(None, *each, **extra))
    return out


def _rewrite(node: fx.Node, args, kwargs):
    if not _has_lifted(args, kwargs):
        return NotImplemented
    name = node.target._schema.name.removeprefix("aten::")
    kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "layout", "device", "pin_memory", "memory_format")}
    if name.startswith("_foreach_"):
        out = _foreach(name.removeprefix("_foreach_"), args, kwargs)
        if out is not None:
            return out
    elif name in RULES:
        return RULES[name](node, *args, **kwargs)
    at = node.meta.get("at")
    raise StaticGraphError(
        f"{node.target} takes a number that changes from step to step as a constant of its own"
        + (f" ({at[0]}:{at[1]})." if at else "."),
        "apply the number with + - * / or torch.where, or compile with the eager interpreter",
    )


@functools.cache
def decompositions() -> dict:
    """TorchInductor's own table, and attention over short sequences."""
    from torch._inductor.decomposition import select_decomp_table

    from .optimize import DECOMPOSITIONS

    return select_decomp_table() | DECOMPOSITIONS


def lower(program: StepProgram) -> fx.GraphModule:
    """The graph for the compiler: (tensor inputs..., scalars: float64[n]) -> fetched tensors, updates in place."""
    recorder = Recorder(program.scalars, verbatim=True)
    recorder.decompositions = decompositions()
    inputs, values, symbols = [], {}, []
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.meta["kind"] == "scalar":
            symbols.append(node)
            continue
        fresh = _fresh(node)
        recorder.add_input(node.name, node.meta["kind"], fresh._cell)
        inputs.append(fresh)
        values[node] = fresh
    if symbols:
        with fake_mode:
            fake = torch.empty(len(symbols), dtype=torch.float64, device=dev.execution_device())
        packed = CsxTensor(Cell(fake=fake, status="pending"), label=dev.execution_device())
        recorder.add_input("scalars", "scalars", packed._cell)
    with recorder, torch.no_grad():
        for i, node in enumerate(symbols):
            values[node] = _Lifted(aten.select.int(packed, 0, i))
        results = replay(program.graph, values, _rewrite)
        fetched, updates = results[: program.num_fetched], results[program.num_fetched :]
        outputs = tuple(map_tensors(lambda t: recorder.node_of(t), list(fetched)))
        for index, value in zip(program.updated, updates):
            aten.copy_.default(inputs[index], value)
    graph = recorder.graph
    _placeholders_first(graph)
    graph.output(outputs)
    for node in graph.nodes:
        for key in ("at", "module", "phase", "kind"):
            node.meta.pop(key, None)
    return fx.GraphModule({}, graph)
