"""Python numbers that change from step to step, lifted out of the graph.

An optimizer's hyper-parameters (lr, betas, weight_decay), its step counters, and the Python numbers that are passed to
a traced step are not constants. While the body of a step is recorded they are replaced by torch.SymFloat/SymInt over a
`ScalarNode` of ours: arithmetic on them builds an expression, an operation that takes one records an input of the
program, and Python control flow on one records a guard. At each later step the host evaluates the expressions in double
precision, exactly as eager PyTorch would have, and checks the guards: a number is never frozen silently.

Notes:
1. Nodes are hash-consed and counters with the same value and the same update share one leaf, so an Adam over a thousand
   parameters needs about six numbers a step.
2. Step counters are 0-d CPU tensors in `optimizer.state`. After the capture those of one optimizer are moved into one
   buffer (each tensor object stays the same), so that one write updates them all.
3. Learning-rate schedulers are Python programs over floats: they are called on the host at each step, in the order in
   which the body called them.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .errors import FrozenValueError, Site, user_site

_BINARY = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "float_truediv": "({} / {})",
    "int_truediv": "({} / {})",
    "truediv": "({} / {})",
    "float_pow": "({} ** {})",
    "pow_by_natural": "({} ** {})",
    "pow": "({} ** {})",
    "mod": "({} % {})",
    "int_floordiv": "({} // {})",
    "floordiv": "({} // {})",
    "sym_max": "max({}, {})",
    "sym_min": "min({}, {})",
    "lt": "({} < {})",
    "le": "({} <= {})",
    "gt": "({} > {})",
    "ge": "({} >= {})",
    "eq": "({} == {})",
    "ne": "({} != {})",
    "round_to": "round({}, {})",
    "and_": "({} and {})",
    "or_": "({} or {})",
}
_UNARY = {
    "neg": "(-{})",
    "pos": "(+{})",
    "abs": "abs({})",
    "floor": "math.floor({})",
    "ceil": "math.ceil({})",
    "trunc": "math.trunc({})",
    "round": "round({})",
    "sym_float": "float({})",
    "sym_sqrt": "math.sqrt({})",
    "sym_not": "(not {})",
    "f32": "f32({})",
    "to_int": "int({})",
}


def f32(value: float) -> float:
    """Rounds a double to float32, as a store into a float32 tensor does."""
    return ctypes.c_float(value).value


_NAMESPACE = {"math": math, "f32": f32}


@dataclass(eq=False)
class Leaf:
    """A number read afresh at each step.

    Attributes:
        label: how messages name it, "AdamW.param_groups[0]['lr']".
        read: returns the current value.
        volatile: True for what is known to change at every step (a counter).
    """

    label: str
    read: Callable[[], float]
    volatile: bool = False
    members: list = field(default_factory=list)  # the tensors of a counter


class ScalarNode:
    """One hash-consed expression; implements the SymNode protocol that torch.SymFloat and torch.SymInt call."""

    __slots__ = ("scalars", "op", "args", "kind", "hint", "volatile")

    def __init__(self, scalars, op, args, hint, volatile):
        self.scalars, self.op, self.args, self.hint, self.volatile = scalars, op, args, hint, volatile
        self.kind = type(hint)

    # what C++ and the Sym classes ask
    def is_int(self):
        return self.kind is int

    def is_float(self):
        return self.kind is float

    def is_bool(self):
        return self.kind is bool

    def is_constant(self):
        return False

    def is_symbolic(self):
        return True

    def is_nested_int(self):
        return False

    def nested_int(self):
        return None

    def maybe_as_int(self):
        return None

    def maybe_as_float(self):
        return None

    def maybe_as_bool(self):
        return None

    def has_hint(self):
        return True

    def wrap_int(self, value):
        return self.scalars.constant(value)

    wrap_float = wrap_bool = wrap_int

    def guard_int(self, file, line):
        return int(self.scalars.pin(self, "int()"))

    def guard_float(self, file, line):
        return float(self.scalars.pin(self, "float()"))

    def guard_bool(self, file, line):
        return bool(self.scalars.pin(self, "a condition"))

    guard_size_oblivious = guard_bool
    guard_or_false = guard_or_true = guard_bool

    def bool_(self):
        return self.guard_bool("", 0)

    def int_(self):
        return self.guard_int("", 0)

    def expect_true(self, file, line):
        return bool(self.hint)

    def expect_size(self, file, line):
        return bool(self.hint)

    def statically_known_true(self, file="", line=0):
        return False

    def is_integer(self):
        return self.scalars.constant(float(self.hint).is_integer())

    def __str__(self):
        return self.scalars.source(self)

    str = __str__
    _graph_repr = __str__

    @property
    def expr(self):
        return self.scalars.source(self)


def _install_operators():
    for name in (*_BINARY, *_UNARY):
        if name in ("f32", "to_int"):
            continue

        def method(self, *others, _name=name):
            if _name == "round" and others:
                return self.scalars.make("round_to", (self, *others))
            return self.scalars.make(_name, (self, *others))

        setattr(ScalarNode, name, method)


_install_operators()


@dataclass
class Guard:
    """`node` was turned into a plain Python value at `site`; it must stay what it was."""

    node: ScalarNode
    value: object
    how: str
    site: Site | None


class Scalars:
    """All lifted numbers of one captured step."""

    def __init__(self):
        self._interned: dict = {}
        self.leaves: list[Leaf] = []
        self.guards: list[Guard] = []
        # ("read", leaf), ("call", function, args, kwargs) and ("write", function, node or nodes), in the body's order
        self.events: list = []
        self.updates: list[tuple[Leaf, ScalarNode]] = []  # counters written in the step
        self.writebacks: list[tuple[Callable, ScalarNode]] = []  # Python numbers written in the step

    # building
    def leaf(self, label, value, read, volatile=False) -> ScalarNode:
        leaf = Leaf(label, read, volatile)
        self.leaves.append(leaf)
        self.events.append(("read", leaf))
        return self._intern("leaf", (leaf,), value, volatile)

    def constant(self, value) -> ScalarNode:
        return self._intern("const", (type(value).__name__, value), value, False)

    def make(self, op: str, args: tuple) -> ScalarNode:
        args = tuple(a if isinstance(a, ScalarNode) else self.constant(a) for a in args)
        template = _BINARY.get(op) or _UNARY[op]
        hint = eval(template.format(*(f"a[{i}]" for i in range(len(args)))), _NAMESPACE, {"a": [a.hint for a in args]})
        return self._intern(op, args, hint, any(a.volatile for a in args))

    def _intern(self, op, args, hint, volatile):
        key = (op, *(id(a) if isinstance(a, (ScalarNode, Leaf)) else a for a in args))
        node = self._interned.get(key)
        if node is None:
            node = self._interned[key] = ScalarNode(self, op, args, hint, volatile)
        return node

    def sym(self, node: ScalarNode):
        """The torch.SymFloat or SymInt over a node."""
        return torch.SymInt(node) if node.kind is int else torch.SymFloat(node)

    def of(self, value) -> ScalarNode | None:
        """The node of a SymFloat/SymInt/SymBool of ours, None for anything else."""
        node = getattr(value, "node", None)
        return node if isinstance(node, ScalarNode) else None

    def pin(self, node: ScalarNode, how: str):
        """A lifted number became a Python value: allowed as long as it stays the same, guarded from then on."""
        if node.op == "const":
            return node.hint
        site = user_site()
        if node.volatile and node.kind is not bool:
            raise FrozenValueError(
                f"{how} turns {self.source(node)}, which changes at every step, into a constant of the graph.",
                "keep it symbolic: use + - * / ** (x ** 0.5, not math.sqrt(x)) or torch functions on it",
                site,
            )
        self.guards.append(Guard(node, node.hint, how, site))
        return node.hint

    def source(self, node: ScalarNode) -> str:
        """A readable expression."""
        if node.op == "leaf":
            return node.args[0].label
        if node.op == "const":
            return repr(node.args[1])
        return (_BINARY.get(node.op) or _UNARY[node.op]).format(*(self.source(a) for a in node.args))

    def structure(self, node: ScalarNode, names: dict) -> str:
        """The expression with leaves numbered, for fingerprints."""
        if node.op == "leaf":
            return names.setdefault(node.args[0], f"leaf{len(names)}")
        if node.op == "const":
            return repr(node.args[1])
        return (_BINARY.get(node.op) or _UNARY[node.op]).format(*(self.structure(a, names) for a in node.args))


class HostProgram:
    """The compiled host side of a step: events, guards, expressions, updates.

    `run()` performs one step's host work and returns nothing; the values of the program's scalar inputs are then in
    `values`, a float64 numpy array that shares memory with the tensor `tensor`.
    """

    def __init__(self, scalars: Scalars, outputs: list[ScalarNode]):
        self.scalars = scalars
        self.outputs = outputs
        self.tensor = torch.zeros(max(len(outputs), 1), dtype=torch.float64)
        self.values = self.tensor.numpy()
        self.values[: len(outputs)] = [float(n.hint) for n in outputs]
        self._last: tuple | None = None
        self._compile()

    def _compile(self):
        scalars, env = self.scalars, dict(_NAMESPACE)
        index = {leaf: i for i, leaf in enumerate(scalars.leaves)}
        lines = ["def step(check):"]
        used = self._used_leaves()
        names: dict[int, str] = {}

        def emit(node: ScalarNode) -> str:
            if node.op == "leaf":
                return f"v{index[node.args[0]]}"
            if node.op == "const":
                return repr(node.args[1]) if math.isfinite(node.args[1]) else f"float('{node.args[1]}')"
            if id(node) not in names:
                args = [emit(a) for a in node.args]
                names[id(node)] = f"e{len(names)}"
                template = _BINARY.get(node.op) or _UNARY[node.op]
                lines.append(f"    {names[id(node)]} = {template.format(*args)}")
            return names[id(node)]

        for i, event in enumerate(scalars.events):
            if event[0] == "read":
                leaf = event[1]
                if leaf in used:
                    env[f"r{index[leaf]}"] = leaf.read
                    lines.append(f"    v{index[leaf]} = r{index[leaf]}()")
            elif event[0] == "write":
                env[f"p{i}"] = event[1]
                nodes = event[2]
                value = emit(nodes) if isinstance(nodes, ScalarNode) else f"({', '.join(emit(n) for n in nodes)},)"
                lines.append(f"    p{i}({value})")
            else:
                env[f"c{i}"], env[f"a{i}"], env[f"k{i}"] = event[1:]
                lines.append(f"    c{i}(*a{i}, **k{i})")
        env["fail"] = self._guard_failed
        seen = set()
        for i, guard in enumerate(scalars.guards):
            key = (id(guard.node), guard.value)
            if key in seen:
                continue
            seen.add(key)
            test = emit(guard.node)
            env[f"g{i}"] = guard.value
            lines.append(f"    if {test} != g{i}: fail({i}, {test})")
        results = [emit(n) for n in self.outputs]
        updates = [(leaf, emit(n)) for leaf, n in scalars.updates]
        writes = [emit(n) for _, n in scalars.writebacks]
        for i, (leaf, name) in enumerate(updates):
            env[f"u{i}"] = leaf.write
            lines.append(f"    u{i}({name})")
        for i, name in enumerate(writes):
            env[f"w{i}"] = scalars.writebacks[i][0]
            lines.append(f"    w{i}({name})")
        lines.append(f"    return ({', '.join(results)}{',' if results else ''})")
        source = "\n".join(lines)
        exec(compile(source, "<host step>", "exec"), env)
        self._step, self.source_code = env["step"], source

    def _used_leaves(self) -> set:
        """The leaves that something depends on."""
        scalars = self.scalars
        stack = [*self.outputs, *(g.node for g in scalars.guards)]
        stack += [n for _, n in scalars.updates] + [n for _, n in scalars.writebacks]
        for event in scalars.events:
            if event[0] == "write":
                stack += [event[2]] if isinstance(event[2], ScalarNode) else event[2]
        leaves, seen = set(), set()
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.op == "leaf":
                leaves.add(node.args[0])
            stack += [a for a in node.args if isinstance(a, ScalarNode)]
        return leaves

    def run(self) -> None:
        now = self._step(True)
        if now != self._last:
            self._last = now
            self.values[: len(now)] = now

    def _guard_failed(self, i, value):
        guard = self.scalars.guards[i]
        raise FrozenValueError(
            f"{guard.how} on {self.scalars.source(guard.node)} gave {guard.value!r} when the step was captured and "
            f"gives {value!r} now, so the captured graph is no longer the step's.",
            "keep the number out of Python control flow inside the step, or decide before the first step",
            guard.site,
        )


class _Counter:
    """The tensors of one counter leaf, in one buffer, so that one write updates them all.

    Another captured step with the same optimizer may move them to a buffer of its own; that is noticed by address.
    """

    def __init__(self, leaf: Leaf, tensors: list[torch.Tensor]):
        self.leaf, self.tensors = leaf, tensors
        self.convert = float if tensors[0].dtype.is_floating_point else int
        self._gather()

    def _gather(self):
        first = self.tensors[0]
        base, size = first.storage_offset(), len(self.tensors)
        together = all(
            t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and t.storage_offset() == base + i
            for i, t in enumerate(self.tensors)
        )
        if not together:
            buffer = torch.stack([t.detach().reshape(()) for t in self.tensors])
            for i, t in enumerate(self.tensors):
                t.set_(buffer.untyped_storage(), i, t.shape, t.stride())
        self.address = first.data_ptr()
        self.array = first.detach().as_strided((size,), (1,)).numpy()

    def read(self):
        if self.tensors[0].data_ptr() != self.address:
            self._gather()
        value = self.array[0]
        if self.array.shape[0] > 1 and (self.array != value).any():
            raise FrozenValueError(
                f"The step counters {self.leaf.label} had one value when the step was captured and differ now.",
                "do not change optimizer state between steps, or start a new DataExecutor after changing it",
            )
        return self.convert(value)

    def write(self, value):
        self.array[...] = value


def coalesce(counters: dict[Leaf, list[torch.Tensor]]) -> None:
    """Gives each counter leaf its `read` and `write`."""
    for leaf, tensors in counters.items():
        with torch.no_grad():
            counter = _Counter(leaf, tensors)
        leaf.read, leaf.write = counter.read, counter.write


def as_number(value) -> bool:
    """True for a Python float or int that may be lifted (bools are flags, not numbers)."""
    return type(value) is float or type(value) is int or isinstance(value, np.floating)
