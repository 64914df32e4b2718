"""One traced step on CSX: captured at its first call, run as a program from then on.

Notes:
1. The arguments of the traced function are flattened; tensors are inputs of the program, numbers are lifted, the rest
   must stay the same from call to call.
2. Gradients that are still there at the end of the body are state: the program adds to them, as eager PyTorch would.
3. A tensor attribute or buffer that the body *rebinds* (`self.ema = 0.9 * self.ema + x`) is written back to the tensor
   that it was, so it stays state.
"""

import contextlib
import logging
import types
import warnings
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from . import closures as closures_module
from . import device as dev
from . import tensor as tensor_module
from .capture import Recorder, recording
from .closures import FETCHED, Number, Output, map_leaves
from .compiler import CompileResult, compile_program
from .errors import BatchMismatchError, FrozenValueError, GraphChangedError, Site, StaticGraphError
from .lifting import Lifter
from .passes import _placeholders_first, eliminate_dead_code, functionalize
from .program import StepProgram, spec_of
from .scalars import HostProgram, Scalars, as_number
from .surroundings import FrozenNames, Rebinding
from .tensor import Cell, CsxTensor, aten

logger = logging.getLogger("cerebras.pytorch")


@dataclass
class _Leaf:
    """One leaf of the call arguments, as it was at capture."""

    path: str
    kind: str  # "tensor", "number" or "object"
    value: object
    shape: tuple = ()
    dtype: torch.dtype | None = None


@dataclass(eq=False)
class _Gradient:
    """The gradient of one leaf that the step uses.

    Attributes:
        before, after: `param.grad` when the body started and when it ended.
        used: the graph reads or writes the tensor `before`.
        accumulated: the body's backward reached the leaf.
    """

    param: torch.Tensor
    before: CsxTensor | None
    after: CsxTensor | None
    used: bool
    accumulated: bool


class CapturedStep:
    """The result of one capture: a program, its host side, and where its inputs live."""

    def __init__(self, fn, name: str, args: tuple, kwargs: dict, modules: list):
        self.fn, self.name, self.modules = fn, name, modules
        self.site = _definition_site(fn)
        self._numbers: list = []
        self._capture(args, kwargs)
        self.compiled: CompileResult | None = None
        self._epoch = self._activity = -1
        self.modes = [(m, m.training) for m in modules]
        self._consumes_gradients = any(g.used and g.before is not g.after for g in self.gradients)

    # capture
    def _capture(self, args, kwargs):
        """Runs the body; again where that shows that it carries gradients over or rebinds state. See notes 2 and 3."""
        self.kept_gradients: list[tuple] = []
        owned: set = set()
        while True:
            recorder, lifter, rebinding, result, queue = self._run_body(args, kwargs)
            carried = [
                p
                for key, (p, before) in recorder.leaves.items()
                if before is None and key in recorder.accumulated and key not in recorder.zeroed and _pending(p.grad)
            ]
            rebound = rebinding.rebound()
            again = bool(carried) or any((id(s.space), s.key) not in owned for s in rebound)
            if not again:
                break
            lifter.undo()
            rebinding.restore()
            recorder.restore_gradients()
            rebinding.own(rebound, owned)
            for p in carried:
                zeros = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=dev.execution_device()).zero_()
                p.grad = CsxTensor(Cell(real=zeros, name=_grad_name(p)))
        self.optimizers = lifter.optimizers
        self._optimizer_states = [o.state for o in self.optimizers]
        try:
            with torch.no_grad():
                outputs = self._outputs(recorder, result, queue)
                rebinding.settle(recorder)
                self._settle_gradients(recorder)
            lifter.counters.finish()
            self.frozen.settle()
            self._finish(recorder, outputs, lifter)
        except Exception:
            lifter.undo()
            rebinding.restore()
            recorder.restore_gradients()
            raise

    def _settle_gradients(self, recorder) -> None:
        """Decides what becomes of each gradient at the end of the step."""
        self.gradients: list[_Gradient] = []
        for key, (p, before) in recorder.leaves.items():
            now = p.grad
            cell = before._cell if isinstance(before, CsxTensor) else None
            used = cell is not None and cell in recorder.nodes and cell.status != "released"
            if _pending(now) and used:
                node = recorder.graph.call_function(aten.copy_.default, (recorder.nodes[cell], recorder.node_of(now)))
                node.meta.update(recorder.nodes[now._cell].meta)
                p.grad = now = before
            elif _pending(now):
                now._cell.status, now._cell.real = "released", None
                now._cell.name = now._cell.name or _grad_name(p)
            if before is not None or now is not None:
                self.gradients.append(_Gradient(p, before, now, used, key in recorder.accumulated))
            else:
                self.gradients.append(_Gradient(p, None, None, False, key in recorder.accumulated))

    def _run_body(self, args, kwargs):
        scalars = Scalars()
        recorder = Recorder(scalars)
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        paths = _leaf_paths((args, kwargs), self.fn)
        self.leaves: list[_Leaf] = []
        self._numbers.clear()
        traced = [self._add_leaf(recorder, i, paths[i], leaf) for i, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(traced, self.spec)
        _name_state(self.modules)
        rebinding = Rebinding(self.fn, args, self.modules)
        self.frozen = FrozenNames(self.fn, self.modules, args)
        lifter = Lifter(recorder, rebinding)
        queue: list = []
        closures_module.recorded = queue
        try:
            with recording(recorder), lifter.installed(), _module_paths(recorder, self.modules), _no_cudnn():
                result = self.fn(*args, **kwargs)
        except BaseException:
            lifter.undo()
            rebinding.restore()
            recorder.restore_gradients()
            raise
        finally:
            closures_module.recorded = None
            recorder.remove_hooks()
        return recorder, lifter, rebinding, result, queue

    def _add_leaf(self, recorder, i, path, leaf):
        if isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, CsxTensor):
                leaf = tensor_module.wrap(leaf.to(dev.execution_device()), leaf.requires_grad)
            self.leaves.append(_Leaf(path, "tensor", None, tuple(leaf.shape), leaf.dtype))
            if leaf._cell not in recorder.nodes:
                recorder.add_input(path, "argument", leaf._cell, i)
            return leaf
        if as_number(leaf):
            position = len(self._numbers)
            self._numbers.append(leaf)
            self.leaves.append(_Leaf(path, "number", position))
            node = recorder.scalars.leaf(path, leaf, lambda p=position: self._numbers[p])
            return recorder.scalars.sym(node)
        self.leaves.append(_Leaf(path, "object", leaf))
        return leaf

    def _outputs(self, recorder, result, queue):
        """Splits what the body returned and passed to closures into fetched tensors, state, numbers and constants."""
        fetched: list[Cell] = []
        self._extra_numbers = []
        scalars = recorder.scalars

        def fetch(value, what):
            if isinstance(value, CsxTensor):
                cell = value._cell
                if cell.status != "pending" and recorder.nodes.get(cell) is None or _is_state(recorder, cell):
                    return value
                if cell not in fetched:
                    recorder.node_of(value)
                    fetched.append(cell)
                return Output(fetched.index(cell))
            node = scalars.of(value)
            if node is not None:
                if node not in self._extra_numbers:
                    self._extra_numbers.append(node)
                return Number(self._extra_numbers.index(node), node.kind is int)
            if isinstance(value, torch.Tensor) and what == "returned":
                return value
            return value

        leaves, self.result_spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, int, float, bool, str, type(None))) and scalars.of(leaf) is None:
                hint = (
                    "return the model's outputs, not the module"
                    if isinstance(leaf, torch.nn.Module)
                    else ("return tensors, numbers, strings or None, nested in lists, tuples and dicts")
                )
                raise StaticGraphError(
                    f"The traced step {self.name!r} returned an object of type {type(leaf).__name__}.", hint, self.site
                )
        self.result = [fetch(leaf, "returned") for leaf in leaves]
        self.closures = [
            (
                fn,
                tuple(map_leaves(lambda v: fetch(v, "closure"), a) for a in args),
                {k: map_leaves(lambda v: fetch(v, "closure"), v) for k, v in kwargs.items()},
                checkpoint,
            )
            for fn, args, kwargs, checkpoint in queue
        ]
        return fetched

    def _finish(self, recorder, outputs, lifter):
        graph, scalars = recorder.graph, recorder.scalars
        graph.output(tuple(recorder.nodes[c] for c in outputs))
        _placeholders_first(graph)
        by_name = {i.node.name: i for i in recorder.inputs}
        functional, fetched, updates = functionalize(graph, scalars)
        placeholders = [n for n in functional.nodes if n.op == "placeholder" and n.meta["kind"] != "scalar"]
        functional.output((*fetched, *updates.values()))
        eliminate_dead_code(functional)
        updated_nodes = set(updates)
        for node in list(placeholders):
            if not node.users and node not in updated_nodes and node.meta["kind"] != "argument":
                functional.erase_node(node)
                placeholders.remove(node)
        for node in [n for n in functional.nodes if n.op == "placeholder" and n.meta["kind"] == "scalar"]:
            if not node.users:
                functional.erase_node(node)
        symbols = [n.meta["scalar"] for n in functional.nodes if n.op == "placeholder" and n.meta["kind"] == "scalar"]
        self._inputs = [by_name[n.name] for n in placeholders]
        position = {n: i for i, n in enumerate(placeholders)}
        numbering: dict = {}
        self.program = StepProgram(
            graph=functional,
            inputs=[spec_of(i.cell.name or i.name, i.kind, n.meta["val"]) for i, n in zip(self._inputs, placeholders)],
            scalar_expressions=[scalars.structure(s, numbering) for s in symbols],
            scalar_labels=[scalars.source(s) for s in symbols],
            updated=[position[n] for n in updates],
            outputs=[spec_of(f"output_{i}", "output", c.fake) for i, c in enumerate(outputs)],
            constants={k: i.cell.real for k, i in enumerate(self._inputs) if i.kind == "constant"},
            scalars=scalars,
            name=self.name,
            notes=lifter.notes,
        )
        self.num_scalars = len(symbols)
        self.host = HostProgram(scalars, symbols + self._extra_numbers)
        self._output_cells = outputs
        self._check_aliases()
        if not updates and not outputs:
            raise StaticGraphError(
                f"The traced step {self.name!r} has no effect: it returns no tensor, passes none to a closure and "
                "updates no state.",
                "return the loss, or call optimizer.step() inside the traced function",
                self.site,
            )
        if not outputs:
            warnings.warn(
                f"Nothing is fetched from the traced step {self.name!r} ({self.site}): it returns no tensor and passes "
                "none to a step closure. Its state is still updated. Return the loss to see it.",
                stacklevel=4,
            )

    def _check_aliases(self):
        """Two different state inputs over the same memory, one of them written, have no functional form."""
        updated, owners = set(self.program.updated), {}
        for i, item in enumerate(self._inputs):
            real = item.cell.real
            if item.kind == "constant" or real is None or real.numel() == 0:
                continue
            pointer = real.untyped_storage().data_ptr()
            other = owners.setdefault(pointer, i)
            if other != i and (i in updated or other in updated):
                a, b = self.program.inputs[other].name, self.program.inputs[i].name
                raise StaticGraphError(
                    f"The state tensors {a!r} and {b!r} share memory, and the step writes one of them.",
                    "use one of them inside the step and take views of it there",
                    self.site,
                )

    # running
    def compile(self, compiler: str, compile_dir) -> CompileResult:
        self.compiled = compile_program(self.program, compiler, compile_dir)
        return self.compiled

    def bind(self) -> None:
        """Builds the list of inputs; again whenever state was bound to other tensors."""
        self._follow_optimizers()
        self._template, self._arguments = [], []
        for i, item in enumerate(self._inputs):
            if item.kind == "argument":
                self._arguments.append((i, item.path))
                self._template.append(None)
            else:
                while item.cell.successor is not None:
                    item.cell = item.cell.successor
                real = tensor_module.resolve(item.cell)
                self._template.append(real if item.kind != "host" else real.to(dev.execution_device()))
        self._numbers_move = bool(self.num_scalars) and dev.execution_device().type != "cpu"
        if self.num_scalars:
            self._template.append(self.host.tensor[: self.num_scalars])
        self._epoch = tensor_module.epoch()

    def _follow_optimizers(self):
        """After optimizer.load_state_dict the state's tensors are others: follow them by parameter and key."""
        for position, optimizer in enumerate(self.optimizers):
            before = self._optimizer_states[position]
            if optimizer.state is before:
                continue
            moved = {}
            for p, entries in before.items():
                for key, value in entries.items():
                    now = optimizer.state.get(p, {}).get(key)
                    if isinstance(value, CsxTensor) and isinstance(now, torch.Tensor):
                        moved[value._cell] = now.to(dev.csx(), value.dtype)
                        optimizer.state[p][key] = moved[value._cell]
                    elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                        with torch.no_grad():
                            value.copy_(now)
                        optimizer.state[p][key] = value
            for item in self._inputs:
                if item.cell in moved:
                    item.cell = moved[item.cell]._cell
            self._optimizer_states[position] = optimizer.state

    def stale(self) -> bool:
        if self._epoch != tensor_module.epoch():
            return True
        for optimizer, state in zip(self.optimizers, self._optimizer_states):
            if optimizer.state is not state:
                return True
        return False

    def check_arguments(self, leaves, spec) -> None:
        """Raises where the call differs from the one that was captured."""
        if spec != self.spec:
            raise BatchMismatchError(
                f"The arguments of the traced step {self.name!r} have another structure than at its first call:\n"
                f"    first: {self.spec}\n    now:   {spec}",
                "keep one structure for all batches",
            )
        for leaf, expected in zip(leaves, self.leaves):
            if expected.kind == "tensor":
                if (
                    not isinstance(leaf, torch.Tensor)
                    or leaf.shape != expected.shape
                    or leaf.dtype is not expected.dtype
                ):
                    found = (
                        f"{tuple(leaf.shape)}, {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                    )
                    raise BatchMismatchError(
                        f"{expected.path} of the traced step {self.name!r} has shape {expected.shape}, "
                        f"{expected.dtype} in the captured graph, and {found} in this call.",
                        "keep shapes static: drop_last=True for the last batch of an epoch, pad sequences to one length",
                    )
            elif expected.kind == "number":
                if not as_number(leaf):
                    raise BatchMismatchError(
                        f"{expected.path} of the traced step {self.name!r} was a number and is "
                        f"{type(leaf).__name__} now.",
                        "keep one type for every argument",
                    )
                self._numbers[expected.value] = leaf
            elif leaf is not expected.value and not _same(leaf, expected.value):
                raise FrozenValueError(
                    f"{expected.path} of the traced step {self.name!r} was {expected.value!r} when the step was "
                    f"captured and is {leaf!r} now; the graph holds the first value.",
                    "pass what changes as a tensor or a number",
                )

    def run(self, leaves, first: bool):
        """One step. Returns the fetched tensors."""
        if self.stale():
            self.bind()
        if not first:
            self.frozen.check(self.name)
            self.host.run()
            moved = self._consumes_gradients or self._activity != tensor_module.activity()
            if moved:
                self._take_gradients()
        inputs = self._template.copy()
        for i, path in self._arguments:
            leaf = leaves[path]
            real = leaf._cell.real if isinstance(leaf, CsxTensor) else leaf
            if real is None:
                real = tensor_module.resolve(leaf._cell)
            inputs[i] = real
        if self._numbers_move:
            inputs[-1] = inputs[-1].to(dev.execution_device())
        fetched = self.compiled.call(inputs)
        if not first and moved:
            self._leave_gradients()
        self._activity = tensor_module.activity()
        return fetched

    def in_mode(self) -> bool:
        """Whether its modules train, or not, as they did when the step was captured."""
        for module, training in self.modes:
            if module.training is not training:
                return False
        return True

    def applicable(self) -> bool:
        """False where a gradient is there that was not when the step was captured, or the other way round."""
        if self._activity == tensor_module.activity():
            return True
        for g in self.gradients:
            now = g.param.grad
            if g.used and now is None and not g.accumulated:
                return False
            if g.before is None and now is not None and now._cell.status != "released":
                return False
        return True

    def _take_gradients(self) -> None:
        for g in self.gradients:
            now = g.param.grad
            if g.used and now is not g.before:
                if now is None:
                    g.before._cell.real.zero_()
                else:
                    g.before._cell.real.copy_(tensor_module.resolve(now._cell))
                g.param.grad = g.before

    def _leave_gradients(self) -> None:
        for g in self.gradients:
            if g.param.grad is not g.after:
                g.param.grad = g.after

    def results(self, fetched):
        """What the traced function returns in this iteration, and the cells that become readable at its end."""
        cells = []
        for value in fetched:
            cell = Cell(real=value, status="pending", op=FETCHED)
            cells.append(cell)
        tensors = [CsxTensor(c) for c in cells]

        def fill(value):
            if isinstance(value, Output):
                return tensors[value.index]
            if isinstance(value, Number):
                number = float(self.host.values[self.num_scalars + value.index])
                return int(number) if value.integer else number
            return value

        returned = pytree.tree_unflatten([fill(v) for v in self.result], self.result_spec)
        queued = [
            (fn, tuple(map_leaves(fill, a) for a in args), {k: map_leaves(fill, v) for k, v in kwargs.items()}, ck)
            for fn, args, kwargs, ck in self.closures
        ]
        return returned, queued, cells

    def pending_results(self):
        """The same without values (validate_only, compile_only): what is returned, and its cells."""
        cells = [Cell(fake=c.fake, status="pending", op=c.op, made_at=c.made_at) for c in self._output_cells]
        tensors = [CsxTensor(c) for c in cells]
        returned = pytree.tree_unflatten(
            [
                tensors[v.index]
                if isinstance(v, Output)
                else self.host.values[self.num_scalars + v.index].item()
                if isinstance(v, Number)
                else v
                for v in self.result
            ],
            self.result_spec,
        )
        return returned, cells

    def compare(self, other: "CapturedStep") -> None:
        difference = self.program.difference(other.program)
        if difference is not None:
            raise GraphChangedError(
                f"The traced step {self.name!r} captures another graph in this iteration: {difference}",
                "make the step's Python code the same in every iteration",
                self.site,
            )


def _pending(value) -> bool:
    return isinstance(value, CsxTensor) and value._cell.status == "pending"


def _grad_name(param) -> str | None:
    return f"{param._cell.name}.grad" if param._cell.name else None


def _is_state(recorder, cell) -> bool:
    node = recorder.nodes.get(cell)
    return node is not None and node.op == "placeholder" and node.meta["kind"] in ("state", "host")


def _same(a, b) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def _definition_site(fn) -> Site | None:
    code = getattr(getattr(fn, "__wrapped__", fn), "__code__", None)
    return Site(code.co_filename, code.co_firstlineno, code.co_name) if code else None


def _leaf_paths(tree, fn) -> list[str]:
    """Names of the call's leaves: parameter names of the function, then keys."""
    code = getattr(fn, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    offset = 1 if isinstance(fn, types.MethodType) else 0
    paths = []
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        section, *rest = path
        if section.idx == 0 and rest:
            index = rest[0].idx + offset
            name = names[index] if index < len(names) else f"args[{rest[0].idx}]"
            paths.append(name + pytree.keystr(tuple(rest[1:])))
        else:
            paths.append(pytree.keystr(tuple(rest)).strip("[]'") if rest else "arguments")
    return paths


def _name_state(modules) -> None:
    for number, module in enumerate(modules):
        prefix = "" if number == 0 else f"model{number + 1}."
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            if isinstance(t, CsxTensor) and t._cell.name is None:
                t._cell.name = prefix + name


@contextlib.contextmanager
def _module_paths(recorder, modules):
    """Notes for every operation in which module's forward it ran."""
    names = {}
    for module in modules:
        for name, sub in module.named_modules():
            names.setdefault(sub, name or type(sub).__name__)

    def enter(module, args):
        recorder.module_stack.append(names.get(module, type(module).__name__))

    def leave(module, args, output):
        if recorder.module_stack:
            recorder.module_stack.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _no_cudnn():
    """On CUDA, torch's own batch norm: cuDNN's writes its statistics behind the graph's back."""
    if dev.execution_device().type == "cuda":
        return torch.backends.cudnn.flags(enabled=False)
    return contextlib.nullcontext()
