"""Optimizers and schedulers under capture: their Python numbers are lifted, their state exists before the step.

Notes:
1. Plain torch optimizers create their state inside `step()`. A static graph needs it before, so the first `step()` of an
   optimizer runs once *dry*, on shapes only; every new state entry remembers how it was born, is undone, and is made
   again outside the step. A momentum buffer of SGD is born as a copy of the first gradient: it starts as zeros instead,
   and the first step uses dampening 0, which gives the same bits.
2. While `optimizer.step()` runs, the numbers in `param_groups` and in `state` are `torch.SymFloat`/`SymInt`. 0-d CPU
   tensors in `state` (torch's step counters) are kept on the host: operations on them build expressions.
3. `scheduler.step()` is called for real, and again by the host at each later step. In between, the numbers that
   schedulers and groups hold are lifted too, so the body may pass `scheduler.get_last_lr()` to a closure.
"""

import contextlib
import functools
import inspect
from collections import defaultdict

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from . import device as dev
from .errors import FrozenValueError, StaticGraphError, user_location
from .scalars import Leaf, Scalars, as_number, coalesce
from .tensor import _ALIASES, _READS, Cell, CsxTensor, aten, fake_mode, map_tensors, tensors_in, to_execution_device

# Optimizers whose plain step branches in Python on its counter; their capturable form uses torch.where.
_NEEDS_CAPTURABLE = {torch.optim.RAdam}

_SHAPE_ONLY = {
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default,
    aten.new_empty_strided.default, aten.rand_like.default, aten.randn_like.default,
}  # fmt: skip
_GRAD_COPIES = {aten.clone.default, aten.detach.default, aten.add.Tensor, aten.neg.default, aten.mul.Tensor}


class _TrackingDict(dict):
    """Remembers the first value that each key was given."""

    def __init__(self, *args):
        super().__init__(*args)
        self.born = {}

    def __setitem__(self, key, value):
        if key not in self:
            self.born.setdefault(key, value)
        super().__setitem__(key, value)


class _DryRun(TorchDispatchMode):
    """Runs operations on shapes only; remembers how each new tensor was made."""

    def __init__(self):
        super().__init__()
        self.births: dict[int, tuple] = {}  # id of a CPU tensor -> (tensor, initial clone)
        self.origin: dict[Cell, tuple] = {}
        self.trial: dict = {}
        self.reads: set[Cell] = set()  # 0-d state that the optimizer reads: it belongs on the host

    def is_state(self, cell: Cell) -> bool:
        return any(
            isinstance(v, CsxTensor) and v._cell is cell and not v.dim()
            for s in self.trial.values()
            for v in s.values()
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if func in _ALIASES and isinstance(args[0], CsxTensor):
            return CsxTensor(args[0]._cell, label=args[0]._label)
        tensors = tensors_in(args, kwargs)
        if not any(isinstance(t, CsxTensor) for t in tensors) and not dev.is_csx(kwargs.get("device")):
            out = func(*args, **kwargs)
            known = set() if func is aten.lift_fresh.default else {id(t) for t in tensors}

            def born(o):
                if id(o) not in known:
                    self.births.setdefault(id(o), (o, o.clone()))
                return o

            return map_tensors(born, out)
        if func in _READS:
            subject = next(t for t in tensors if isinstance(t, CsxTensor))
            if func is aten._local_scalar_dense.default and self.is_state(subject._cell):
                self.reads.add(subject._cell)
                return 0.7324 if subject.dtype.is_floating_point else 1
            from .errors import TensorReadError
            from .tensor import _MEND_READ

            raise TensorReadError(
                f"An optimizer step reads the value of the tensor {subject._cell.describe()}.", _MEND_READ
            )
        owners = {}

        def fake(t):
            if not isinstance(t, CsxTensor):
                return fake_mode.from_tensor(t)
            owners[id(t._cell.fake)] = t
            return t._cell.fake

        with fake_mode:
            out = func(
                *map_tensors(fake, args), **{k: to_execution_device(map_tensors(fake, v)) for k, v in kwargs.items()}
            )

        def wrapped(o):
            if id(o) in owners:
                return owners[id(o)]
            cell = Cell(fake=o, status="pending", op=str(func), made_at=user_location())
            self.origin[cell] = (func, args, kwargs)
            return CsxTensor(cell)

        return map_tensors(wrapped, out)


class HostCounters:
    """0-d CPU tensors of optimizer state, evaluated on the host."""

    def __init__(self, scalars: Scalars):
        self.scalars = scalars
        self.current: dict[int, object] = {}  # id of tensor -> ScalarNode
        self.keep: dict[int, torch.Tensor] = {}
        self.leaf_of: dict[int, Leaf] = {}
        self.classes: dict[tuple, object] = {}
        self.members: dict[Leaf, list[torch.Tensor]] = {}
        self.undo: list = []

    def add(self, optimizer, group: int, key: str, tensor: torch.Tensor) -> None:
        """Registers one counter; equal ones of one parameter group share a leaf."""
        if id(tensor) in self.current:
            return
        value = tensor.item()
        kind = (id(optimizer), group, key, value, tensor.dtype)
        node = self.classes.get(kind)
        if node is None:
            node = self.scalars.leaf(f"{type(optimizer).__name__}.state[...][{key!r}]", value, None, volatile=True)
            self.classes[kind] = node
        self.undo.append(lambda: tensor.fill_(value))
        leaf = node.args[0]
        self.members.setdefault(leaf, []).append(tensor)
        self._set(tensor, node)
        self.leaf_of[id(tensor)] = leaf

    def _set(self, tensor, node):
        self.current[id(tensor)] = node
        self.keep[id(tensor)] = tensor

    def number(self, value, dtype) -> torch.Tensor:
        """torch.tensor(value) of a lifted number."""
        node = self.scalars.of(value)
        out = torch.zeros((), dtype=dtype or (torch.get_default_dtype() if node.kind is float else torch.int64))
        if out.dtype is torch.float32 and node.kind is float:
            node = self.scalars.make("f32", (node,))
        out.fill_(node.hint)
        self._set(out, node)
        return out

    def forget(self, tensor) -> None:
        self.current.pop(id(tensor), None)

    def concerns(self, tensors) -> bool:
        current = self.current
        return bool(current) and any(id(t) in current for t in tensors)

    def run(self, func, args, kwargs):
        """One operation that involves a counter; NotImplemented where it belongs in the graph."""
        if func is aten._local_scalar_dense.default:
            return self.scalars.sym(self.current[id(args[0])])
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):
            return self._foreach(name.removeprefix("_foreach_"), args, kwargs)
        if any(isinstance(t, CsxTensor) for t in tensors_in(args, kwargs)):
            return NotImplemented
        return self._one(name, func, args, kwargs)

    def _foreach(self, name, args, kwargs):
        targets = args[0]
        others = args[1] if len(args) > 1 else None
        outs = []
        for i, t in enumerate(targets):
            other = others[i] if isinstance(others, (list, tuple)) else others
            outs.append(self._one(name, None, (t, other) if other is not None else (t,), kwargs))
        return None if name.endswith("_") else outs

    def _node(self, value):
        if isinstance(value, torch.Tensor):
            node = self.current.get(id(value))
            if node is None:
                if isinstance(value, CsxTensor) or value.numel() != 1:
                    return None
                node = self.scalars.constant(value.item())
            return node
        return self.scalars.of(value) or self.scalars.constant(value)

    def _one(self, name, func, args, kwargs):
        inplace = name.endswith("_")
        op = name.rstrip("_")
        tensor = args[0]
        tensor_dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else None
        nodes = [self._node(a) for a in args if isinstance(a, (torch.Tensor, int, float, torch.SymInt, torch.SymFloat))]
        make = self.scalars.make
        alpha = kwargs.get("alpha", 1)
        if op in ("add", "sub", "mul", "div", "pow", "rsub", "true_divide") and len(nodes) == 2 and None not in nodes:
            left, right = nodes
            if op == "rsub":
                op, left, right = "sub", right, left
            if not (isinstance(alpha, (int, float)) and alpha == 1):
                right = make("mul", (right, self._node(alpha)))
            if tensor_dtype is torch.float32:  # the kernel computes in float32, with the scalar rounded first
                left, right = (n if n.kind is int else make("f32", (n,)) for n in (left, right))
            op = {"div": "float_truediv", "true_divide": "float_truediv", "pow": "float_pow"}.get(op, op)
            node = make(op, (left, right))
        elif op in ("fill", "copy"):
            node = nodes[1]
        elif op == "zero":
            node = self.scalars.constant(0.0)
        elif op in ("sqrt", "neg", "reciprocal", "clone", "detach", "_to_copy"):
            node = nodes[0]
            if op == "sqrt":
                node = make("float_pow", (node, self.scalars.constant(0.5)))
            elif op == "reciprocal":
                node = make("float_truediv", (self.scalars.constant(1.0), node))
            elif op == "neg":
                node = make("neg", (node,))
        else:
            raise StaticGraphError(
                f"aten::{name} on an optimizer's step counter (a 0-d CPU tensor) is not known to the host.",
                "keep the counter on the parameter's device, or use + - * / ** on it",
            )
        if inplace:
            out, dtype = tensor, tensor.dtype
        else:
            dtype = kwargs.get("dtype") or (tensor.dtype if isinstance(tensor, torch.Tensor) else torch.float32)
            out = torch.zeros((), dtype=dtype)
        if dtype is torch.float32:
            node = make("f32", (node,)) if node.kind is float and node.op != "f32" else node
        elif not dtype.is_floating_point and node.kind is float:
            node = make("to_int", (node,))
        out.fill_(node.hint)
        self._set(out, node)
        return out

    def as_tensors(self, recorder, args):
        """Counters among an operation's arguments as 0-d tensors of the graph."""

        def convert(t):
            node = self.current.get(id(t))
            if node is None:
                return t
            return torch.ops.aten.scalar_tensor.default(
                self.scalars.sym(node), dtype=t.dtype, device=torch.device("cpu")
            )

        with recorder:
            return map_tensors(convert, args)

    def finish(self) -> None:
        """Records the updates and moves the counters into buffers."""
        for leaf, tensors in self.members.items():
            nodes = {id(self.current[id(t)]): self.current[id(t)] for t in tensors}
            if len(nodes) > 1:
                raise FrozenValueError(
                    f"The counters {leaf.label} start equal and are updated differently within the step.",
                    "give every parameter the same update, or keep the counters on the parameters' device",
                )
            (node,) = nodes.values()
            if node.op != "leaf":
                self.scalars.updates.append((leaf, node))
        coalesce(self.members)


class Lifter:
    """Installed around the recording of one step's body."""

    def __init__(self, recorder, rebinding):
        self.recorder, self.rebinding = recorder, rebinding
        self.scalars: Scalars = recorder.scalars
        self.counters = HostCounters(self.scalars)
        self._undo = self.counters.undo
        self.optimizers: list[torch.optim.Optimizer] = []
        self.notes: list[str] = []
        self._touched: set[int] = set()
        self._saved: dict[int, list] = {}
        self._groups: dict[int, tuple] = {}  # id of an optimizer -> (it, [(group, its numbers, the lifted ones)])
        self._lasts: dict[int, tuple] = {}  # id of a scheduler -> (it, attribute, its list, the lifted one)
        self._flags: list[tuple] = []
        self._depth = 0
        self._dry = False
        recorder.host_ops = self.counters

    @contextlib.contextmanager
    def installed(self):
        hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        patched = [*self._patch(_subclasses(*_scheduler_roots()), "step", self._host_step)]
        try:
            for optimizer in self.rebinding.optimizers:
                self._lift_groups(optimizer)
            for scheduler in self.rebinding.schedulers:
                self._lift_last(scheduler)
            yield self
        finally:
            for cls, name, original in patched:
                setattr(cls, name, original)
            for hook in hooks:
                hook.remove()
            for optimizer in self.optimizers:
                if id(optimizer) in self._saved:
                    self._restore(optimizer)
            for optimizer, _ in list(self._groups.values()):
                self._unlift_groups(optimizer)
            for scheduler, *_ in list(self._lasts.values()):
                self._unlift_last(scheduler)
            for group, key, value in self._flags:
                group[key] = value

    def undo(self) -> None:
        """Takes back what the body did to Python objects on the host, for another capture."""
        for function in reversed(self._undo):
            function()

    @staticmethod
    def _patch(classes, name, make):
        for cls in classes:
            if name in cls.__dict__:
                original = cls.__dict__[name]
                setattr(cls, name, make(original))
                yield cls, name, original

    def _host_step(self, original):
        lifter = self

        @functools.wraps(original)
        def step(scheduler, *args, **kwargs):
            if lifter._dry:
                return original(scheduler, *args, **kwargs)
            if lifter._depth:
                lifter._remember(scheduler)
                return original(scheduler, *args, **kwargs)
            optimizers = [o for o in _optimizers_of(scheduler) if id(o) in lifter._groups]
            for optimizer in optimizers:
                lifter._unlift_groups(optimizer)
            for other, *_ in list(lifter._lasts.values()):
                lifter._unlift_last(other)
            lifter._remember(scheduler)
            lifter._depth += 1
            try:
                with lifter._host_code():
                    result = original(scheduler, *args, **kwargs)
            finally:
                lifter._depth -= 1
            lifter.scalars.events.append(("call", original, (scheduler, *args), kwargs))
            for optimizer in optimizers:
                lifter._lift_groups(optimizer)
            for known in [*lifter.rebinding.schedulers, scheduler]:
                lifter._lift_last(known)
            return result

        return step

    def _remember(self, scheduler) -> None:
        """Lets `undo` put a scheduler, and the groups that it sets, back."""
        if id(scheduler) in self._touched:
            return
        self._touched.add(id(scheduler))
        values = {k: list(v) if isinstance(v, list) else v for k, v in vars(scheduler).items()}
        self._undo.append(lambda: vars(scheduler).update(values))
        optimizer = getattr(scheduler, "optimizer", None)
        for group in getattr(optimizer, "param_groups", ()):
            numbers = {k: v for k, v in group.items() if k != "params"}
            self._undo.append(lambda g=group, n=numbers: g.update(n))
            for value in numbers.values():
                if isinstance(value, torch.Tensor) and not isinstance(value, CsxTensor):
                    self._undo.append(lambda t=value, v=value.clone(): t.copy_(v))

    # optimizers
    def _before_step(self, optimizer, args, kwargs):
        if self._dry:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._enter(optimizer)
            return None

        if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
            raise StaticGraphError(
                f"{type(optimizer).__name__}.step() calls its closure as often as the losses ask for, which Python decides.",
                "use an optimizer of first order inside a traced step",
            )

        @functools.wraps(closure)
        def then_enter():  # gradients come from the closure, and state from gradients
            loss = closure()
            if id(optimizer) not in self._saved:
                self._enter(optimizer)
            return loss

        return ((args[0], then_enter, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": then_enter})

    def _enter(self, optimizer):
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        with self._host_code():
            self._unlift_groups(optimizer)
            born = self._materialise(optimizer)
            for p, entries in optimizer.state.items():
                name = p._cell.name if isinstance(p, CsxTensor) else None
                self.rebinding.watch(entries, f"{type(optimizer).__name__}.state[{name or '...'}]")
            self._lift_groups(optimizer, born)
            self._lift_state(optimizer)
        self.recorder.phase = "update"

    def _after_step(self, optimizer, args, kwargs):
        if self._dry:
            return
        self.recorder.phase = "forward"
        if id(optimizer) in self._saved:
            self._restore(optimizer)
            self._check_groups(optimizer)

    @contextlib.contextmanager
    def _host_code(self):
        """Code of ours between the user's operations: recorded nowhere."""
        from . import tensor as tensor_module

        recorder, tensor_module.active_recorder = tensor_module.active_recorder, None
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                yield
        finally:
            tensor_module.active_recorder = recorder

    def _materialise(self, optimizer) -> set:
        """Creates the state that the first step would create; returns the keys that are born as gradient copies."""
        with_grad = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        capturable = type(optimizer) in _NEEDS_CAPTURABLE
        if capturable:
            self.notes.append(f"{type(optimizer).__name__}: captured in its capturable form")
        for group in optimizer.param_groups:
            if "capturable" in group and group["capturable"] is not capturable:
                self._flags.append((group, "capturable", group["capturable"]))
                group["capturable"] = capturable
            if group.get("fused"):
                self._flags.append((group, "fused", group["fused"]))
                group["fused"] = None
                self.notes.append(
                    f"{type(optimizer).__name__}: fused=True has no effect, the whole step is one program"
                )
        for p, s in optimizer.state.items():
            for key, value in s.items():
                if isinstance(p, CsxTensor) and isinstance(value, torch.Tensor) and not isinstance(value, CsxTensor):
                    if value.dim() and value.shape == p.shape:  # made when the parameter was on the CPU
                        s[key] = value.to(dev.csx())
        self._gradients = {p.grad._cell for p in with_grad if isinstance(p.grad, CsxTensor)}
        on_device = any(isinstance(v, CsxTensor) and not v.dim() for s in optimizer.state.values() for v in s.values())
        if all(optimizer.state.get(p) for p in with_grad) and not on_device:
            self._move_counters(optimizer)
            return set()
        old_state = optimizer.state
        numbers = [dict(g) for g in optimizer.param_groups]
        attributes = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float, bool))}
        host = {
            id(v): (v, v.clone())
            for s in old_state.values()
            for v in s.values()
            if isinstance(v, torch.Tensor) and not isinstance(v, CsxTensor)
        }
        trial = defaultdict(_TrackingDict)
        for p, s in old_state.items():
            trial[p] = _TrackingDict(s)
        optimizer.state = trial
        self._dry = True
        try:
            dry = _DryRun()
            dry.trial = trial
            with torch.no_grad(), dry:
                # one that takes no gradient-dependent path twice: the plain step, without its closure
                optimizer.step()
        finally:
            self._dry = False
            optimizer.state = old_state
            for group, saved in zip(optimizer.param_groups, numbers):
                for key in [k for k in group if k not in saved]:
                    del group[key]
                group.update(saved)
            for k, v in attributes.items():
                setattr(optimizer, k, v)
            for tensor, value in host.values():
                tensor.copy_(value)
        born_from_grad = set()
        on_host = {k for s in trial.values() for k, v in s.items() if isinstance(v, CsxTensor) and v._cell in dry.reads}
        for p, entries in trial.items():
            for key, value in entries.items():
                if p in old_state and key in old_state[p]:
                    if key in on_host and isinstance(value, CsxTensor):
                        old_state[p][key] = value.cpu()
                    continue
                if key in on_host and isinstance(value, CsxTensor):
                    old_state[p][key] = self._host_birth(entries.born.get(key, value), dry)
                    continue
                old_state[p][key] = self._birth(optimizer, p, key, value, entries, dry, born_from_grad)
        self._move_counters(optimizer)
        return born_from_grad

    def _birth(self, optimizer, p, key, value, entries, dry, born_from_grad):
        first = entries.born.get(key, value)
        if not isinstance(first, torch.Tensor):
            return first
        if not isinstance(first, CsxTensor):
            return dry.births[id(first)][1] if id(first) in dry.births else first
        origin = dry.origin.get(first._cell)
        if origin is None:
            return first
        try:
            return self._rebirth(origin, dry)
        except _DependsOnGradient:
            if "dampening" in optimizer.param_groups[0] and key == "momentum_buffer":
                born_from_grad.add(key)
                return torch.zeros_like(p, memory_format=torch.preserve_format).detach()
            raise StaticGraphError(
                f"{type(optimizer).__name__} makes its state {key!r} from the first gradient, inside step(); its value "
                "before the first step is unknown.",
                f"create the state {key!r} in the optimizer's constructor",
            ) from None

    def _host_birth(self, first, dry):
        """The initial value of a 0-d entry, on the CPU."""
        func, args, kwargs = dry.origin[first._cell]
        if func is aten._to_copy.default and not isinstance(args[0], CsxTensor):
            known = dry.births.get(id(args[0]))
            return (known[1] if known is not None else args[0]).clone().to(first.dtype)
        if func in _SHAPE_ONLY:
            return func(*args, **(kwargs | {"device": torch.device("cpu")}))
        return self._rebirth((func, args, kwargs), dry).cpu()

    def _rebirth(self, origin, dry):
        func, args, kwargs = origin

        def rebuild(t):
            if not isinstance(t, CsxTensor):
                return t
            if func in _SHAPE_ONLY:
                with fake_mode:
                    fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=dev.execution_device())
                return CsxTensor(Cell(fake=fake, status="dropped"))
            if t._cell in dry.origin:
                return self._rebirth(dry.origin[t._cell], dry)
            if t._cell.status == "pending" or t._cell in self._gradients:
                raise _DependsOnGradient
            return t.detach()

        args = map_tensors(rebuild, args)
        if func in _SHAPE_ONLY:
            like = next((t for t in tensors_in(args, {}) if isinstance(t, CsxTensor)), None)
            return _make_like(func, like, args, kwargs)
        return func(*args, **kwargs)

    def _move_counters(self, optimizer):
        if type(optimizer) not in _NEEDS_CAPTURABLE:
            return
        for s in optimizer.state.values():
            step = s.get("step")
            if isinstance(step, torch.Tensor) and not (isinstance(step, CsxTensor) and step.dtype is torch.float64):
                s["step"] = step.to(dev.csx(), torch.float64)  # beta ** step cancels: float32 is not enough

    def _lift_groups(self, optimizer, born=()):
        if id(optimizer) in self._groups:
            return
        entries, name = [], type(optimizer).__name__
        for i, group in enumerate(optimizer.param_groups):
            original, lifted, tensors = {}, {}, []
            for key, value in group.items():
                if key == "params" or not _liftable(value):
                    if isinstance(value, torch.Tensor) and not isinstance(value, CsxTensor) and value.numel() == 1:
                        self._lift_tensor(optimizer, i, key, value)
                        tensors.append(value)
                    continue
                hint = 0.0 if key == "dampening" and born else None
                original[key] = value
                lifted[key] = self._lift_value(optimizer, f"{name}.param_groups[{i}][{key!r}]", i, key, value, hint)
            group.update(lifted)
            entries.append((group, original, lifted, tensors))
            self._undo.append(functools.partial(group.update, original))
        self._groups[id(optimizer)] = (optimizer, entries)

    def _unlift_groups(self, optimizer):
        """Puts plain numbers back; what the body set is set by the host at each step, in this place."""
        _, entries = self._groups.pop(id(optimizer), (None, ()))
        for group, original, lifted, tensors in entries:
            for tensor in tensors:
                self.counters.forget(tensor)
            for key, now in list(group.items()):
                if key in lifted and now is lifted[key]:
                    group[key] = original[key]
                elif key != "params":
                    group[key] = self._plain(now, functools.partial(group.__setitem__, key))

    def _plain(self, value, write):
        of = self.scalars.of
        if isinstance(value, (tuple, list)) and any(of(v) is not None for v in value):
            nodes = [of(v) or self.scalars.constant(v) for v in value]
            self.scalars.events.append(("write", write, nodes))
            return type(value)(n.hint for n in nodes)
        node = of(value)
        if node is None:
            return value
        self.scalars.events.append(("write", write, node))
        return node.hint

    def _check_groups(self, optimizer):
        """After its step: a number that Python computed from nothing lifted would be frozen."""
        for group, _, lifted, _ in self._groups.get(id(optimizer), (None, ()))[1]:
            for key, now in group.items():
                if key != "params" and as_number(now) and (key not in lifted or now is not lifted[key]):
                    raise FrozenValueError(
                        f"{type(optimizer).__name__}.step() sets {key!r} of its group to the number {now!r} in Python, "
                        "which the graph would freeze.",
                        f"give {key!r} its first value in the constructor's defaults, and compute it from the group's or "
                        "state's own numbers",
                    )

    def _lift_last(self, scheduler):
        """What `get_last_lr()` returns."""
        for attribute in ("_last_lr", "_last_value"):
            values = vars(scheduler).get(attribute)
            if (
                isinstance(values, list)
                and values
                and all(as_number(v) for v in values)
                and id(scheduler) not in self._lasts
            ):
                name = f"{type(scheduler).__name__}.get_last_lr()"
                read = lambda s=scheduler, a=attribute, i=0: getattr(s, a)[i]  # noqa: E731
                lifted = [
                    self.scalars.sym(self.scalars.leaf(f"{name}[{i}]", v, functools.partial(read, i=i)))
                    for i, v in enumerate(values)
                ]
                setattr(scheduler, attribute, lifted)
                self._lasts[id(scheduler)] = (scheduler, attribute, values, lifted)

    def _unlift_last(self, scheduler):
        _, attribute, values, lifted = self._lasts.pop(id(scheduler), (None,) * 4)
        if attribute is not None and getattr(scheduler, attribute) is lifted:
            setattr(scheduler, attribute, values)

    def _lift_state(self, optimizer):
        saved, name = [], type(optimizer).__name__
        classes = {}
        group_of = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        for p, entries in optimizer.state.items():
            original, lifted = {}, {}
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    if not isinstance(value, CsxTensor) and value.numel() == 1:
                        self.counters.add(optimizer, group_of.get(p, 0), key, value)
                elif as_number(value):
                    kind = (group_of.get(p, 0), key, type(value), value)
                    if kind not in classes:
                        first = lambda e=entries, k=key: e[k]  # noqa: E731
                        label = f"{name}.state[...][{key!r}]"
                        classes[kind] = (self.scalars.sym(self.scalars.leaf(label, value, first)), [])
                    original[key], lifted[key] = value, classes[kind][0]
                    classes[kind][1].append(entries)
            if lifted:
                entries.update(lifted)
                saved.append((entries, original, lifted))
        self._saved[id(optimizer)] = saved

    def _lift_tensor(self, optimizer, i, key, value):
        """A learning rate kept as a CPU tensor: read on the host at each step."""
        if id(value) in self.counters.current:
            return
        with self._host_code():
            read = lambda o=optimizer, i=i, k=key: o.param_groups[i][k].item()  # noqa: E731
            label = f"{type(optimizer).__name__}.param_groups[{i}][{key!r}]"
            self.counters._set(value, self.scalars.leaf(label, value.item(), read))

    def _lift_value(self, optimizer, label, i, key, value, hint):
        ref = optimizer
        if isinstance(value, (tuple, list)):
            return type(value)(
                self.scalars.sym(
                    self.scalars.leaf(f"{label}[{j}]", v, lambda i=i, k=key, j=j: ref.param_groups[i][k][j])
                )
                for j, v in enumerate(value)
            )
        return self.scalars.sym(
            self.scalars.leaf(label, value if hint is None else hint, lambda: ref.param_groups[i][key])
        )

    def _restore(self, optimizer):
        for holder, original, lifted in self._saved.pop(id(optimizer)):
            for key, value in original.items():
                now = holder.get(key)
                if now is lifted[key]:
                    holder[key] = value
                    continue
                node = self.scalars.of(now)
                if node is None:
                    if as_number(now):
                        raise FrozenValueError(
                            f"{type(optimizer).__name__}.step() sets its state {key!r} to the number {now!r} in Python, "
                            "which the graph would freeze.",
                            "compute it from the group's or state's own numbers, or keep it as a tensor in the state",
                        )
                    holder[key] = now
                    continue
                holder[key] = node.hint
                self._undo.append(functools.partial(holder.__setitem__, key, value))
                self.scalars.writebacks.append((functools.partial(holder.__setitem__, key), node))


def _scheduler_roots():
    from ..optim.scheduler import Scheduler

    return LRScheduler, Scheduler


def _optimizers_of(scheduler):
    """The optimizers whose groups a scheduler sets, through chained schedulers too."""
    found, stack = [], [scheduler]
    while stack:
        s = stack.pop()
        optimizer = getattr(s, "optimizer", None)
        if optimizer is not None and optimizer not in found:
            found.append(optimizer)
        stack.extend(vars(s).get("_schedulers", ()))
    return found


def _subclasses(*roots) -> list[type]:
    found, stack = [], list(roots)
    while stack:
        cls = stack.pop()
        if cls not in found:
            found.append(cls)
            stack.extend(cls.__subclasses__())
    return found


class _DependsOnGradient(Exception):
    pass


def _liftable(value) -> bool:
    return as_number(value) or (isinstance(value, (tuple, list)) and bool(value) and all(as_number(v) for v in value))


def _make_like(func, like, args, kwargs):
    """Runs a shape-only creation outside the step, on the deferred tape."""
    name = func._schema.name.removeprefix("aten::")
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
    if name in ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"):
        shape, stride = like.shape, like.stride()
        made = torch.empty_strided(shape, stride, dtype=dtype, device=dev.csx())
        fill = {"zeros_like": 0, "ones_like": 1, "empty_like": 0}.get(name)
        if name == "full_like":
            fill = args[1]
        if fill is not None:
            return made.fill_(fill)
        return made.uniform_() if name == "rand_like" else made.normal_()
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    kwargs["device"] = dev.csx()
    if name.startswith("new_"):
        kwargs["dtype"] = dtype
        if name == "new_empty_strided":
            return torch.zeros(args[1], **kwargs)
        return getattr(torch, name.removeprefix("new_"))(*args[1:], **kwargs)
    return getattr(torch, name)(*args, **kwargs)
