"""How far a streamer has come, for the `state_dict` of a restartable data loader.

API page: cerebras.pytorch.distributed.get_worker_state and cerebras.pytorch.utils.data.DataLoaderCheckpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .cluster_resolver import ClusterSpec


@dataclass
class DataLoaderCheckpoint:
    """Where a streamer stands at a checkpoint step of the current run; counts start at zero when a run is resumed.

    Args:
        global_worker_id: number of this streamer among all, 0-based.
        local_worker_id: its number among those of its box, 0-based.
        total_num_workers: streamers over all boxes.
        num_workers_per_csx: streamers of each box.
        num_csx: boxes.
        wse_id: the box that it streams to, 0-based.
        appliance_step: steps that the run has done.
        worker_step: batches of those that came from this streamer; steps go round the streamers of a box.
        samples_streamed: `worker_step` times the batch size of a box.
    """

    global_worker_id: int
    local_worker_id: int
    total_num_workers: int
    num_workers_per_csx: int
    num_csx: int
    wse_id: int
    appliance_step: int
    worker_step: int
    samples_streamed: int


class WorkerState:
    """Derives a streamer's DataLoaderCheckpoint from the step of the run.

    Args:
        cluster: the streamers; its rank is this one's.
        per_box_batch_size: samples of a batch as one box gets it.
    """

    def __init__(self, cluster: ClusterSpec, per_box_batch_size: int):
        self.cluster = cluster
        self.per_box_batch_size = per_box_batch_size

    def at(self, appliance_step: int) -> DataLoaderCheckpoint:
        """The state after `appliance_step` steps of the run.

        Raises:
            ValueError: a negative step.
        """
        if appliance_step < 0:
            raise ValueError(f"WorkerState.at({appliance_step}): steps of a run start at 0.")
        task = self.cluster.task()
        per_box = self.cluster.num_workers_per_csx
        # Step s (0-based) comes from the streamer with local rank s % per_box.
        worker_step = (appliance_step - task.local_rank + per_box - 1) // per_box
        return DataLoaderCheckpoint(
            global_worker_id=task.rank,
            local_worker_id=task.local_rank,
            total_num_workers=self.cluster.num_tasks,
            num_workers_per_csx=per_box,
            num_csx=self.cluster.num_csx,
            wse_id=task.wse_id,
            appliance_step=appliance_step,
            worker_step=worker_step,
            samples_streamed=worker_step * self.per_box_batch_size,
        )


_current: ContextVar[DataLoaderCheckpoint | None] = ContextVar("worker_state", default=None)


@contextmanager
def worker_state_context(state: DataLoaderCheckpoint) -> Iterator[DataLoaderCheckpoint]:
    """Makes `get_worker_state` valid in the `with` block. For the data plane, around a loader's `state_dict`."""
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)


def get_worker_state() -> DataLoaderCheckpoint:
    """How far this streamer has come in the current run, at a checkpoint step.

    Valid inside the `state_dict` of a data loader with the RestartableDataLoader protocol, while a checkpoint is taken.

    Raises:
        RuntimeError: called anywhere else.

    API page: cerebras.pytorch.distributed.get_worker_state
    """
    state = _current.get()
    if state is None:
        raise RuntimeError(
            "get_worker_state() was called outside of a data loader's state_dict(), where it has no meaning: the counts "
            "are known at a checkpoint step only. Call it in the state_dict() of a loader with the "
            "RestartableDataLoader protocol; elsewhere count the batches yourself."
        )
    return state
