"""Data: loaders, synthetic data, and the executor's loop."""

from .data_executor import DataExecutor, current_executor
from .dataloader import DataLoader, RestartableDataLoader
from .dataset import SyntheticDataset
from .utils import Schedule, compute_num_steps

__all__ = [
    "DataExecutor",
    "DataLoader",
    "DataLoaderCheckpoint",
    "RestartableDataLoader",
    "Schedule",
    "SyntheticDataset",
    "compute_num_steps",
    "current_executor",
]


def __getattr__(name):
    if name == "DataLoaderCheckpoint":
        from ...distributed.worker_state import DataLoaderCheckpoint

        return DataLoaderCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
