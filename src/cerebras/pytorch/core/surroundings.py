"""What a step's body reaches beside its arguments: tensors that it rebinds by name, and Python numbers that it reads.

Notes:
1. `self.ema = 0.9 * self.ema + x` makes a new tensor; the graph needs one place for the state. A place that the body
   rebinds gets a tensor of its own (a copy, so that other names of the old tensor keep the old value, as in eager
   PyTorch), and the new value is written there at the end of the step.
2. A Python number that the body reads from a closure, a global, an attribute or a constant key is part of the graph.
   Which ones it reads is found in the bytecode of the functions that the body names; each is compared at every step.
"""

import contextlib
import dis
import functools
import sys
import sysconfig
import types
import warnings
from dataclasses import dataclass

import torch

from .errors import _OURS, _TORCH, FrozenValueError, Site, StaticGraphError
from .tensor import CsxTensor, aten

_STDLIB = sysconfig.get_paths()["stdlib"]
_DEPTH, _LENGTH = 6, 1000  # how deep and how wide containers are searched


@dataclass(eq=False)
class _Slot:
    """A place that holds a tensor: a dict's or list's entry, or a closure's cell (key None)."""

    label: str
    space: object
    key: object
    old: CsxTensor

    def get(self):
        if self.key is None:
            with contextlib.suppress(ValueError):
                return self.space.cell_contents
            return None
        try:
            return self.space[self.key]
        except (KeyError, IndexError):
            return None

    def put(self, value):
        if self.key is None:
            self.space.cell_contents = value
        else:
            self.space[self.key] = value


class Rebinding:
    """Finds the places, and settles them after the body."""

    def __init__(self, fn, args, modules):
        self.slots: list[_Slot] = []
        self._seen: dict[int, object] = {}
        self._attributes: list[tuple] = []
        self._spaces: set[int] = set()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list = []
        for module in modules:
            self._visit(module, type(module).__name__, 0)
        self._visit(fn, "", 0)
        for value in args:
            self._visit(value, type(value).__name__, 0)

    def watch(self, space, label: str) -> None:
        """Adds the tensors of one dict or list."""
        if id(space) in self._spaces:
            return
        self._spaces.add(id(space))
        self._seen.setdefault(id(space), space)
        for key, value in list(space.items() if isinstance(space, dict) else enumerate(space)):
            if isinstance(value, CsxTensor):
                self.slots.append(_Slot(f"{label}[{key!r}]", space, key, value))

    def _visit(self, value, label, depth):
        if depth > _DEPTH or isinstance(value, (torch.Tensor, str, int, float, bytes, type(None))):
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__, label, depth)
            self._visit(value.__self__, label or "self", depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part, label, depth)
        elif isinstance(value, torch.nn.Module):
            for name, sub in value.named_modules():
                self._seen[id(sub)] = sub
                self._holder(sub, name or label or type(sub).__name__, depth)
        elif isinstance(value, (dict, list)):
            if len(value) <= _LENGTH:
                self.watch(value, label)
                for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                    self._visit(item, f"{label}[{key!r}]", depth + 1)
        elif isinstance(value, tuple):
            for i, item in enumerate(value[:_LENGTH]):
                self._visit(item, f"{label}[{i}]", depth + 1)
        elif type(value).__name__ == "CompiledModule" and type(value).__module__.startswith("cerebras."):
            self._visit(value._module, label, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, _schedulers()):
            self.schedulers.append(value)
            for part in (vars(value).get("optimizer"), *vars(value).get("_schedulers", ())):
                self._visit(part, label, depth + 1)
        elif not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
            if _is_users(type(value)) or depth == 0:
                self._holder(value, label or type(value).__name__, depth)

    def _holder(self, owner, label, depth):
        spaces = [vars(owner)]
        if isinstance(owner, torch.nn.Module):
            spaces += [owner._buffers, owner._parameters]
        for space in spaces:
            if id(space) in self._spaces:
                continue
            self._spaces.add(id(space))
            for key, value in list(space.items()):
                if isinstance(value, CsxTensor):
                    self.slots.append(_Slot(f"{label}.{key}", space, key, value))
                elif key not in ("_modules", "_buffers", "_parameters"):
                    self._visit(value, f"{label}.{key}", depth + 1)
        self._attributes.append((label, spaces, {k for s in spaces for k, v in s.items() if isinstance(v, CsxTensor)}))

    def _function(self, function, depth):
        code = function.__code__
        if code.co_filename.startswith(_OURS):
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            with contextlib.suppress(ValueError):
                value = cell.cell_contents
                if isinstance(value, CsxTensor):
                    self.slots.append(_Slot(name, cell, None, value))
                else:
                    self._visit(value, name, depth + 1)
        if not _is_library_file(code.co_filename):
            space = function.__globals__
            for name in {n for c in _codes(code) for n in c.co_names}:
                value = space.get(name)
                if isinstance(value, CsxTensor):
                    self.slots.append(_Slot(name, space, name, value))
                elif value is not None:
                    self._visit(value, name, depth + 1)

    def restore(self) -> None:
        """Puts the tensors of before the body back."""
        for slot in self.slots:
            if slot.get() is not slot.old:
                with contextlib.suppress(IndexError):
                    slot.put(slot.old)
        for _, spaces, names in self._attributes:
            for space in spaces:
                for key in [k for k, v in space.items() if _is_pending(v) and k not in names]:
                    del space[key]

    def rebound(self) -> list[_Slot]:
        """The places that hold another value than before."""
        found = []
        for slot in self.slots:
            now = slot.get()
            if isinstance(now, CsxTensor) and now is not slot.old and now._cell is not slot.old._cell:
                found.append(slot)
        return found

    def own(self, slots: list[_Slot], owned: set) -> bool:
        """Gives each place a tensor of its own; False where all have one. Call after `restore`."""
        again = False
        for slot in slots:
            key = (id(slot.space), slot.key)
            if key in owned:
                continue
            owned.add(key)
            with torch.no_grad():
                mine = torch.Tensor.clone(slot.old).detach()
            mine._cell.name = slot.old._cell.name
            mine.requires_grad_(slot.old.requires_grad and slot.old.is_leaf)
            slot.put(mine)
            again = True
        return again

    def settle(self, recorder) -> None:
        """Records the write of every new value to its place; all are read before the first is written."""
        moves = []
        for slot in self.rebound():
            now, old = slot.get(), slot.old
            if now.shape != old.shape or now.dtype != old.dtype:
                raise StaticGraphError(
                    f"The step rebinds {slot.label!r} from {tuple(old.shape)} {old.dtype} to "
                    f"{tuple(now.shape)} {now.dtype}.",
                    "keep state tensors at one shape and dtype",
                )
            target, value = recorder.node_of(old), recorder.node_of(now)
            copy = recorder.graph.call_function(aten.clone.default, (value,))
            copy.meta.update(value.meta)
            moves.append((slot, target, copy))
        for slot, target, value in moves:
            node = recorder.graph.call_function(aten.copy_.default, (target, value))
            node.meta.update(value.meta)
            slot.put(slot.old)
        for label, spaces, names in self._attributes:
            for space in spaces:
                for key, value in space.items():
                    if _is_pending(value) and key not in names:
                        warnings.warn(
                            f"The traced step keeps a tensor it made in {label}.{key}; in later iterations it is not "
                            "updated and cannot be read. Create it as a buffer before the step, or return it.",
                            stacklevel=2,
                        )


def _schedulers() -> tuple:
    from ..optim.scheduler import Scheduler

    return torch.optim.lr_scheduler.LRScheduler, Scheduler


def _is_pending(value) -> bool:
    return isinstance(value, CsxTensor) and value._cell.status == "pending"


def _codes(code):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _is_library_file(name: str) -> bool:
    if name.startswith((_TORCH, _OURS)) or name.startswith("<"):
        return True
    return name.startswith(_STDLIB) and "site-packages" not in name


def _is_users(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not _is_library_file(file)


# Python numbers

_METHOD = object()


@functools.cache
def _chains(code) -> tuple:
    """What a code object loads: ((kind, name, ((attribute or key, how), ...), line), ...)."""
    found, chain, const, line = [], None, None, code.co_firstlineno

    def flush():
        nonlocal chain
        if chain is not None:
            found.append((chain[0], chain[1], tuple(chain[2]), chain[3]))
        chain = None

    for i in dis.get_instructions(code):
        op = i.opname
        position = getattr(i, "positions", None)
        line = (position.lineno if position is not None else None) or line
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            flush()
            chain = ["global", i.argval, [], line]
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            flush()
            chain = ["free", i.argval, [], line]
        elif op.startswith("LOAD_FAST"):
            flush()
            name = i.argval[-1] if isinstance(i.argval, tuple) else i.argval
            chain = ["local", name, [], line]
        elif op == "LOAD_METHOD" or op == "LOAD_ATTR" and sys.version_info >= (3, 12) and i.arg & 1:
            if chain is not None:
                chain[2].append((i.argval, "method"))
            flush()
        elif op == "LOAD_ATTR":
            if chain is not None:
                chain[2].append((i.argval, "attribute"))
        elif op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            const = (i.argval,)
            continue
        elif (op == "BINARY_SUBSCR" or op == "BINARY_OP" and i.argrepr == "[]") and const is not None:
            if chain is not None:
                chain[2].append((const[0], "key"))
        elif op not in ("CACHE", "COPY_FREE_VARS", "RESUME", "NOP", "PUSH_NULL", "EXTENDED_ARG"):
            flush()
        const = None
    flush()
    return tuple(found)


class FrozenNames:
    """The Python numbers that the body reads; `check` raises where one differs from the capture."""

    def __init__(self, fn, modules, args=()):
        self._seen: set = set()
        self._keep: list = []
        self.watched: list[tuple] = []  # (label, container, key, value, site)
        self._places: set = set()
        for module in modules:
            self._module(module)
        code = getattr(fn, "__code__", None)
        if (
            args
            and code is not None
            and getattr(type(args[0]), fn.__name__, None) is not None
            and _is_users(type(args[0]))
        ):
            self._function(fn, args[0])  # a method, decorated in its class
        self._callable(fn)
        self._compile()

    def _callable(self, value):
        if isinstance(value, types.MethodType):
            self._function(value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            self._function(value, None)
        elif isinstance(value, functools.partial):
            self._callable(value.func)
        elif isinstance(value, torch.nn.Module):
            self._module(value)
        elif type(value).__name__ == "CompiledModule" and type(value).__module__.startswith("cerebras."):
            self._module(value._module)

    def _module(self, module):
        for sub in module.modules():
            forward = type(sub).forward
            if isinstance(forward, types.FunctionType):
                self._function(forward, sub)

    def _function(self, function, owner):
        code = function.__code__
        key = (code, id(owner))
        if key in self._seen or code.co_filename.startswith(_OURS):
            return
        self._seen.add(key)
        self._keep.append(owner)
        library = _is_library_file(code.co_filename)
        if library and not (isinstance(owner, torch.nn.Module) and code.co_name == "forward"):
            # a decorator of torch's: what it wraps is in its closure
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):
                    if isinstance(cell.cell_contents, types.FunctionType):
                        self._function(cell.cell_contents, owner)
            return
        cells = dict(zip(code.co_freevars, function.__closure__ or ()))
        first = code.co_varnames[0] if code.co_argcount else None
        for c in _codes(code):
            for kind, name, steps, line in _chains(c):
                site = Site(c.co_filename, line, c.co_name)
                if kind == "global" and not library:
                    space = function.__globals__
                    if name in space:
                        self._follow(name, space, name, space[name], steps, site)
                elif kind == "free" and name in cells:
                    with contextlib.suppress(ValueError):
                        self._follow(name, cells[name], None, cells[name].cell_contents, steps, site)
                elif name == first and owner is not None and kind in ("local", "free"):
                    self._follow(name, None, None, owner, steps, site)

    def _follow(self, label, space, key, value, steps, site):
        for attribute, how in steps:
            if type(value).__name__ == "CompiledModule" and type(value).__module__.startswith("cerebras."):
                value = value._module
            if isinstance(value, (torch.Tensor, str, int, float)):
                break
            if isinstance(value, (torch.optim.Optimizer, *_schedulers())):
                return  # lifted
            if how == "key":
                if type(value) not in (dict, list) and not (isinstance(value, dict) and key != "state"):
                    return
                try:
                    space, key, value = value, attribute, value[attribute]
                except (KeyError, IndexError, TypeError):
                    return
                label = f"{label}[{attribute!r}]"
                continue
            own = getattr(value, "__dict__", {})
            if how == "method":
                method = next((vars(c)[attribute] for c in type(value).__mro__ if attribute in vars(c)), None)
                if isinstance(own, dict | types.MappingProxyType) and attribute in own:
                    self._callable(own[attribute])
                elif isinstance(method, types.FunctionType) and _is_users(type(value)):
                    self._function(method, value)
                return
            label = f"{label}.{attribute}"
            if attribute in own:
                space, key, value = own, attribute, own[attribute]
                continue
            if isinstance(value, torch.nn.Module):
                value = next(
                    (s[attribute] for s in (value._modules, value._buffers, value._parameters) if attribute in s), None
                )
                if value is None:
                    return
                continue
            in_class = next(((vars(c), vars(c)[attribute]) for c in type(value).__mro__ if attribute in vars(c)), None)
            if in_class is None:
                return
            space, found = in_class
            key = attribute
            if isinstance(found, property):
                if isinstance(found.fget, types.FunctionType) and _is_users(type(value)):
                    self._function(found.fget, value)
                return
            value = found
        if _is_scalar(value):
            place = (id(space), key)
            if space is not None and place not in self._places:
                self._places.add(place)
                self._keep.append(space)
                self.watched.append((label, space, key, value, site))
        else:
            if isinstance(value, types.FunctionType | types.MethodType | functools.partial | torch.nn.Module) or (
                type(value).__name__ == "CompiledModule"
            ):
                self._callable(value)

    def _compile(self):
        lines, env = ["def changed():"], {}
        for i, (_, space, key, value, _) in enumerate(self.watched):
            env[f"d{i}"], env[f"v{i}"] = space, value
            get = f"d{i}.cell_contents" if key is None else f"d{i}[{key!r}]"
            lines.append(f"    if {get} is not v{i} and (type({get}) is not type(v{i}) or {get} != v{i}): return True")
        lines.append("    return False")
        exec(compile("\n".join(lines), "<frozen numbers>", "exec"), env)
        self._changed = env["changed"]

    def settle(self) -> None:
        """After the body: what it filled itself (`if self.mask is None: self.mask = ...`) is its own affair."""
        self.watched = [w for w in self.watched if w[3] is not None or _now(w[1], w[2]) is None]
        self._compile()

    def check(self, step_name) -> None:
        try:
            if not self._changed():
                return
        except (KeyError, IndexError, ValueError):
            pass
        for label, space, key, value, site in self.watched:
            now = _now(space, key)
            if now is not value and (type(now) is not type(value) or now != value):
                now = f"a tensor of shape {tuple(now.shape)}" if isinstance(now, torch.Tensor) else repr(now)
                raise FrozenValueError(
                    f"The traced step {step_name!r} reads the Python variable {label!r}, which was {value!r} when the "
                    f"step was captured and is {now} now; the graph holds the first value.",
                    f"pass {label!r} to the traced function as an argument (numbers that are passed are not frozen), "
                    "or keep it in a tensor; count steps in the loop's body",
                    site,
                )


def _now(space, key):
    try:
        return space.cell_contents if key is None else space[key]
    except (KeyError, IndexError, ValueError):
        return None


def _is_scalar(value) -> bool:
    return value is None or isinstance(value, (int, float, bool, str))
