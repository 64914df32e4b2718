"""Running traced steps: capture at the first call, then the program at every call."""

import logging
import types

from torch.utils import _pytree as pytree


from .step import CapturedStep

logger = logging.getLogger("cerebras.pytorch")


class StepRunner:
    """All that belongs to one traced function (or one bound method) on one backend."""

    def __init__(self, backend, name: str):
        self.backend, self.name = backend, name
        self.step: CapturedStep | None = None

    def __call__(self, fn, args, kwargs):
        backend = self.backend
        leaves, spec = pytree.tree_flatten((args, kwargs))
        first = self.step is None
        if first:
            self._capture(fn, args, kwargs)
        step = self.step
        if not backend.is_e2e_execution:
            return step.pending_results()
        if not first:
            step.check_arguments(leaves, spec)
            if backend.retrace_every_iteration:
                again = CapturedStep(fn, self.name, args, kwargs, backend.live_modules())
                step.compare(again)
                again.compiled = step.compiled
                self.step = step = again
                first = True
        returned, queued, cells = step.results(step.run(leaves, first))
        executor = backend.executor
        if executor is not None and executor.in_step:
            backend.pending_cells.extend(cells)
            for closure, closure_args, closure_kwargs, checkpoint in queued:
                if not checkpoint or executor.on_checkpoint_step:
                    executor.closures.add(closure, closure_args, closure_kwargs)
        else:
            from .closures import call

            for cell in cells:
                cell.status = "resolved"
            for closure, closure_args, closure_kwargs, _ in queued:
                call(closure, closure_args, closure_kwargs)
        return returned

    def _capture(self, fn, args, kwargs):
        from .report import ProgramReport

        backend = self.backend
        step = CapturedStep(fn, self.name, args, kwargs, backend.live_modules())
        report = ProgramReport(step.program, backend, len(backend.reports))
        if backend.is_e2e_execution or backend.compile_only and not backend.validate_only:
            from .. import backends

            result = step.compile(backends.csx.debug.compiler, backend.compile_dir)
            report.compiled(result)
        directory = backend.executor.artifact_dir if backend.executor is not None else backend.artifact_dir
        report.write(directory)
        backend.reports.append(report)
        self.step = step


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


