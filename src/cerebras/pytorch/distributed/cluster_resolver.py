"""Which tasks a run has, and which of them this process is."""

from dataclasses import dataclass
from enum import StrEnum


class TaskRole(StrEnum):
    """What a process does in a run: the client's script, streaming batches to a box, or receiving its outputs."""

    MASTER = "master"
    STREAMER = "streamer"
    RECEIVER = "receiver"


@dataclass(frozen=True)
class TaskSpec:
    """One streamer.

    Args:
        rank: its number among all streamers, 0-based.
        local_rank: its number among the streamers of its box, 0-based.
        wse_id: the box that it streams to, 0-based.
        node_name: the machine that it runs on.
    """

    rank: int
    local_rank: int
    wse_id: int
    node_name: str = "unknown"


@dataclass(frozen=True)
class ClusterSpec:
    """All streamers of a run.

    Args:
        tasks: the streamers.
        rank: the streamer that this process is.
        num_csx: boxes.
        num_workers_per_csx: streamers of each box.
    """

    tasks: tuple[TaskSpec, ...]
    rank: int
    num_csx: int
    num_workers_per_csx: int

    def __post_init__(self):
        object.__setattr__(self, "tasks", tuple(self.tasks))

    @classmethod
    def of(cls, num_csx: int, num_workers_per_csx: int, rank: int = 0, node_name: str = "unknown") -> "ClusterSpec":
        """The spec of a run whose streamers are numbered box by box, on one machine.

        Raises:
            ValueError: a count below 1, or a rank that no streamer has.
        """
        count = num_csx * num_workers_per_csx
        if num_csx < 1 or num_workers_per_csx < 1 or not 0 <= rank < count:
            raise ValueError(
                f"ClusterSpec.of(num_csx={num_csx}, num_workers_per_csx={num_workers_per_csx}, rank={rank}): "
                "the counts start at 1 and the rank is below their product."
            )
        tasks = tuple(
            TaskSpec(
                rank=number,
                local_rank=number % num_workers_per_csx,
                wse_id=number // num_workers_per_csx,
                node_name=node_name,
            )
            for number in range(count)
        )
        return cls(tasks, rank, num_csx, num_workers_per_csx)

    def task(self, rank: int | None = None) -> TaskSpec:
        """The streamer of a rank, this process's by default.

        Raises:
            ValueError: no streamer has the rank.
        """
        rank = self.rank if rank is None else rank
        for spec in self.tasks:
            if spec.rank == rank:
                return spec
        raise ValueError(
            f"No streamer has the rank {rank}; the run has the ranks {[spec.rank for spec in self.tasks]}."
        )

    @property
    def num_tasks(self) -> int:
        """Number of streamers."""
        return len(self.tasks)
