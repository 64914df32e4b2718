"""What the three backends share."""

import enum
import logging
from collections.abc import Callable
from pathlib import Path

import torch

logger = logging.getLogger("cerebras.pytorch")

DEFAULT_ARTIFACT_DIR = "cerebras_logs"
"""In the working directory."""


class BackendType(enum.Enum):
    """The kinds of backend."""

    CPU = enum.auto()
    GPU = enum.auto()
    CSX = enum.auto()

    @staticmethod
    def from_str(backend_type: str) -> "BackendType":
        """Case does not matter. Raises ValueError for an unknown name, TypeError for another type."""
        if not isinstance(backend_type, str):
            raise TypeError(f"backend_type must be a string, one of 'CSX', 'CPU', 'GPU'; got {backend_type!r}")
        try:
            return BackendType[backend_type.upper()]
        except KeyError:
            raise ValueError(f"Unknown backend {backend_type!r}; the backends are 'CSX', 'CPU' and 'GPU'") from None

    @property
    def is_cpu(self) -> bool:
        return self is BackendType.CPU

    @property
    def is_gpu(self) -> bool:
        return self is BackendType.GPU

    @property
    def is_csx(self) -> bool:
        return self is BackendType.CSX


def as_path(value, name: str) -> Path:
    """A directory argument as a path; TypeError names the argument."""
    try:
        return Path(value)
    except TypeError:
        raise TypeError(f"{name} must be a path or None, not {value!r}") from None


class BackendDevice:
    """The device of a backend: `with backend.device:` makes new modules and tensors there."""

    def __init__(self, name: str, torch_device: torch.device):
        self.name = name
        self.torch_device = torch_device
        self.on_enter: Callable[[], None] | None = None
        self._stack: list = []

    def __enter__(self):
        if self.on_enter is not None:
            self.on_enter()
        context = self.torch_device
        context.__enter__()
        self._stack.append(context)
        return self

    def __exit__(self, *exc):
        return self._stack.pop().__exit__(*exc)

    def __str__(self):
        return self.name

    __repr__ = __str__


class Backend:
    """Base class; users get one from `cerebras.pytorch.backend("CSX" | "CPU" | "GPU", ...)`.

    Attributes:
        backend_type: a `BackendType`.
        torch_device: where its tensors are.
        artifact_dir: where reports and run artefacts go; may be set.
        executor: the running DataExecutor, else None.
    """

    backend_type: BackendType
    torch_device: torch.device
    is_tracing = False
    is_e2e_execution = True

    def __init__(self, artifact_dir=None, max_checkpoints: int | None = None, cluster_config=None):
        from ..storage import set_max_checkpoints, set_saving_process

        if max_checkpoints is not None and (isinstance(max_checkpoints, bool) or not isinstance(max_checkpoints, int)):
            raise TypeError(f"max_checkpoints must be an int or None, not {max_checkpoints!r}")
        if max_checkpoints is not None and max_checkpoints <= 0:
            raise ValueError(f"max_checkpoints must be at least 1, or None to keep all; got {max_checkpoints}")
        self.max_checkpoints = max_checkpoints
        self.artifact_dir = artifact_dir if artifact_dir is not None else Path.cwd() / DEFAULT_ARTIFACT_DIR
        self.cluster_config = None
        self.use_cs_config(cluster_config)
        self.executor = None
        self.num_executors = 0
        self.device = BackendDevice(self.backend_type.name, self.torch_device)
        set_max_checkpoints(max_checkpoints)
        set_saving_process(self.is_main_process)

    def _check_cluster_config(self, config):
        if config is None:
            return None
        from ..distributed import ClusterConfig
        from ..utils.cs_config import CSConfig

        if isinstance(config, CSConfig):
            config = config.to_cluster_config()
        if not isinstance(config, ClusterConfig):
            raise TypeError(f"cluster_config must be a cstorch.distributed.ClusterConfig, not {type(config).__name__}")
        return config

    def use_cs_config(self, config) -> None:
        """Takes a ClusterConfig, or the CSConfig that release 2.0 passed to the executor.

        CPU and GPU accept one, so that a script runs everywhere, and say that it does nothing.
        """
        self.cluster_config = self._check_cluster_config(config)
        if config is not None and not self.is_csx:
            logger.warning(
                "cluster_config has no effect on the %s backend: it configures the CSX appliance",
                self.backend_type.name,
            )

    @property
    def artifact_dir(self) -> Path:
        return self._artifact_dir

    @artifact_dir.setter
    def artifact_dir(self, value):
        path = as_path(value, "artifact_dir")
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".write_probe"
            probe.touch()
            probe.unlink()
        except OSError as e:
            raise PermissionError(
                f"artifact_dir {str(path)!r} cannot be written ({e.strerror}).\n"
                f"  Instead: pass a writable directory, cstorch.backend({self.backend_type.name!r}, artifact_dir=...)"
            ) from e
        self._artifact_dir = path

    @property
    def is_cpu(self) -> bool:
        return self.backend_type.is_cpu

    @property
    def is_gpu(self) -> bool:
        return self.backend_type.is_gpu

    @property
    def is_csx(self) -> bool:
        return self.backend_type.is_csx

    @property
    def is_main_process(self) -> bool:
        """True in the process that logs and saves."""
        return True

    @property
    def cluster(self):
        """The appliance's cluster; None where there is none."""
        return None

    @property
    def appliance(self):
        return None

    @property
    def _impl(self):
        return self

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's value on the CPU, detached."""
        return tensor.detach().cpu()

    def setup_model(self, model: torch.nn.Module):
        """Moves a module to the device; returns the forward callable."""
        model.to(self.torch_device)
        post = getattr(model, "_post_device_transfer", None)
        if callable(post):
            post()
        return model

    def send_batch(self, batch):
        """A batch on the backend's device."""
        return batch

    @property
    def num_programs(self) -> int:
        """Steps that were captured so far; none where steps run eagerly."""
        return 0

    def begin_execution(self, executor) -> None:
        """An executor starts."""
        self.executor = executor
        if not self.is_csx:
            from ..core.report import write_eager

            write_eager(self, executor.artifact_dir)

    def end_step(self, executor) -> None:
        """The body of one iteration has ended, before its closures run."""

    def end_execution(self, executor) -> None:
        self.executor = None

    def __repr__(self):
        return f"{type(self).__name__}(artifact_dir={str(self.artifact_dir)!r})"
