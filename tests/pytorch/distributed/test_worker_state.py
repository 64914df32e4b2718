"""Where a streamer stands, and where that may be asked."""

import dataclasses

import pytest

from cerebras.pytorch.distributed import get_worker_state
from cerebras.pytorch.distributed.cluster_resolver import ClusterSpec
from cerebras.pytorch.distributed.worker_state import DataLoaderCheckpoint, WorkerState, worker_state_context


def test_outside_of_state_dict_there_is_no_state():
    with pytest.raises(RuntimeError, match="state_dict"):
        get_worker_state()
    state = WorkerState(ClusterSpec.of(1, 1), 4).at(3)
    with worker_state_context(state):
        assert get_worker_state() is state
    with pytest.raises(RuntimeError, match="Call it in"):
        get_worker_state()


def test_fields_are_those_of_the_api_reference():
    assert [field.name for field in dataclasses.fields(DataLoaderCheckpoint)] == [
        "global_worker_id",
        "local_worker_id",
        "total_num_workers",
        "num_workers_per_csx",
        "num_csx",
        "wse_id",
        "appliance_step",
        "worker_step",
        "samples_streamed",
    ]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_steps_go_round_the_streamers_of_a_box(workers):
    for steps in range(8):
        states = [WorkerState(ClusterSpec.of(2, workers, rank), 4).at(steps) for rank in range(2 * workers)]
        for box in range(2):
            mine = [state for state in states if state.wse_id == box]
            counted = [sum(step % workers == state.local_worker_id for step in range(steps)) for state in mine]
            assert [state.worker_step for state in mine] == counted
            assert sum(state.samples_streamed for state in mine) == 4 * steps
    assert states[-1].total_num_workers == 2 * workers


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="-1"):
        WorkerState(ClusterSpec.of(1, 1), 4).at(-1)
