"""The CPU backend: plain eager PyTorch."""

import torch

from .base import Backend, BackendType


class CPUBackend(Backend):
    """Runs each step eagerly on the CPU.

    Args:
        artifact_dir: where reports go. Default: `cerebras_logs` in the working directory.
        max_checkpoints: keep only the newest N checkpoints that this run saves.
        mixed_precision: run the compiled module's forward under autocast (bfloat16 on CPU).
        cluster_config: accepted and without effect here.
    """

    backend_type = BackendType.CPU
    torch_device = torch.device("cpu")

    def __init__(self, artifact_dir=None, max_checkpoints=None, mixed_precision=None, cluster_config=None):
        super().__init__(artifact_dir, max_checkpoints, cluster_config)
        if mixed_precision is not None and not isinstance(mixed_precision, bool):
            raise TypeError(f"mixed_precision must be True, False or None, not {mixed_precision!r}")
        self.mixed_precision = mixed_precision

    def setup_model(self, model):
        forward = super().setup_model(model)
        if not self.mixed_precision:
            return forward

        def mixed(*args, **kwargs):
            from ..amp import autocast

            with autocast():
                return forward(*args, **kwargs)

        return mixed
