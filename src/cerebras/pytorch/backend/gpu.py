"""The GPU backend: eager PyTorch on CUDA, over several processes with torch.distributed."""

import atexit
import logging
import os
from pathlib import Path

import torch

from .base import DEFAULT_ARTIFACT_DIR, Backend, BackendType, as_path, logger


class GPUBackend(Backend):
    """Runs each step eagerly on a CUDA device.

    Args:
        artifact_dir: where reports go. Default: `cerebras_logs` in the working directory.
        enable_distributed: set torch.distributed up and wrap compiled modules in DistributedDataParallel. The script
            must have been started with torchrun.
        main_process_id: rank of the process that logs and saves. In the others `cstorch.save` does nothing, warnings
            and errors are logged only, and artefacts go to `artifact_dir/rank_<rank>`.
        dist_backend: torch.distributed backend.
        init_method: as for torch.distributed.init_process_group; default: torchrun's environment.
        sync_batchnorm: convert batch norm layers to SyncBatchNorm.
        max_checkpoints: keep only the newest N checkpoints that this run saves.
        cluster_config: accepted and without effect here.

    Raises:
        RuntimeError: no CUDA device, or enable_distributed without torchrun.
    """

    backend_type = BackendType.GPU

    def __init__(
        self,
        artifact_dir=None,
        enable_distributed: bool = False,
        main_process_id: int = 0,
        dist_backend: str = "nccl",
        init_method: str | None = None,
        sync_batchnorm: bool = False,
        max_checkpoints=None,
        cluster_config=None,
    ):
        self.torch_device = self._device()
        self.parallel = DataParallel(
            self.torch_device, enable_distributed, main_process_id, dist_backend, init_method, sync_batchnorm
        )
        super().__init__(self.parallel.own_directory(artifact_dir), max_checkpoints, cluster_config)

    @staticmethod
    def _device() -> torch.device:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "The GPU backend needs a CUDA device and torch finds none.\n"
                "  Instead: cstorch.backend('CPU') runs the same script eagerly, cstorch.backend('CSX') compiles the "
                "whole step, for this machine's processor"
            )
        index = int(os.environ.get("LOCAL_RANK", 0))
        if index >= torch.cuda.device_count():
            raise RuntimeError(
                f"LOCAL_RANK is {index} and there are {torch.cuda.device_count()} CUDA devices: start at most one "
                "process a device (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    @property
    def is_main_process(self) -> bool:
        return self.parallel.is_main

    def setup_model(self, model):
        super().setup_model(model)
        return self.parallel.wrap(model)

    def send_batch(self, batch):
        from ..utils.nest import map_torch_tensors

        return map_torch_tensors(lambda _, t: t.to(self.torch_device, non_blocking=True), batch)


def _leave() -> None:
    """At exit: the process group's threads end before the interpreter does."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class DataParallel:
    """The distributed half of the GPU backend; knows no CUDA, so that it is tested on CPU with gloo."""

    def __init__(self, device, enabled, main_process_id, dist_backend, init_method, sync_batchnorm):
        for name, value in (("enable_distributed", enabled), ("sync_batchnorm", sync_batchnorm)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        if isinstance(main_process_id, bool) or not isinstance(main_process_id, int):
            raise TypeError(f"main_process_id must be an int, a rank, not {main_process_id!r}")
        for name, value, allowed in (("dist_backend", dist_backend, str), ("init_method", init_method, str | None)):
            if not isinstance(value, allowed):
                raise TypeError(f"{name} must be a str{' or None' if allowed is not str else ''}, not {value!r}")
        self.device, self.enabled, self.sync_batchnorm = device, enabled, sync_batchnorm
        self.main_process_id = main_process_id
        self.rank, self.world_size = 0, 1
        if enabled:
            self._join(dist_backend, init_method)
        elif sync_batchnorm:
            logger.info("sync_batchnorm has no effect without enable_distributed: there is one process")
        if not 0 <= main_process_id < self.world_size:
            raise ValueError(f"main_process_id must be a rank below {self.world_size}, got {main_process_id}")
        if not self.is_main:
            logger.setLevel(logging.WARNING)

    def _join(self, dist_backend, init_method) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            raise RuntimeError("enable_distributed=True needs a torch built with torch.distributed")
        if not dist.is_initialized():
            missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
            if missing:
                raise RuntimeError(
                    f"enable_distributed=True, but this process was not started by torchrun "
                    f"({' and '.join(missing)} not set).\n"
                    "  Instead: torchrun --nproc-per-node=N script.py, or set RANK and WORLD_SIZE and pass init_method"
                )
            ranks = {}
            if init_method is not None:
                ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
            dist.init_process_group(backend=dist_backend, init_method=init_method, **ranks)
            atexit.register(_leave)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_main(self) -> bool:
        return self.rank == self.main_process_id

    def own_directory(self, artifact_dir):
        """Where this process writes: processes that share a directory would take each other's names."""
        if self.is_main:
            return artifact_dir
        root = as_path(artifact_dir, "artifact_dir") if artifact_dir is not None else Path.cwd() / DEFAULT_ARTIFACT_DIR
        return root / f"rank_{self.rank}"

    def synchronised(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module with its batch norm layers over all processes, where that was asked for.

        In place, apart from a model that is itself one batch norm layer: there the tensors are shared.
        """
        if not self.sync_batchnorm:
            return model
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)

    def wrap(self, model: torch.nn.Module):
        """The module's forward, with gradients averaged over the processes in backward."""
        if not self.enabled:
            return model
        model = self.synchronised(model)
        if not any(p.requires_grad for p in model.parameters()):
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
