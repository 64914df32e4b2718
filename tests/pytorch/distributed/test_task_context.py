"""Roles, ranks and batch sizes, in the client and in the processes of the data plane."""

import os

import pytest
import torch

import cerebras.pytorch.distributed as dist
from cerebras.pytorch.distributed.cluster_resolver import ClusterSpec, TaskRole, TaskSpec
from cerebras.pytorch.distributed.task_context import TaskContext, task_context


def test_the_client_alone_is_the_master_and_reads_its_own_data():
    assert dist.is_master_ordinal() and not dist.is_streamer() and not dist.is_receiver()
    assert (dist.get_rank(), dist.get_ordinal(), dist.get_streaming_rank()) == (0, 0, 0)
    assert (dist.get_world_size(), dist.num_tasks(), dist.num_streamers(), dist.num_receivers()) == (1, 1, 1, 0)
    assert dist.get_streaming_batch_size(7) == 7
    assert dist.service_resolver().cluster_spec.task() == TaskSpec(rank=0, local_rank=0, wse_id=0, node_name="unknown")
    assert dist.service_resolver().streamer_ordinals() == []


def test_a_streamer_knows_its_box_and_its_company():
    cluster = ClusterSpec.of(num_csx=2, num_workers_per_csx=3, rank=4)
    with task_context(TaskContext.streamer(cluster, num_receivers=2)):
        assert dist.is_streamer() and not dist.is_master_ordinal()
        assert (dist.get_streaming_rank(), dist.num_streamers()) == (4, 6)
        assert (dist.get_ordinal(), dist.num_tasks(), dist.num_receivers()) == (5, 9, 2)
        task = dist.service_resolver().cluster_spec.task()
        assert (task.rank, task.local_rank, task.wse_id) == (4, 1, 1)
        assert dist.service_resolver().streamer_ordinals() == [1, 2, 3, 4, 5, 6]
        assert dist.service_resolver().receiver_ordinals() == [7, 8]
        assert dist.service_resolver().assumes_role("streamer")
        assert dist.get_streaming_batch_size(8) == dist.get_streaming_batch_size(8, global_rank=0) == 4
    assert not dist.is_streamer()


def test_an_uneven_batch_names_what_would_divide():
    with task_context(TaskContext.streamer(ClusterSpec.of(4, 1))):
        with pytest.raises(ValueError, match="num_csx=4 boxes. Use a multiple, such as 8"):
            dist.get_streaming_batch_size(10)
        with pytest.raises(ValueError, match="rank 9"):
            dist.get_streaming_batch_size(8, global_rank=9)
    with pytest.raises(ValueError, match="effective_batch_size=0"):
        dist.get_streaming_batch_size(0)
    with pytest.raises(TypeError, match="8.0"):
        dist.get_streaming_batch_size(8.0)


def test_the_context_is_restored_when_the_block_raises():
    with pytest.raises(KeyError), task_context(TaskContext.streamer(ClusterSpec.of(1, 2))):
        raise KeyError
    assert not dist.is_streamer()
    with pytest.raises(TypeError, match="dict"):
        dist.set_task_context({})
    with pytest.raises(ValueError, match="ordinal=3"):
        TaskContext(role=TaskRole.RECEIVER, ordinal=3, num_tasks=3)


def test_specs_take_positions_as_the_model_zoo_gives_them():
    spec = ClusterSpec([TaskSpec(rank=0, local_rank=0, wse_id=0, node_name="n")], 0, 1, 1)
    assert spec.task().node_name == "n" and spec.num_workers_per_csx == 1
    with pytest.raises(ValueError, match="ranks \\[0\\]"):
        spec.task(1)
    with pytest.raises(ValueError, match="num_csx=0"):
        ClusterSpec.of(0, 1)


def test_torch_distributed_gives_rank_and_world_size_where_it_runs(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert dist.get_rank() == torch.distributed.get_rank() and dist.get_world_size() == 1
        assert dist.is_master_ordinal() and dist.is_master_ordinal(local=True)
    finally:
        torch.distributed.destroy_process_group()


def test_the_worker_cache_counts_what_a_copy_replaces(tmp_path, monkeypatch):
    from cerebras.pytorch.distributed import worker_cache

    monkeypatch.setattr(worker_cache, "WORKER_CACHE_ROOT", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"x" * 2048)
    assert dist.get_dir_size(source) == 2048
    hit, size, room = dist.hit_worker_cache_limit(str(source), str(tmp_path / "cache" / "copy"))
    assert size == "2.0KiB" and room
    monkeypatch.setattr(worker_cache, "SSD_LIMIT", 0.0)
    hit, size, room = dist.hit_worker_cache_limit(str(source), str(tmp_path / "cache" / "copy"))
    assert hit is True and room == "0.0B"
    with pytest.raises(ValueError, match="not below the worker cache"):
        dist.hit_worker_cache_limit(str(source), str(tmp_path / "elsewhere"))
    assert os.path.isdir(tmp_path / "cache")
