"""The CSX backend: the step captured whole, compiled once, run by the embedded appliance."""

import functools
import logging
import weakref

import torch

from .. import backends
from .base import Backend, BackendType, as_path

logger = logging.getLogger("cerebras.pytorch")


class CSXBackend(Backend):
    """Captures, compiles and runs steps.

    Args:
        artifact_dir: where reports and run artefacts go. Default: `cerebras_logs` in the working directory.
        compile_dir: cache of compiled steps. Default: /opt/cerebras/cached_compile where it exists and is writable,
            else the user's cache directory.
        compile_only: trace and compile one iteration; keep no values, run nothing.
        validate_only: trace one iteration; keep no values, compile and run nothing.
        drop_data: keep no initial values; a checkpoint must give every state tensor its value.
        max_checkpoints: keep only the newest N checkpoints that this run saves.
        log_initialization: log the replay of deferred initialisation.
        retrace_every_iteration: run the body at every iteration and report the first difference in the graph.
        use_cs_grad_accum: release 2.0's switch for gradient accumulation inside the compiled step; recorded in the
            report, without effect, since the embedded appliance runs the whole batch at once.
        cluster_config: a ClusterConfig; the embedded appliance is one box.
    """

    backend_type = BackendType.CSX

    def __init__(
        self,
        artifact_dir=None,
        compile_dir=None,
        compile_only: bool = False,
        validate_only: bool = False,
        drop_data: bool = False,
        max_checkpoints: int | None = None,
        log_initialization: bool = True,
        retrace_every_iteration: bool | None = None,
        use_cs_grad_accum: bool = False,
        cluster_config=None,
    ):
        from ..core import device
        from ..core.compiler import default_compile_dir

        flags = {
            "compile_only": compile_only, "validate_only": validate_only, "drop_data": drop_data,
            "log_initialization": log_initialization, "use_cs_grad_accum": use_cs_grad_accum,
        }  # fmt: skip
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        if retrace_every_iteration is not None and not isinstance(retrace_every_iteration, bool):
            raise TypeError(f"retrace_every_iteration must be True, False or None, not {retrace_every_iteration!r}")
        self.compile_dir = as_path(compile_dir, "compile_dir") if compile_dir is not None else default_compile_dir()
        self.torch_device = device.csx()
        super().__init__(artifact_dir, max_checkpoints, cluster_config)
        self.device.on_enter = self._follow_flags
        self._retrace = retrace_every_iteration
        self._drop_data, self._log_initialization = drop_data, log_initialization
        self.compile_only, self.validate_only = compile_only, validate_only
        self.use_cs_grad_accum = use_cs_grad_accum
        self.is_e2e_execution = not (compile_only or validate_only)
        self.modules: list[weakref.ref] = []
        self.steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.reports: list = []
        self.pending_cells: list = []
        self._printed = 0
        self._follow_flags()
        _register_with_storage()

    def _follow_flags(self) -> None:
        """The flags of initialisation count when a model is made or compiled, not only when the backend was made."""
        from ..core.tensor import tape

        tape.log = self._log_initialization and backends.csx.debug.log_initialization
        tape.validating = not self.is_e2e_execution
        if tape.validating or self.drop_data:
            tape.mode = "drop"
        else:
            tape.mode = "defer" if backends.csx.debug.lazy_initialization else "now"

    @property
    def drop_data(self) -> bool:
        return self._drop_data or backends.csx.debug.drop_data

    def _check_cluster_config(self, config):
        config = super()._check_cluster_config(config)
        if config is not None and config.num_csx > 1:
            raise NotImplementedError(
                f"num_csx={config.num_csx}: the embedded appliance is one box, and running over several is not built "
                "yet.\n  Instead: ClusterConfig(num_csx=1)"
            )
        return config

    @property
    def is_tracing(self) -> bool:
        from ..core import tensor

        return tensor.active_recorder is not None

    @property
    def retrace_every_iteration(self) -> bool:
        return backends.csx.debug.retrace_every_iteration if self._retrace is None else self._retrace

    def setup_model(self, model):
        from ..core.transfer import move_to_csx

        self._follow_flags()
        move_to_csx(model)
        if not any(known is model for known in self.live_modules()):
            self.modules.append(weakref.ref(model))
        post = getattr(model, "_post_device_transfer", None)
        if callable(post):
            post()
        return model

    def send_batch(self, batch):
        from ..core.transfer import send

        return send(batch)

    def run_step(self, key, fn, args, kwargs):
        """One call of a traced function. `key` identifies the function, also when it is a method of several objects."""
        from ..core.execution import run_step

        if self.is_e2e_execution:
            return run_step(self, key, fn, args, kwargs)
        try:
            return run_step(self, key, fn, args, kwargs)
        except Exception as e:
            from ..core.report import write_failure

            write_failure(self, fn.__qualname__, e)
            raise

    @staticmethod
    def release(cells) -> None:
        """The end of a step: its results may be read, where there are any (validate_only has none)."""
        for cell in cells:
            cell.status = "resolved" if cell.real is not None else "dropped"

    def end_step(self, executor):
        self.release(self.pending_cells)
        self.pending_cells.clear()
        if self.is_e2e_execution:
            from ..core import tensor

            if any(record is not None for record in tensor.tape.records) and self.steps:
                tensor.tape.replay()

    def begin_execution(self, executor):
        self._follow_flags()
        super().begin_execution(executor)

    @property
    def num_programs(self):
        return len(self.reports)

    def live_modules(self) -> list[torch.nn.Module]:
        return [m for m in (ref() for ref in self.modules) if m is not None]

    def end_execution(self, executor):
        super().end_execution(executor)
        if self.is_e2e_execution:
            return
        done = "validated" if self.validate_only else "compiled"
        if not self.reports:
            message = f"Nothing was {done}: no function decorated with @cstorch.trace was called in the loop."
            if executor.finished:
                raise RuntimeError(message)
            logger.warning(message)
        new, self._printed = self.reports[self._printed :], len(self.reports)
        for report in new:
            report.write(self.artifact_dir)
            print(f"{report.text()}\nThe step {report.program.name!r} was {done} without errors.", flush=True)


def _value_for_checkpoint(t):
    from ..core.tensor import CsxTensor, read

    return read(t, "save").detach().cpu() if isinstance(t, CsxTensor) else None


def _is_csx(t) -> bool:
    from ..core.tensor import CsxTensor

    return isinstance(t, CsxTensor)


def _identity(t):
    """Csx tensors over one value are one tensor in a checkpoint (tied weights, whose state_dict entries are aliases)."""
    from ..core.tensor import CsxTensor

    return id(t._cell) if isinstance(t, CsxTensor) else None


@functools.cache
def _register_with_storage() -> None:
    """Checkpoints and the creation functions learn about csx tensors, once a process."""
    from ..storage import register_tensor_resolver, set_full_factory

    register_tensor_resolver(_value_for_checkpoint, identity=_identity, owns=_is_csx)
    set_full_factory(_full)


def _full(shape, value, dtype, device):
    """`cstorch.full` and its kin on the CSX backend: a csx tensor, deferred like everything that is made there."""
    from . import use_cs

    if not use_cs() or (device is not None and torch.device(device).type != "csx"):
        return None
    return torch.full(tuple(shape), value, dtype=dtype, device="csx")
