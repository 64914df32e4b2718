"""Where this process stands in a run: its role, its number, and how many others there are.

The functions answer from the process's TaskContext, which the data plane sets in the processes that it starts, and
from torch.distributed where that is initialised.

API page: cerebras.pytorch.distributed
"""

import os

import torch

from .cluster_config import ClusterConfig
from .cluster_resolver import ClusterSpec, TaskRole, TaskSpec
from .task_context import TaskContext, current_task_context, set_task_context, task_context
from .worker_cache import SSD_LIMIT, WORKER_CACHE_ROOT, get_dir_size, hit_worker_cache_limit
from .worker_state import DataLoaderCheckpoint, WorkerState, get_worker_state

__all__ = [
    "ClusterConfig",
    "ClusterSpec",
    "DataLoaderCheckpoint",
    "SSD_LIMIT",
    "ServiceResolver",
    "TaskContext",
    "TaskRole",
    "TaskSpec",
    "WORKER_CACHE_ROOT",
    "WorkerState",
    "current_task_context",
    "get_dir_size",
    "get_ordinal",
    "get_rank",
    "get_streaming_batch_size",
    "get_streaming_rank",
    "get_world_size",
    "get_worker_state",
    "hit_worker_cache_limit",
    "is_master_ordinal",
    "is_receiver",
    "is_streamer",
    "num_receivers",
    "num_streamers",
    "num_tasks",
    "service_resolver",
    "set_task_context",
    "task_context",
]


def _process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_streamer() -> bool:
    """Whether this process streams batches to a box; False in the client's script and in torch's loader workers."""
    return current_task_context().role is TaskRole.STREAMER


def is_receiver() -> bool:
    """Whether this process receives outputs of a box."""
    return current_task_context().role is TaskRole.RECEIVER


def num_streamers() -> int:
    """Processes that stream batches, over all boxes; 1 where the client reads its data itself."""
    return current_task_context().cluster.num_tasks


def num_receivers() -> int:
    """Processes that receive outputs."""
    return current_task_context().num_receivers


def get_streaming_rank() -> int:
    """Number of this streamer among all, 0-based; 0 where the client reads its data itself."""
    return current_task_context().cluster.rank


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """Samples of each batch that a streamer yields: the batch of a step, shared out evenly over the boxes.

    Args:
        effective_batch_size: samples of a step over all boxes, >= 1.
        global_rank: the streamer asked about, this one by default; all get the same.

    Raises:
        ValueError: a size that does not divide evenly, or a rank that no streamer has.
        TypeError: a size that is not an int.
    """
    if isinstance(effective_batch_size, bool) or not isinstance(effective_batch_size, int):
        raise TypeError(f"get_streaming_batch_size: effective_batch_size={effective_batch_size!r}; use an int >= 1.")
    cluster = current_task_context().cluster
    if global_rank is not None:
        cluster.task(global_rank)
    if effective_batch_size < 1:
        raise ValueError(f"get_streaming_batch_size: effective_batch_size={effective_batch_size}; use an int >= 1.")
    share, rest = divmod(effective_batch_size, cluster.num_csx)
    if rest:
        raise ValueError(
            f"get_streaming_batch_size: a batch of {effective_batch_size} does not divide evenly over "
            f"num_csx={cluster.num_csx} boxes. Use a multiple, such as {max(share, 1) * cluster.num_csx}."
        )
    return share


def get_ordinal() -> int:
    """Number of this process among all tasks, 0-based; torch.distributed's rank where that is initialised."""
    return torch.distributed.get_rank() if _process_group() else current_task_context().ordinal


def num_tasks() -> int:
    """Number of all tasks; torch.distributed's world size where that is initialised."""
    return torch.distributed.get_world_size() if _process_group() else current_task_context().num_tasks


get_rank = get_ordinal
get_world_size = num_tasks


def is_master_ordinal(local: bool = False) -> bool:
    """Whether this process is the one to log, download and save.

    Args:
        local: ask for the first process of each machine in place of the first of all (torchrun's LOCAL_RANK).
    """
    if _process_group():
        rank = os.environ.get("LOCAL_RANK") if local else None
        return (torch.distributed.get_rank() if rank is None else int(rank)) == 0
    return current_task_context().role is TaskRole.MASTER


class ServiceResolver:
    """The run as one object, for code that asks for more than a number."""

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The streamers, with the rank of this process."""
        return current_task_context().cluster

    @property
    def role(self) -> TaskRole:
        """What this process does."""
        return current_task_context().role

    def assumes_role(self, role: TaskRole) -> bool:
        """Whether this process has the role."""
        return self.role is TaskRole(role)

    def streamer_ordinals(self) -> list[int]:
        """Ordinals of the streamers; empty where the client reads its data itself."""
        context = current_task_context()
        count = context.num_tasks - 1 - context.num_receivers
        return list(range(1, 1 + max(count, 0)))

    def receiver_ordinals(self) -> list[int]:
        """Ordinals of the receivers, which follow the streamers."""
        context = current_task_context()
        return list(range(context.num_tasks - context.num_receivers, context.num_tasks))


_resolver = ServiceResolver()


def service_resolver() -> ServiceResolver:
    """The resolver of this process; it follows the TaskContext."""
    return _resolver
