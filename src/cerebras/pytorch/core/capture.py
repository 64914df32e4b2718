"""Capture: the body of a traced step runs once, and every aten operation below autograd goes into one FX graph.

Notes:
1. A tensor that was not made in the step is an input of the graph, whatever closure, global or attribute it came from:
   an *argument* (bound anew at each call), *state* (a csx tensor that lives on), or a *host* tensor (on the CPU, read
   at each step).
2. CPU tensors made in the step from Python values are computed at once and are constants. Everything random is
   recorded, on whatever device, since it must differ from step to step.
3. In-place operations and views are recorded as they are; `passes.functionalize` makes the graph functional.
"""

import contextlib
import functools
import operator
import weakref
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import device as dev
from . import tensor as tensor_module
from .errors import DynamicShapeError, Site, StaticGraphError, TensorReadError, user_location
from .randomness import DrawLog
from .scalars import ScalarNode, Scalars
from .tensor import _ALIASES, _MEND_READ, _READS, Cell, CsxTensor, aten, check_same_device, fake_mode, tensors_in

_SYM = (torch.SymFloat, torch.SymInt, torch.SymBool)


@dataclass(eq=False)
class GraphInput:
    """One tensor input of a graph under construction.

    Attributes:
        kind: "argument", "state", "host" or "constant".
        cell: where its value is.
        node: the placeholder.
        path: for arguments, the index among the flattened call arguments.
    """

    name: str
    kind: str
    cell: Cell
    node: fx.Node
    path: int | None = None


class _Calls(TorchFunctionMode):
    """Knows which torch function Python is calling, to tell a tensor that the user makes from one that an op makes."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        outer, self.recorder.calling = self.recorder.calling, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.recorder.calling = outer


class Recorder(TorchDispatchMode):
    """Writes the operations that run under it into `graph`.

    `verbatim` is for passes that record a graph again: everything is recorded, and all on one device.
    """

    def __init__(self, scalars: Scalars, verbatim: bool = False):
        super().__init__()
        self.verbatim = verbatim
        self.graph = fx.Graph()
        self.scalars = scalars
        self.inputs: list[GraphInput] = []
        self.nodes: dict[Cell, fx.Node] = {}
        self.scalar_nodes: dict[ScalarNode, fx.Node] = {}
        self.module_stack: list[str] = []
        self.phase = "forward"
        self.made: list[weakref.ref] = []
        self.decompositions: dict = {}
        self.leaves: dict[int, tuple] = {}  # id -> (leaf, its gradient when the body started)
        self.accumulated: set[int] = set()  # leaves that the body's backward reached
        self.zeroed: set[int] = set()  # leaves whose gradient the body dropped before its backward
        self._hooks: list = []
        self.origin: fx.Node | None = None  # the node that is recorded again
        self.draws = DrawLog()
        self._first_serial = next(tensor_module.serials)
        self.calling = None  # the torch function that Python is in
        self.host_ops = None  # lifting.HostCounters while a user's body runs
        self._constants: dict[int, torch.Tensor] = {}
        self._host: dict[int, CsxTensor] = {}
        self._embedded: dict[tuple[int, int], CsxTensor] = {}

    # inputs
    def add_input(self, name: str, kind: str, cell: Cell, path: int | None = None) -> fx.Node:
        node = self.graph.create_node("placeholder", _identifier(name))
        node.meta.update(val=cell.fake, kind=kind, at=None, module="", phase="input")
        self.nodes[cell] = node
        self.inputs.append(GraphInput(name, kind, cell, node, path))
        return node

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node of a tensor; one that is not known yet becomes an input."""
        if not isinstance(tensor, CsxTensor):
            tensor = self._from_cpu(tensor)
        cell = tensor._cell
        node = self.nodes.get(cell)
        if tensor.requires_grad and tensor.is_leaf and not self.verbatim:
            argument = node is not None and node.op == "placeholder" and node.meta["kind"] == "argument"
            if not argument and tensor._serial < self._first_serial:
                self._watch(tensor)
        if node is None:
            if cell.status == "released":
                raise tensor_module.released_error(cell)
            if cell.status == "pending":
                raise StaticGraphError(
                    f"The tensor {cell.describe()} was made by an earlier traced step of this iteration.",
                    "return it from that step and pass it to this one as an argument",
                )
            kind = "host" if tensor._label.type == "cpu" else "state"
            node = self.add_input(cell.name or f"{kind}_{len(self.inputs)}", kind, cell)
        return node

    def scalar(self, node: ScalarNode) -> fx.Node:
        """The placeholder of a lifted number."""
        found = self.scalar_nodes.get(node)
        if found is None:
            found = self.graph.create_node("placeholder", f"scalar_{len(self.scalar_nodes)}")
            found.meta.update(kind="scalar", scalar=node, val=node.hint, at=None, module="", phase="input")
            self.scalar_nodes[node] = found
        return found

    def _from_cpu(self, tensor: torch.Tensor) -> CsxTensor:
        key = id(tensor)
        if key in self._constants:
            key = (key, tensor._version)
            if key not in self._embedded:
                self._embedded[key] = self._embed(tensor)
            return self._embedded[key]
        if key not in self._host:
            cell = Cell(real=tensor.detach(), made_at=user_location())
            self._host[key] = CsxTensor(cell, label=torch.device("cpu"))
            self._constants_keepalive(tensor)
        return self._host[key]

    def _constants_keepalive(self, tensor):
        self._alive = getattr(self, "_alive", [])
        self._alive.append(tensor)

    def _embed(self, tensor: torch.Tensor) -> CsxTensor:
        if tensor.dim() == 0 and not tensor.is_complex():
            node = self.graph.call_function(
                aten.full.default,
                ((), tensor.item()),
                {"dtype": tensor.dtype, "device": dev.execution_device()},
            )
            with fake_mode:
                fake = torch.empty((), dtype=tensor.dtype, device=dev.execution_device())
            self._annotate(node, fake)
            cell = Cell(fake=fake, status="pending", op="a constant")
            self.nodes[cell] = node
        else:
            cell = Cell(real=tensor.detach().clone())
            self.add_input(f"constant_{len(self._embedded)}", "constant", cell)
        return CsxTensor(cell, label=torch.device("cpu"))

    def mark_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        self._constants[id(tensor)] = tensor
        return tensor

    # gradients
    def _watch(self, param: torch.Tensor) -> None:
        """Notes a leaf of the step and the gradient that it had."""
        if id(param) not in self.leaves:
            self.leaves[id(param)] = (param, tensor_module._GRAD.__get__(param))
            self._hooks.append(param.register_post_accumulate_grad_hook(self._accumulated))

    def _accumulated(self, param: torch.Tensor) -> None:
        self.accumulated.add(id(param))

    def sets_gradient(self, param: torch.Tensor, value) -> None:
        """The body assigns `param.grad`."""
        if param._serial >= self._first_serial:
            return
        self._watch(param)
        if value is None and id(param) not in self.accumulated:
            self.zeroed.add(id(param))

    def restore_gradients(self) -> None:
        """Takes back what the body did to gradients."""
        for param, grad in self.leaves.values():
            tensor_module._GRAD.__set__(param, grad)

    def set_data(self, target: CsxTensor, value: torch.Tensor) -> None:
        """`target.data = value` in the body: the new value is written into the tensor's memory."""
        if not isinstance(value, CsxTensor) or value._cell.status != "pending":
            raise StaticGraphError(
                "A tensor's .data is set to another tensor that lives on, inside a traced step: the two would share "
                "memory from then on.",
                "copy the value: target.copy_(value) under torch.no_grad()",
            )
        if value.shape != target.shape or value.dtype != target.dtype:
            raise StaticGraphError(
                f"A tensor's .data is set from {tuple(target.shape)} {target.dtype} to {tuple(value.shape)} "
                f"{value.dtype} inside a traced step.",
                "keep state tensors at one shape and dtype",
            )
        with torch.no_grad():
            aten.copy_.default(target.detach(), value.detach())

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    # recording
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # record_function markers
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        if func in _ALIASES:
            return self._alias(func, args[0])
        if func in self.decompositions:
            with self:
                out = self.decompositions[func](*args, **kwargs)
            if out is not NotImplemented:
                return out
        if self.host_ops is not None and self.host_ops.concerns(tensors):
            out = self.host_ops.run(func, args, kwargs)
            if out is not NotImplemented:
                return out
            args, kwargs = self.host_ops.as_tensors(self, args), kwargs
            tensors = tensors_in(args, kwargs)
        has_csx = any(isinstance(t, CsxTensor) for t in tensors)
        to_csx = dev.is_csx(kwargs.get("device"))
        random = torch.Tag.nondeterministic_seeded in func.tags
        symbolic = _has_symbol(args) or _has_symbol(kwargs.values())
        if symbolic and not self.verbatim:
            args, kwargs = self._pin_sizes(func, args, kwargs)
        if random and not self.verbatim:
            return self.draws.draw(self, func, args, lambda: self._record(func, args, kwargs, tensors, to_csx))
        if not (has_csx or to_csx or random or symbolic or self.verbatim):
            if not tensors and self.calling not in _constructors():
                # made by the operation itself, with the options of its input: on the input's device
                return self._record(func, args, kwargs, tensors, True)
            if all(id(t) in self._constants for t in tensors):
                out = func(*args, **kwargs)
                return tensor_module.map_tensors(self.mark_constant, out)
        return self._record(func, args, kwargs, tensors, to_csx)

    def _pin_sizes(self, func, args, kwargs):
        """Lifted numbers among sizes, dimensions and flags become constants under a guard: shapes are static."""
        by_name = {a.name: a for a in func._schema.arguments}

        def pinned(value, argument):
            kind = str(argument.type)
            if "int" not in kind.lower() and "bool" not in kind:
                return value
            if isinstance(value, (list, tuple)):
                return type(value)(pinned(v, argument) for v in value)
            if isinstance(value, _SYM):
                return self.scalars.pin(self.scalars.of(value), f"{func}({argument.name}=...)")
            return value

        return (
            tuple(pinned(v, a) for v, a in zip(args, func._schema.arguments)),
            {k: pinned(v, by_name[k]) for k, v in kwargs.items()},
        )

    def _alias(self, func, source):
        if isinstance(source, CsxTensor):
            return CsxTensor(source._cell, label=source._label)
        if func is aten.lift_fresh.default:
            return self.mark_constant(source)
        out = func(source)
        if id(source) in self._constants:
            return self.mark_constant(out)
        self._host[id(out)] = self._from_cpu(source)
        self._constants_keepalive(out)
        return out

    def _record(self, func, args, kwargs, tensors, to_csx):
        if func in _READS:
            subject = next((t for t in tensors if isinstance(t, CsxTensor)), None)
            text = subject._cell.describe() if subject is not None else f"of shape {tuple(tensors[0].shape)} on the CPU"
            raise TensorReadError(
                f"The value of the tensor {text} is read inside a traced step: the graph would freeze it.", _MEND_READ
            )
        if func is aten.native_batch_norm.default and args[5] and args[3] is not None:
            func = (
                aten._native_batch_norm_legit.default
            )  # the same kernel, which declares that it writes the statistics
        if not self.verbatim:
            check_same_device(func, tensors)
        if torch.Tag.inplace_view in func.tags:
            name = func._schema.name.removeprefix("aten::")
            fresh = isinstance(args[0], CsxTensor) and args[0]._cell.status == "pending"
            if fresh and getattr(self.calling, "__name__", name) != name and hasattr(aten, name.rstrip("_")):
                return self._reshape(getattr(getattr(aten, name.rstrip("_")), func._overloadname), args, kwargs, func)
            raise StaticGraphError(
                f"{func} changes a tensor's shape in place inside a traced step.", "use the out-of-place form"
            )
        if kwargs.get("generator") is not None:
            raise StaticGraphError(
                f"{func} draws from a generator of its own inside a traced step.",
                "leave `generator` out: the step draws from torch's default generator, in eager order",
            )
        device = kwargs.get("device")
        if func is aten._to_copy.default and device is not None and not to_csx and not self.verbatim:
            inner = torch._C._current_autograd_node() is not None  # autocast's cast back, not the user's move
            if isinstance(args[0], CsxTensor) and args[0]._label.type == dev.NAME and not inner:
                raise TensorReadError(
                    f"The tensor {args[0]._cell.describe()} is moved to {device} inside a traced step.", _MEND_READ
                )
        label = self._label(tensors, kwargs, to_csx, func)
        if func is aten.copy_.default and tensors[0].device.type == "cpu" and tensors[1].device.type == dev.NAME:
            raise TensorReadError(
                f"The tensor {tensors[1]._cell.describe()} is copied to a CPU tensor inside a traced step.", _MEND_READ
            )
        owners: dict[int, CsxTensor] = {}

        def to_node(value):
            if isinstance(value, torch.Tensor):
                return self.node_of(value)
            if isinstance(value, _SYM):
                return self.scalar(self.scalars.of(value))
            if isinstance(value, (list, tuple)):
                return [to_node(v) for v in value]
            return tensor_module.to_execution_device(value)

        def to_fake(value):
            if isinstance(value, torch.Tensor):
                owner = value if isinstance(value, CsxTensor) else self._from_cpu(value)
                fake = owner._cell.fake
                owners[id(fake)] = value
                return fake
            if isinstance(value, _SYM):
                return self.scalars.of(value).hint
            if isinstance(value, (list, tuple)):
                return [to_fake(v) for v in value]
            return tensor_module.to_execution_device(value)

        node_args = tuple(to_node(a) for a in args)
        node_kwargs = {k: to_node(v) for k, v in kwargs.items()}
        fake_args = [to_fake(a) for a in args]
        fake_kwargs = {k: to_fake(v) for k, v in kwargs.items()}
        try:
            with fake_mode:
                out = func(*fake_args, **fake_kwargs)
        except DynamicOutputShapeException:
            raise DynamicShapeError(
                f"{func} makes a tensor whose shape depends on the data; a static graph has none.",
                "use a form of fixed shape: torch.where or a mask instead of boolean indexing and nonzero, "
                "one_hot(...).sum(0) instead of bincount",
            ) from None
        except DataDependentOutputException:
            text = next((f" {t._cell.describe()}" for t in tensors if isinstance(t, CsxTensor)), "")
            raise TensorReadError(
                f"{func} reads the value of the tensor{text} inside a traced step.", _MEND_READ
            ) from None
        if not _has_tensor(out) and not func._schema.is_mutable:
            return out
        node = self.graph.call_function(func, node_args, node_kwargs)
        self._annotate(node, out)
        return self._wrap(func, node, out, owners, label)

    def _reshape(self, functional, args, kwargs, func):
        """An operation of torch's own reshapes what it has just made: the tensor gets the cell of the view."""
        with self:
            view = functional(*args, **kwargs)
        args[0]._cell = view._cell
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return args[0]

    def _wrap(self, func, node, out, owners, label):
        at = node.meta["at"]

        def one(fake, value_node):
            owner = owners.get(id(fake))
            if owner is not None:
                return owner
            cell = Cell(fake=fake, status="pending", made_at=at, op=str(func))
            self.nodes[cell] = value_node
            made = CsxTensor(cell, label=label)
            self.made.append(weakref.ref(made))
            return made

        if isinstance(out, torch.Tensor):
            return one(out, node)
        if out is None:
            return None
        wrapped = []
        for i, o in enumerate(out):
            if isinstance(o, torch.Tensor):
                item = self.graph.call_function(operator.getitem, (node, i))
                self._annotate(item, o)
                o = one(o, item)
            wrapped.append(o)
        return type(out)(wrapped) if type(out) in (list, tuple) else tuple(wrapped)

    def _label(self, tensors, kwargs, to_csx, func):
        if self.verbatim:
            return dev.execution_device()
        if to_csx:
            return dev.csx()
        if any(isinstance(t, CsxTensor) and t._label.type == dev.NAME for t in tensors):
            return dev.csx()
        return torch.device("cpu")

    def _annotate(self, node, out):
        if self.origin is not None:
            meta = self.origin.meta
            node.meta.update(val=out, **{key: meta[key] for key in ("at", "module", "phase") if key in meta})
            return
        phase = self.phase
        if torch._C._current_autograd_node() is not None:
            phase = "backward"
        node.meta.update(
            val=out, at=user_location(), module=self.module_stack[-1] if self.module_stack else "", phase=phase
        )

    def last_node(self) -> fx.Node | None:
        """The newest operation."""
        node = self.graph._root.prev
        return None if node is self.graph._root else node


@functools.cache
def _constructors() -> frozenset:
    """torch's functions that make tensors."""
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())


def _has_symbol(values) -> bool:
    return any(isinstance(v, _SYM) or (isinstance(v, (list, tuple)) and _has_symbol(v)) for v in values)


def _has_tensor(value) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(_has_tensor(v) for v in value))


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name)
    return text if text and not text[0].isdigit() else f"_{text}"


@contextlib.contextmanager
def recording(recorder: Recorder):
    """Makes `recorder` the active one: reads raise, operations are recorded."""
    if tensor_module.active_recorder is not None:
        raise StaticGraphError("A traced step was called inside another traced step.", "trace the outer one only")
    tensor_module.active_recorder = recorder
    try:
        with recorder.draws.installed(), _Calls(recorder), recorder:
            yield recorder
    finally:
        tensor_module.active_recorder = None


__all__ = ["FakeTensor", "GraphInput", "Recorder", "Site", "recording"]
