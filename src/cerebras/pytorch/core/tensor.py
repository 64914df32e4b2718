"""Tensors of the device type `csx`, and the tape on which their initialisation is deferred.

Notes:
1. A `CsxTensor` is a wrapper subclass: shape, dtype and autograd of its own, and a `Cell` that knows the value. A cell
   is *resolved* (it has a real tensor on the execution device), *deferred* (its value is on the tape), *pending* (it
   is made by the step that is running), *released* (a gradient that a step freed after use) or *dropped* (the backend
   was asked not to keep values).
2. Operations outside a traced step on unresolved cells go on the tape; they run, in order, when a value is needed.
   Tensors that share memory keep doing so: views are replayed as views of the real tensors.
3. Random operations on the tape keep a copy of the generator's state and advance the generator at once, by running on
   scratch memory. So everything that draws from the generator later gets the numbers it would have got in eager
   PyTorch, and a replay gives the eager values bit for bit.
"""

import functools
import itertools
import logging
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from . import device as dev
from .errors import StaticGraphError, TensorReadError, user_location

logger = logging.getLogger("cerebras.pytorch")

aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.is_same_size.default}
_MEND_READ = (
    "pass the tensor to a function decorated with @cstorch.step_closure and read it there; "
    "for control flow use torch.where"
)

# A shape environment that admits no symbols: Inductor's cache wants one, and shapes stay static.
fake_mode = FakeTensorMode(
    allow_non_fake_inputs=True,
    static_shapes=True,
    shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False),
)


class Cell:
    """The value behind one or more `CsxTensor`s.

    Attributes:
        fake: shape, strides and dtype as a FakeTensor; made when first asked for.
        real: the tensor on the execution device, None until resolved.
        status: "resolved", "deferred", "pending" or "dropped".
        made_at: (file, line) of the user's code that made it, where known.
        op: name of the operation that made it.
        successor: the cell that took its place (`tensor.data = value`), else None.
    """

    __slots__ = ("_fake", "real", "status", "made_at", "op", "name", "successor", "__weakref__")

    def __init__(self, fake=None, real=None, status="resolved", made_at=None, op=None, name=None):
        self._fake, self.real, self.status = fake, real, status
        self.made_at, self.op, self.name = made_at, op, name
        self.successor = None

    @property
    def fake(self) -> FakeTensor:
        if self._fake is None:
            real = self.real
            with fake_mode:
                self._fake = torch.empty_strided(
                    real.shape, real.stride(), dtype=real.dtype, device=dev.execution_device()
                )
        return self._fake

    def describe(self) -> str:
        """For messages: name or origin, shape and dtype."""
        t = self._fake if self._fake is not None else self.real
        text = f"{self.name!r} " if self.name else ""
        text += f"of shape {tuple(t.shape)}, {t.dtype}"
        if self.op:
            text += f", made by {self.op}"
        if self.made_at:
            text += f" at {self.made_at[0]}:{self.made_at[1]}"
        return text


# Every csx tensor has a number: those made while a step's body runs are told from those that were there before.
serials = itertools.count()


class CsxTensor(torch.Tensor):
    """A tensor on the device `csx`. Not constructed by users: `tensor.to("csx")`, `with backend.device:`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _cell: Cell
    _label: torch.device

    @staticmethod
    def __new__(cls, cell: Cell, requires_grad: bool = False, label: torch.device | None = None):
        meta = cell.real if cell.real is not None else cell._fake
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=dev.execution_device(),
            requires_grad=requires_grad,
        )
        self._cell, self._serial = cell, next(serials)
        self._label = label if label is not None else dev.csx()
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_outside_step(func, args, kwargs or {})

    @property
    def device(self):
        return self._label

    @property
    def is_cpu(self):
        return self._label.type == "cpu"

    @property
    def is_cuda(self):
        return False

    @property
    def is_csx(self):
        return self._label.type == dev.NAME

    @property
    def data(self):
        return torch.Tensor.detach(self)

    @data.setter
    def data(self, value):
        if not isinstance(value, CsxTensor):
            value = value.to(self._label)
        if active_recorder is not None:
            active_recorder.set_data(self, value)
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            self._become(value)
            return
        old, self._cell = self._cell, value._cell
        if old is not value._cell:
            old.successor = value._cell
            if value._cell.name is None:
                value._cell.name = old.name
        bump_epoch()

    def _become(self, value):
        """Takes another shape or dtype: `module.to(dtype)`; the object stays the same."""
        value = CsxTensor(value._cell)
        if isinstance(self, torch.nn.Parameter):
            value = torch.nn.Parameter(value, self.requires_grad)
        try:
            torch.utils.swap_tensors(self, value)
        except RuntimeError as e:
            raise StaticGraphError(
                f"Setting .data of a csx tensor from {tuple(value.shape)} {value.dtype} to another shape or dtype is not "
                f"possible once it is in use ({e}).",
                "convert the model before cstorch.compile and before the optimizer is made",
            ) from None
        bump_epoch()

    @property
    def grad(self):
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value):
        if active_recorder is not None:
            active_recorder.sets_gradient(self, value)
        else:
            note_activity()
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self):
        self.grad = None

    def to(self, *args, **kwargs):
        target, dtype, _, memory_format = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != "copy"}
        )
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            target = other.device
            args, kwargs = (target, other.dtype, *args[1:]), {k: v for k, v in kwargs.items() if k != "other"}
        if target is not None and target.type == dev.NAME == self._label.type:
            kwargs = {"copy": kwargs.get("copy", False)} | ({} if dtype is None else {"dtype": dtype})
            if memory_format is not None:
                kwargs["memory_format"] = memory_format
            if dtype is None and not kwargs["copy"] and memory_format is None:
                return self
            return torch.Tensor.to(self, **kwargs) if dtype is not None else torch.Tensor.clone(self)
        if target is not None and target.type != dev.NAME and self._label.type == dev.NAME:
            # torch.nn.utils groups tensors by their C++ device and "moves" them there, which is a no-op
            if target == dev.execution_device() and dtype is None and _called_from_torch():
                return self
            return self.cpu().to(*args, **kwargs)
        return torch.Tensor.to(self, *args, **kwargs)

    def cpu(self, *args, **kwargs):
        if self._label.type == "cpu":
            return self
        return read(self, "cpu()").detach().to("cpu", copy=True)

    def numpy(self, *, force=False):
        return read(self, "numpy()").detach().cpu().numpy()

    def tolist(self):
        return read(self, "tolist()").tolist()

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        if dtype is not None:
            array = array.astype(dtype)
        return array.copy() if copy else array

    def data_ptr(self):
        return read(self, "data_ptr()").data_ptr()

    def __repr__(self, *, tensor_contents=None):
        if self._cell.status == "deferred" and active_recorder is None:
            grad = ", requires_grad=True" if self.requires_grad else ""
            return f"tensor(<deferred>, size={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'{grad})"
        text = repr(read(self, "print or repr").detach())
        return f"{text[:-1]}, device='{self.device}'{', requires_grad=True' if self.requires_grad else ''})"

    def __format__(self, spec):
        if self.dim() == 0 and (self._cell.status != "deferred" or active_recorder is not None):
            return format(read(self, "format").item(), spec)
        return object.__format__(self, spec)

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copied = torch.Tensor.clone(self).detach()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):
        """Pickled as a plain CPU tensor: what leaves the process is the value."""
        plain = read(self, "pickling").detach().cpu()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)


_GRAD = torch.Tensor.grad


def _called_from_torch() -> bool:
    import sys

    from .errors import _TORCH

    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


# State that may be bound to other cells (`.data =`, load_state_dict) raises this number; executors compare it.
_epoch = 0


def bump_epoch() -> None:
    global _epoch
    _epoch += 1


def epoch() -> int:
    return _epoch


# Operations on csx tensors outside of steps, and assignments of gradients, raise this number: while it stands still, no
# gradient came or went.
_activity = 0


def note_activity() -> None:
    global _activity
    _activity += 1


def activity() -> int:
    return _activity


# What becomes readable at the end of the running step; the backend empties it.
pending_cells: list = []

# The recorder that is active while a step's body runs, else None. Set by core.capture.
active_recorder = None


def read(tensor: CsxTensor, how: str) -> torch.Tensor:
    """The real tensor behind `tensor`, or the error that says why there is none.

    Raises:
        TensorReadError: inside a traced step, or for a value that the running step has not made yet.
    """
    cell = tensor._cell
    if active_recorder is not None:
        raise TensorReadError(
            f"{how} reads the value of the tensor {cell.describe()} inside a traced step: the graph would freeze it.",
            _MEND_READ,
        )
    if cell.status == "pending":
        raise TensorReadError(
            f"{how} reads the tensor {cell.describe()} before the step that makes it has ended.", _MEND_READ
        )
    return resolve(cell)


def released_error(cell: Cell) -> StaticGraphError:
    return StaticGraphError(
        f"The gradient {cell.describe()} is not kept: its step clears gradients before the backward, so the compiled step "
        "frees each one as soon as it was used.",
        "use it inside that traced step and pass it to a step closure there; if another traced step applies it, clear "
        "gradients there, after optimizer.step()",
    )


def resolve(cell: Cell) -> torch.Tensor:
    """The real tensor of a cell, replaying the tape where it is still deferred."""
    if cell.real is None:
        if cell.status == "deferred":
            tape.replay()
        elif cell.status == "dropped":
            raise RuntimeError(
                f"The tensor {cell.describe()} holds no data: the backend was configured with validate_only, "
                "compile_only or drop_data. With drop_data, load a checkpoint that has it before the first step."
            )
        elif cell.status == "released":
            raise released_error(cell)
        elif cell.status == "pending":
            raise TensorReadError(f"The tensor {cell.describe()} is made by a step that has not run.", _MEND_READ)
    return cell.real


def wrap(real: torch.Tensor, requires_grad: bool = False, name: str | None = None) -> CsxTensor:
    """A csx tensor over a tensor that is already on the execution device; memory is shared."""
    return CsxTensor(Cell(real=real.detach(), name=name), requires_grad)


def map_tensors(fn, value):
    """Applies fn to tensors in (nested) lists and tuples of an operation's arguments."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in (list, tuple) or isinstance(value, (list, tuple)):
        return (
            type(value)(map_tensors(fn, v) for v in value)
            if type(value) in (list, tuple)
            else [map_tensors(fn, v) for v in value]
        )
    return value


def tensors_in(args, kwargs) -> list[torch.Tensor]:
    """All tensors among an operation's arguments, in order."""
    found: list[torch.Tensor] = []

    def visit(value):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                visit(v)

    visit(args)
    visit(list(kwargs.values()))
    return found


def to_execution_device(value):
    """Replaces a csx device argument."""
    return dev.execution_device() if isinstance(value, torch.device) and value.type == dev.NAME else value


def check_same_device(func, tensors) -> None:
    """What eager PyTorch raises on a real second device; 0-d CPU tensors may mix, as there."""
    if func in (aten.copy_.default, aten._to_copy.default):
        return
    labels = {t.device.type for t in tensors if not (t.dim() == 0 and t.device.type == "cpu")}
    if len(labels) > 1:
        other = next(t for t in tensors if t.device.type != dev.NAME and t.dim() > 0)
        raise StaticGraphError(
            f"{func} got tensors on different devices, csx:0 and {other.device} "
            f"(shape {tuple(other.shape)}, {other.dtype}).",
            "make it on the right device, tensor.to(x.device), or keep it as a buffer of the module",
        )


def run_outside_step(func, args, kwargs):
    """An operation on csx tensors outside a traced step: at once where values exist, on the tape where not."""
    if func in _ALIASES:
        source = args[0]
        if not isinstance(source, CsxTensor):
            return source
        return CsxTensor(source._cell, label=source._label)
    note_activity()
    tensors = tensors_in(args, kwargs)
    csx_tensors = [t for t in tensors if isinstance(t, CsxTensor)]
    if func is aten.set_.source_Tensor and isinstance(args[0], CsxTensor):
        args[0].data = args[1]
        return args[0]
    check_same_device(func, tensors)
    if func in _READS:
        with torch.no_grad():
            return func(*map_tensors(lambda t: read(t, str(func)) if isinstance(t, CsxTensor) else t, args), **kwargs)
    device_kw = kwargs.get("device")
    if device_kw is not None and not dev.is_csx(device_kw) and csx_tensors:
        # moving off the device needs the value
        kwargs = dict(kwargs)
        return func(*map_tensors(lambda t: read(t, "to(device)") if isinstance(t, CsxTensor) else t, args), **kwargs)
    if torch.Tag.inplace_view in func.tags:
        raise StaticGraphError(f"{func} changes the shape of a csx tensor in place.", "use the out-of-place form")
    if any(t._cell.real is None for t in csx_tensors):
        for t in csx_tensors:
            if t._cell.status == "released" or t._cell.status == "pending" and tape.mode != "drop":
                read(t, str(func))
        if (
            func._schema.is_mutable
            and args
            and isinstance(args[0], torch.Tensor)
            and not isinstance(args[0], CsxTensor)
        ):
            return _run_real(func, args, kwargs)  # a CPU tensor is written: its reader will not wait for the tape
        if tape.mode == "drop" and func is aten.copy_.default and isinstance(args[0], CsxTensor):
            return _load_into_dropped(args[0], args[1])
        return tape.record(func, args, kwargs)
    return _run_real(func, args, kwargs)


def _run_real(func, args, kwargs):
    owners = {}

    def real(t):
        if not isinstance(t, CsxTensor):
            return t
        r = resolve(t._cell)
        owners[id(r)] = t
        return r

    real_args = map_tensors(real, args)
    real_kwargs = {k: to_execution_device(map_tensors(real, v)) for k, v in kwargs.items()}
    out = func(*real_args, **real_kwargs)

    pending = any(isinstance(t, CsxTensor) and t._cell.status == "pending" for t in tensors_in(args, kwargs))

    def wrapped(o):
        owner = owners.get(id(o))
        if owner is not None:
            return owner
        cell = Cell(real=o)
        if pending:  # made in the loop's body from what the step made: readable when that is
            cell.status, cell.op, cell.made_at = "pending", str(func), user_location()
            pending_cells.append(cell)
        return CsxTensor(cell)

    return map_tensors(wrapped, out)


def _load_into_dropped(target: CsxTensor, source: torch.Tensor) -> CsxTensor:
    """copy_ into a dropped parameter brings it back: a checkpoint gives it its value."""
    cell = target._cell
    if cell.real is None and cell.status == "dropped" and not tape.validating:
        value = resolve(source._cell) if isinstance(source, CsxTensor) else source
        cell.real = value.detach().to(dev.execution_device(), target.dtype, copy=True).expand(target.shape).contiguous()
        cell.status = "resolved"
    return target


_SCRATCH_RANDOM = {
    aten.normal_.default, aten.uniform_.default, aten.random_.default, aten.random_.to, getattr(aten.random_, "from"),
    aten.bernoulli_.float, aten.exponential_.default, aten.cauchy_.default, aten.log_normal_.default,
    aten.geometric_.default, aten.rand_like.default, aten.randn_like.default, aten.randint_like.default,
    aten.randint_like.low_dtype, aten.randperm.default,
}  # fmt: skip


class Tape:
    """Deferred operations, in program order.

    Attributes:
        mode: "defer" (record), "now" (run at once: lazy_initialization=False) or "drop" (keep nothing).
        validating: with mode "drop", values are never needed (validate_only, compile_only).
    """

    def __init__(self):
        self.records: list[tuple] = []
        self.mode = "defer"
        self.validating = False
        self.log = True

    def __len__(self):
        return len(self.records)

    def empty(self, fake: torch.Tensor) -> CsxTensor:
        """A new uninitialised csx tensor with the metadata of `fake`."""
        if self.mode == "now":
            real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=dev.execution_device())
            return CsxTensor(Cell(fake=fake, real=real))
        cell = Cell(fake=fake, status="dropped" if self.mode == "drop" else "deferred", made_at=user_location())
        if self.mode == "defer":
            self.records.append((None, (fake.shape, fake.stride(), fake.dtype), {}, [weakref.ref(cell)], None))
        return CsxTensor(cell)

    def record(self, func, args, kwargs):
        """Appends one operation; returns its (deferred) outputs."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and self.mode == "defer" and func not in _SCRATCH_RANDOM:
            # how much it draws may depend on values: everything up to here is needed now
            self.replay()
            return _run_real(func, args, kwargs)
        owners = {}
        if self.mode == "defer":
            # cells keep the tape's inputs alive; a tensor object may die earlier
            held_args = map_tensors(lambda t: t._cell if isinstance(t, CsxTensor) else t, args)
            held_kwargs = {
                k: map_tensors(lambda t: t._cell if isinstance(t, CsxTensor) else t, v) for k, v in kwargs.items()
            }

        def fake(t):
            if isinstance(t, CsxTensor):
                f = t._cell.fake
                owners[id(f)] = t
                return f
            return fake_mode.from_tensor(t) if not isinstance(t, FakeTensor) else t

        generator = kwargs.get("generator")
        fake_kwargs = {k: to_execution_device(map_tensors(fake, v)) for k, v in kwargs.items() if k != "generator"}
        with fake_mode:
            out = func(*map_tensors(fake, args), **fake_kwargs)
        status = "dropped" if self.mode == "drop" else "deferred"
        made_at, cells = user_location(), []

        def wrapped(o):
            owner = owners.get(id(o))
            if owner is not None:
                cells.append(weakref.ref(owner._cell))
                return owner
            cell = Cell(fake=o, status=status, made_at=made_at, op=str(func))
            cells.append(weakref.ref(cell))
            return CsxTensor(cell)

        result = map_tensors(wrapped, out)
        if self.mode == "defer":
            state = _advance_generator(func, args, kwargs, generator) if random else None
            self.records.append((func, held_args, held_kwargs, cells, state))
        return result

    def replay(self) -> None:
        """Runs everything recorded so far; the deferred cells that are still referenced become resolved."""
        if not self.records:
            return
        records, self.records = self.records, []
        if self.log and len(records) > 1:
            logger.info("Initialising %d deferred tensor operations", len(records))
        default = _default_generator()
        saved = default.get_state()
        real = lambda v: _cells_to_real(v)  # noqa: E731
        try:
            with torch.no_grad():
                for position in range(len(records)):
                    func, args, kwargs, cells, state = records[position]
                    records[position] = None  # intermediates are freed as the replay goes on
                    if func is None:
                        shape, stride, dtype = args
                        out = torch.empty_strided(shape, stride, dtype=dtype, device=dev.execution_device())
                    else:
                        generator = kwargs.get("generator")
                        if state is not None:
                            if generator is not None:
                                outer = generator.get_state()
                                generator.set_state(state)
                            else:
                                default.set_state(state)
                        out = func(*real(args), **{k: to_execution_device(real(v)) for k, v in kwargs.items()})
                        if state is not None and generator is not None:
                            generator.set_state(outer)
                    outs = (
                        [out]
                        if isinstance(out, torch.Tensor)
                        else [o for o in (out or ()) if isinstance(o, torch.Tensor)]
                    )
                    for ref, o in zip(cells, outs):
                        cell = ref()
                        if cell is not None and cell.real is None:
                            cell.real, cell.status = o, "resolved"
        finally:
            default.set_state(saved)


def _default_generator() -> torch.Generator:
    """What random operations on the execution device draw from."""
    device = dev.execution_device()
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _cells_to_real(value):
    if isinstance(value, Cell):
        return value.real
    if isinstance(value, (list, tuple)):
        return type(value)(_cells_to_real(v) for v in value)
    return value


def _advance_generator(func, args, kwargs, generator):
    """Draws on scratch memory what the operation will draw; returns the generator's state before."""
    state = (generator if generator is not None else _default_generator()).get_state()

    def scratch(t):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=dev.execution_device())

    with torch.no_grad():
        func(*map_tensors(scratch, args), **{k: to_execution_device(v) for k, v in kwargs.items()})
    return state


tape = Tape()


def register_factories() -> None:
    """Tells the dispatcher how a tensor is made on `csx`; the rest of torch's factories are built on these two."""

    def refuse_bare_constructor():
        # torch.tensor(data, device=...) fills the memory with dispatch switched off: it would write to no memory
        if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            raise StaticGraphError(
                "A csx tensor was constructed from data through a reference to torch.tensor taken before the csx "
                "backend was made.",
                "call it as torch.tensor(...), or torch.tensor(..., device='cpu').to('csx')",
            )

    def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        refuse_bare_constructor()
        with fake_mode:
            fake = torch.empty(
                size, dtype=dtype, device=dev.execution_device(), memory_format=memory_format or torch.contiguous_format
            )
        return tape.empty(fake)

    def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
        refuse_bare_constructor()
        with fake_mode:
            fake = torch.empty_strided(size, stride, dtype=dtype, device=dev.execution_device())
        return tape.empty(fake)

    global _library
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", empty, "PrivateUse1")
    _library.impl("empty_strided", empty_strided, "PrivateUse1")
    for name in ("tril_indices", "triu_indices"):

        def indices(row, col, offset=0, *, _name=name, dtype=None, layout=None, device=None, pin_memory=None):
            return getattr(torch, _name)(row, col, offset, dtype=dtype or torch.long, device="cpu").to(dev.csx())

        _library.impl(name, indices, "PrivateUse1")
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, _constructor(getattr(torch, name)))


def _default_device() -> torch.device | None:
    """The device of the innermost `with device:`; torch.get_default_device would call torch.tensor again."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _constructor(original):
    """`torch.tensor` and its kin, for which a csx device means: make it on the CPU, then move it."""

    @functools.wraps(original)
    def construct(data, *args, **kwargs):
        if (
            isinstance(data, (torch.SymFloat, torch.SymInt))
            and active_recorder is not None
            and active_recorder.host_ops
        ):
            with _python_dispatch._disable_current_modes():
                return active_recorder.host_ops.number(data, kwargs.get("dtype"))
        device = kwargs.get("device")
        if device is None and not isinstance(data, torch.Tensor):
            device = _default_device()
        if not dev.is_csx(device):
            return original(data, *args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        if isinstance(data, CsxTensor) and original.__name__ != "tensor":
            return data.to(kwargs.get("dtype") or data.dtype)
        made = original(data, *args, **(kwargs | {"device": "cpu"})).to(dev.csx())
        return made.requires_grad_() if requires_grad else made

    return construct
