"""What this process knows about its place in the run. The data plane sets it in each process that it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .cluster_resolver import ClusterSpec, TaskRole


@dataclass(frozen=True)
class TaskContext:
    """Role, number and company of a process.

    Args:
        role: what it does.
        ordinal: its number among all tasks, 0 for the client's script.
        num_tasks: number of all tasks: the client, the streamers, the receivers.
        cluster: the streamers; one on one box where none were started and the client reads its data itself.
        num_receivers: tasks that receive outputs.
    """

    role: TaskRole = TaskRole.MASTER
    ordinal: int = 0
    num_tasks: int = 1
    cluster: ClusterSpec = ClusterSpec.of(1, 1)
    num_receivers: int = 0

    def __post_init__(self):
        if not 0 <= self.ordinal < self.num_tasks:
            raise ValueError(
                f"TaskContext: ordinal={self.ordinal} of num_tasks={self.num_tasks}; use 0 to num_tasks - 1."
            )

    @classmethod
    def streamer(cls, cluster: ClusterSpec, num_receivers: int = 0) -> "TaskContext":
        """The context of the streamer `cluster.rank`. Ordinal 0 is the client, so a streamer's is its rank + 1."""
        return cls(
            role=TaskRole.STREAMER,
            ordinal=cluster.rank + 1,
            num_tasks=1 + cluster.num_tasks + num_receivers,
            cluster=cluster,
            num_receivers=num_receivers,
        )


_current = TaskContext()


def current_task_context() -> TaskContext:
    """The context of this process."""
    return _current


def set_task_context(context: TaskContext) -> TaskContext:
    """Sets the context of this process, for good; returns the one before.

    Raises:
        TypeError: something else than a TaskContext.
    """
    global _current
    if not isinstance(context, TaskContext):
        raise TypeError(f"set_task_context takes a TaskContext, got {type(context).__name__}.")
    before, _current = _current, context
    return before


@contextmanager
def task_context(context: TaskContext) -> Iterator[TaskContext]:
    """Sets the context of this process for the length of a `with` block."""
    before = set_task_context(context)
    try:
        yield context
    finally:
        set_task_context(before)
