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
from .closures import Number, Output, map_leaves
from .compiler import CompileResult, compile_program
from .errors import BatchMismatchError, FrozenValueError, GraphChangedError, Site, StaticGraphError
from .lifting import Lifter
from .passes import _placeholders_first, eliminate_dead_code, functionalize
from .program import StepProgram, spec_of
from .scalars import HostProgram, Scalars, as_number
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


class CapturedStep:
    """The result of one capture: a program, its host side, and where its inputs live."""

    def __init__(self, fn, name: str, args: tuple, kwargs: dict, modules: list):
        self.fn, self.name, self.modules = fn, name, modules
        self.site = _definition_site(fn)
        self._numbers: list = []
        self._capture(args, kwargs)
        self.compiled: CompileResult | None = None
        self._epoch = -1

    # capture
    def _capture(self, args, kwargs):
        """Runs the body once, or twice where the first run shows that gradients are carried over; see note 2."""
        self.kept_gradients: list[tuple] = []
        while True:
            recorder, lifter, rebinding, result, queue = self._run_body(args, kwargs)
            carried = [
                p
                for key, p in recorder.born_gradients.items()
                if isinstance(p.grad, CsxTensor) and p.grad._cell.status == "pending" and key not in lifter.zeroed
            ]
            if not carried:
                break
            lifter.undo()
            rebinding.restore()
            for p in carried:
                zeros = torch.empty_strided(p.shape, p.stride(), dtype=p.grad.dtype, device=dev.execution_device()).zero_()
                cell = Cell(real=zeros, name=_grad_name(p))
                p.grad = CsxTensor(cell)
                self.kept_gradients.append((p, p.grad, cell))
        self.optimizers = lifter.optimizers
        self._optimizer_states = [o.state for o in self.optimizers]
        with torch.no_grad():
            outputs = self._outputs(recorder, result, queue)
            rebinding.settle(recorder)
        self.kept_gradients = [(p, g, c) for p, g, c in self.kept_gradients if p.grad is g]
        lifter.counters.finish()
        self._finish(recorder, outputs, lifter)

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
        rebinding = _Rebinding(self.fn, args, self.modules)
        self.frozen = _FrozenNames(self.fn)
        lifter = Lifter(recorder)
        queue: list = []
        closures_module.recorded = queue
        try:
            with recording(recorder), lifter.installed(), _module_paths(recorder, self.modules), _no_cudnn():
                result = self.fn(*args, **kwargs)
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
                hint = "return the model's outputs, not the module" if isinstance(leaf, torch.nn.Module) else (
                    "return tensors, numbers, strings or None, nested in lists, tuples and dicts"
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
            inputs=[
                spec_of(i.cell.name or i.name, i.kind, n.meta["val"]) for i, n in zip(self._inputs, placeholders)
            ],
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
                real = tensor_module.resolve(item.cell)
                self._template.append(real if item.kind != "host" else real.to(dev.execution_device()))
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
                        moved[value._cell] = now if isinstance(now, CsxTensor) else now.to(dev.csx())
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
                if not isinstance(leaf, torch.Tensor) or leaf.shape != expected.shape or leaf.dtype is not expected.dtype:
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
        if not first:
            self.frozen.check(self.name)
            self.host.run()
        if self.stale():
            self.bind()
        for param, grad, cell in self.kept_gradients:
            if param.grad is not grad:
                if param.grad is None:
                    cell.real.zero_()
                else:
                    cell.real.copy_(tensor_module.resolve(param.grad._cell))
                param.grad = grad
        inputs = self._template.copy()
        for i, path in self._arguments:
            leaf = leaves[path]
            real = leaf._cell.real if isinstance(leaf, CsxTensor) else leaf
            if real is None:
                real = tensor_module.resolve(leaf._cell)
            inputs[i] = real
        return self.compiled.call(inputs)

    def results(self, fetched):
        """What the traced function returns in this iteration, and the cells that become readable at its end."""
        cells = []
        for value in fetched:
            cell = Cell(real=value, status="pending", op="the captured step")
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
        """The same without values (validate_only, compile_only)."""
        cells = [Cell(fake=c.fake, status="pending", op=c.op, made_at=c.made_at) for c in self._output_cells]
        tensors = [CsxTensor(c) for c in cells]
        return pytree.tree_unflatten(
            [
                tensors[v.index] if isinstance(v, Output)
                else self.host.values[self.num_scalars + v.index].item() if isinstance(v, Number)
                else v
                for v in self.result
            ],
            self.result_spec,
        )

    def compare(self, other: "CapturedStep") -> None:
        difference = self.program.difference(other.program)
        if difference is not None:
            raise GraphChangedError(
                f"The traced step {self.name!r} captures another graph in this iteration: {difference}",
                "make the step's Python code the same in every iteration",
                self.site,
            )


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


class _Rebinding:
    """Tensors that the body rebinds by name; see note 3."""

    def __init__(self, fn, args, modules):
        self.slots = []
        seen = set()
        holders = list(modules)
        function = getattr(fn, "__func__", fn)
        if isinstance(fn, types.MethodType):
            holders.append(fn.__self__)
        holders += [a for a in args if hasattr(a, "__dict__")]
        closure = getattr(function, "__closure__", None) or ()
        code = getattr(function, "__code__", None)
        for name, cell in zip(code.co_freevars if code else (), closure):
            with contextlib.suppress(ValueError):
                value = cell.cell_contents
                if isinstance(value, CsxTensor):
                    self.slots.append((name, lambda c=cell: c.cell_contents, lambda v, c=cell: setattr(c, "cell_contents", v), value))
                elif hasattr(value, "__dict__"):
                    holders.append(value)
        space = getattr(function, "__globals__", {})
        for name in code.co_names if code else ():
            value = space.get(name)
            if isinstance(value, CsxTensor):
                self._dict(space, name, name)
            elif isinstance(value, torch.nn.Module):
                holders.append(value)
        for holder in holders:
            for name, sub in holder.named_modules() if isinstance(holder, torch.nn.Module) else [("", holder)]:
                if id(sub) in seen or isinstance(sub, (type, types.ModuleType, torch.Tensor)):
                    continue
                seen.add(id(sub))
                spaces = [vars(sub)] if hasattr(sub, "__dict__") else []
                if isinstance(sub, torch.nn.Module):
                    spaces += [sub._buffers, sub._parameters]
                for space in spaces:
                    for key in list(space):
                        if isinstance(space[key], CsxTensor):
                            self._dict(space, key, f"{name or type(sub).__name__}.{key}")
                self._before = getattr(self, "_before", [])
                self._before.append((sub, name or type(sub).__name__, {k for s in spaces for k, v in s.items()
                                                                     if isinstance(v, CsxTensor)}, spaces))

    def _dict(self, space, key, label):
        self.slots.append((label, lambda: space.get(key), lambda v: space.__setitem__(key, v), space[key]))

    def restore(self):
        for _, get, put, old in self.slots:
            if get() is not old:
                put(old)

    def settle(self, recorder):
        for label, get, put, old in self.slots:
            now = get()
            if now is old or not isinstance(now, CsxTensor) or now._cell is old._cell or now._cell.status != "pending":
                continue
            if now.shape != old.shape or now.dtype != old.dtype:
                raise StaticGraphError(
                    f"The step rebinds {label!r} from {tuple(old.shape)} {old.dtype} to {tuple(now.shape)} {now.dtype}.",
                    "keep state tensors at one shape and dtype",
                )
            target, value = recorder.node_of(old), recorder.node_of(now)
            node = recorder.graph.call_function(aten.copy_.default, (target, value))
            node.meta.update(value.meta)
            put(old)
        for _, label, names, spaces in getattr(self, "_before", []):
            for space in spaces:
                for key, value in space.items():
                    if isinstance(value, CsxTensor) and value._cell.status == "pending" and key not in names:
                        warnings.warn(
                            f"The traced step keeps a tensor it made in {label}.{key}; in later iterations it is not "
                            "updated and cannot be read. Create it as a buffer before the step, or return it.",
                            stacklevel=2,
                        )


class _FrozenNames:
    """Python numbers that the body reads from its closure or from globals: constants of the graph, so they must stay."""

    def __init__(self, fn):
        function = getattr(fn, "__func__", fn)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        self.watched = []
        code = getattr(function, "__code__", None)
        if code is None:
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):
                if _is_scalar(cell.cell_contents):
                    self.watched.append((name, cell, None, cell.cell_contents))
        for name in code.co_names:
            value = function.__globals__.get(name)
            if _is_scalar(value):
                self.watched.append((name, None, function.__globals__, value))
        self.site = Site(code.co_filename, code.co_firstlineno, code.co_name)

    def check(self, step_name):
        for name, cell, space, value in self.watched:
            now = cell.cell_contents if cell is not None else space.get(name)
            if now is not value and now != value:
                raise FrozenValueError(
                    f"The traced step {step_name!r} reads the Python variable {name!r}, which was {value!r} when the "
                    f"step was captured and is {now!r} now; the graph holds the first value.",
                    f"pass {name!r} to the traced function as an argument (numbers that are passed are not frozen), "
                    "or keep it in a tensor",
                    self.site,
                )


def _is_scalar(value) -> bool:
    return isinstance(value, (int, float, bool, str)) and not isinstance(value, type)
