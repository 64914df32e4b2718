"""The GPU backend: eager PyTorch on CUDA, over several processes with torch.distributed."""

import os

import torch

from .base import Backend, BackendType, logger


class GPUBackend(Backend):
    """Runs each step eagerly on a CUDA device.

    Args:
        artifact_dir: where reports go. Default: `cerebras_logs` in the working directory.
        enable_distributed: set torch.distributed up and wrap compiled modules in DistributedDataParallel. The script
            must have been started with torchrun.
        main_process_id: rank of the process that logs and saves.
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
        super().__init__(artifact_dir, max_checkpoints, cluster_config)
        self.parallel = DataParallel(
            self.torch_device, enable_distributed, main_process_id, dist_backend, init_method, sync_batchnorm
        )
        self._ignore_cluster_config()

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

        return map_torch_tensors(lambda t: t.to(self.torch_device, non_blocking=True), batch)


class DataParallel:
    """The distributed half of the GPU backend; knows no CUDA, so that it is tested on CPU with gloo."""

    def __init__(self, device, enabled, main_process_id, dist_backend, init_method, sync_batchnorm):
        for name, value in (("enable_distributed", enabled), ("sync_batchnorm", sync_batchnorm)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        self.device, self.enabled, self.sync_batchnorm = device, enabled, sync_batchnorm
        self.main_process_id = main_process_id
        self.rank, self.world_size = 0, 1
        if not enabled:
            if sync_batchnorm:
                logger.info("sync_batchnorm has no effect without enable_distributed: there is one process")
            return
        import torch.distributed as dist

        if not dist.is_available():
            raise RuntimeError("enable_distributed=True needs a torch built with torch.distributed")
        if init_method is None and "RANK" not in os.environ:
            raise RuntimeError(
                "enable_distributed=True, but this process was not started by torchrun (RANK is not set).\n"
                "  Instead: torchrun --nproc-per-node=N script.py, or pass init_method and set RANK and WORLD_SIZE"
            )
        if not dist.is_initialized():
            rank = {k: int(os.environ[v]) for k, v in (("rank", "RANK"), ("world_size", "WORLD_SIZE")) if v in os.environ}
            if init_method is None:
                rank = {}
            dist.init_process_group(backend=dist_backend, init_method=init_method, **rank)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if not 0 <= main_process_id < self.world_size:
            raise ValueError(f"main_process_id must be a rank below {self.world_size}, got {main_process_id}")

    @property
    def is_main(self) -> bool:
        return self.rank == self.main_process_id

    def wrap(self, model: torch.nn.Module):
        """The module's forward, with gradients averaged over the processes in backward."""
        if not self.enabled:
            return model
        if self.sync_batchnorm:
            # in place, so that the user's module is the one that is trained
            for name, child in list(model.named_children()):
                setattr(model, name, torch.nn.SyncBatchNorm.convert_sync_batchnorm(child))
        if not any(p.requires_grad for p in model.parameters()):
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
