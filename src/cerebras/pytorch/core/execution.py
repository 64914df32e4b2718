"""Running traced steps: capture at the first call, then the program at every call."""

import logging
import types

import torch
from torch.utils import _pytree as pytree

from . import tensor as tensor_module
from .step import CapturedStep

logger = logging.getLogger("cerebras.pytorch")


class StepRunner:
    """All that belongs to one traced function (or one bound method) on one backend.

    A step has one program for each combination of what Python decides and a graph cannot follow: whether its modules
    are in training mode, which parameters have a gradient when it starts, and the shapes of the batches of an executor.
    Within one executor shapes must not change.
    """

    def __init__(self, backend, name: str):
        self.backend, self.name = backend, name
        self.steps: dict[tuple, list[CapturedStep]] = {}
        self.step: CapturedStep | None = None
        self._executor = None

    def __call__(self, fn, args, kwargs):
        backend = self.backend
        leaves, spec = pytree.tree_flatten((args, kwargs))
        first = self._select(leaves, spec)
        if first:
            self._capture(fn, args, kwargs)
        step = self.step
        if not backend.is_e2e_execution:
            returned, cells = step.pending_results()
            if backend.executor is not None and backend.executor.in_step:
                backend.pending_cells.extend(cells)
            else:
                backend.release(cells)
            return returned
        if not first:
            step.check_arguments(leaves, spec)
            if not step.applicable():
                first = self._choose(leaves, spec)
                if first:
                    self._capture(fn, args, kwargs)
                else:
                    self.step.check_arguments(leaves, spec)
                step = self.step
        if not first:
            if backend.retrace_every_iteration:
                again = CapturedStep(fn, self.name, args, kwargs, backend.live_modules())
                step.compare(again)
                again.compiled, again.signature = step.compiled, step.signature
                self._keep(again, instead_of=step)
                step, first = again, True
        returned, queued, cells = step.results(step.run(leaves, first))
        executor = backend.executor
        if executor is not None and executor.in_step and not executor.closures.running:
            tensor_module.pending_cells = backend.pending_cells
            backend.pending_cells.extend(cells)
            for closure, closure_args, closure_kwargs, checkpoint in queued:
                if not checkpoint or executor.on_checkpoint_step:
                    executor.closures.add(closure, closure_args, closure_kwargs)
        else:
            from .closures import call

            backend.release(cells)
            for closure, closure_args, closure_kwargs, _ in queued:
                call(closure, closure_args, closure_kwargs)
        return returned

    def _select(self, leaves, spec) -> bool:
        """Chooses the program of this call; True where it must be captured first."""
        executor = self.backend.executor
        if self.step is not None and executor is self._executor and self.step.in_mode():
            return False
        self._executor = executor
        return self._choose(leaves, spec)

    def _choose(self, leaves, spec) -> bool:
        programs = self.steps.get((_signature(leaves), spec), ())
        self.step = next((step for step in programs if step.in_mode() and step.applicable()), None)
        return self.step is None

    def _keep(self, step, instead_of=None):
        programs = self.steps.setdefault((step.signature, step.spec), [])
        if instead_of is not None:
            programs.remove(instead_of)
        programs.append(step)
        self.step = step

    def _capture(self, fn, args, kwargs):
        from .report import ProgramReport

        backend = self.backend
        step = CapturedStep(fn, self.name, args, kwargs, backend.live_modules())
        step.signature = _signature(pytree.tree_leaves((args, kwargs)))
        report = ProgramReport(step.program, backend, len(backend.reports))
        if backend.is_e2e_execution or backend.compile_only and not backend.validate_only:
            from .. import backends

            result = step.compile(backends.csx.debug.compiler, backend.compile_dir)
            report.compiled(result)
        directory = backend.executor.artifact_dir if backend.executor is not None else backend.artifact_dir
        report.write(directory)
        backend.reports.append(report)
        self._keep(step)


def _signature(leaves) -> tuple:
    """Shapes and dtypes of the tensors among the arguments of a call."""
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))


def run_step(backend, key, fn, args, kwargs):
    """One call of a traced function; methods are told apart by their object."""
    runners = backend.steps.get(key)
    if runners is None:
        runners = backend.steps[key] = {}
    owner = id(args[0]) if args and _is_method_of(fn, args[0]) else 0
    runner = runners.get(owner)
    if runner is None:
        runner = runners[owner] = StepRunner(backend, fn.__qualname__)
    return runner(fn, args, kwargs)


def _is_method_of(fn, candidate) -> bool:
    """True where `fn`, a plain function, is what a class of `candidate` holds under its name."""
    if not isinstance(fn, types.FunctionType) or "." not in fn.__qualname__:
        return False
    return hasattr(type(candidate), fn.__name__)
