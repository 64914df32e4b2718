"""The named passes from a recorded graph to a functional one, and from there to what the compiler takes."""

import torch
from torch import fx

from . import device as dev
from .capture import Recorder
from .tensor import Cell, CsxTensor, aten, fake_mode, map_tensors

PASSES = ("functionalize", "eliminate_dead_code")


def _fresh(node: fx.Node) -> CsxTensor:
    """A new csx tensor with the metadata of a placeholder."""
    val = node.meta["val"]
    with fake_mode:
        fake = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=dev.execution_device())
    return CsxTensor(Cell(fake=fake, status="pending", name=node.name), label=dev.execution_device())


def replay(graph: fx.Graph, values: dict[fx.Node, object], override=None):
    """Interprets a graph; `values` gives the placeholders. Returns the output node's structure.

    `override(node, args, kwargs)` may return a result in place of the operation's, or NotImplemented.
    """
    env = dict(values)

    def look(a):
        return fx.map_arg(a, lambda n: env[n])

    last_use = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = look(node.args), look(node.kwargs)
            out = NotImplemented if override is None else override(node, args, kwargs)
            env[node] = node.target(*args, **kwargs) if out is NotImplemented else out
        elif node.op == "output":
            return look(node.args[0])
        for dead in last_use.get(node, ()):
            del env[dead]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    seen, uses = set(), {}
    for node in reversed(graph.nodes):
        for n in node.all_input_nodes:
            if n not in seen:
                seen.add(n)
                uses.setdefault(node, []).append(n)
    return uses


def rerecord(graph: fx.Graph, scalars, transform, override=None, prepare=None) -> tuple[Recorder, object]:
    """Records `transform(function of the graph)` on fresh inputs: the way every pass rebuilds a graph."""
    recorder = Recorder(scalars, verbatim=True)
    if prepare is not None:
        prepare(recorder)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    tensors, fixed = [], {}
    for node in placeholders:
        if node.meta["kind"] == "scalar":
            recorder.scalar(node.meta["scalar"])
            fixed[node] = scalars.sym(node.meta["scalar"])
        else:
            fresh = _fresh(node)
            made = recorder.add_input(node.name, node.meta["kind"], fresh._cell)
            made.meta["at"] = node.meta["at"]
            tensors.append((node, fresh))

    def annotated(node, args, kwargs):
        recorder.origin = node
        return NotImplemented if override is None else override(node, args, kwargs)

    def function(*inputs):
        return replay(graph, fixed | dict(zip((n for n, _ in tensors), inputs)), annotated)

    with recorder, torch.no_grad():
        outputs = transform(function)(*(t for _, t in tensors))
        result = map_tensors(lambda t: recorder.node_of(t), outputs)
    _placeholders_first(recorder.graph)
    return recorder, result


def _placeholders_first(graph: fx.Graph) -> None:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    body = next((n for n in graph.nodes if n.op != "placeholder"), None)
    if body is not None:
        for n in placeholders:
            body.prepend(n)


def _keep_strides_of_draws(recorder: Recorder) -> None:
    """bernoulli_ fills in the order of its strides; the functional form, always contiguous, would draw another mask."""

    def rule(in_place):
        def draw(x, *args, **kwargs):
            val = recorder.origin.meta["val"]
            if not isinstance(val, torch.Tensor) or val.is_contiguous() or val.shape != x.shape:
                return NotImplemented
            memory = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=dev.execution_device())
            in_place(memory, *args)
            recorder.nodes[memory._cell] = recorder.last_node()
            return memory

        return draw

    recorder.decompositions[aten.bernoulli.p] = rule(aten.bernoulli_.float)
    recorder.decompositions[aten.bernoulli.Tensor] = rule(aten.bernoulli_.Tensor)


def functionalize(graph: fx.Graph, scalars) -> tuple[fx.Graph, list[fx.Node], dict[fx.Node, fx.Node]]:
    """Removes mutation: returns the functional graph, its outputs, and {placeholder: node of its new value}."""
    recorder, outputs = rerecord(
        graph, scalars, lambda f: torch.func.functionalize(f, remove="mutations"), prepare=_keep_strides_of_draws
    )
    updates = {}
    for node in list(recorder.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            target, value = node.args[0], node.args[1]
            node.replace_all_uses_with(value)
            recorder.graph.erase_node(node)
            if value is not target:
                updates[target] = value
    return recorder.graph, list(outputs), updates


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Drops what nothing uses; random operations stay, so that the generator is advanced as in eager PyTorch."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            tags = getattr(node.target, "tags", ())
            if (
                torch.Tag.nondeterministic_seeded in tags
                or getattr(node.target, "_schema", None) is not None
                and node.target._schema.is_mutable
            ):
                continue
            graph.erase_node(node)
