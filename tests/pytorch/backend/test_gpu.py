"""The GPU backend where there is no GPU, and its distributed half: two processes with gloo under torchrun."""

import json
import textwrap

import pytest
import torch
import torch.nn as nn

import cerebras.pytorch as cstorch
from cerebras.pytorch.backend.gpu import DataParallel

CPU = torch.device("cpu")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def parallel(enabled=True, main_process_id=0, dist_backend="gloo", init_method=None, sync_batchnorm=False):
    return DataParallel(CPU, enabled, main_process_id, dist_backend, init_method, sync_batchnorm)


@NO_GPU
def test_without_a_gpu_the_error_names_the_other_backends():
    with pytest.raises(RuntimeError, match=r"needs a CUDA device and torch finds none(.|\n)*'CPU'(.|\n)*'CSX'"):
        cstorch.backend("GPU")
    assert not cstorch.use_cs() and cstorch.current_torch_device() == CPU, "no backend was left behind"


@GPU
def test_a_step_runs_on_the_gpu():
    backend = cstorch.backend("GPU")
    model = nn.Linear(3, 2)
    compiled = cstorch.compile(model, backend)
    assert model.weight.device.type == "cuda"

    @cstorch.trace
    def step(x):
        return compiled(x).sum()

    @cstorch.step_closure
    def check(value):
        assert value.device.type == "cpu"

    for x in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(lambda: [torch.ones(2, 3)])):
        assert x.device.type == "cuda"
        check(step(x))


# what can be checked in one process


def test_distributed_without_torchrun_is_a_clear_error(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        RuntimeError, match=r"not started by torchrun \(RANK and WORLD_SIZE not set\)(.|\n)*torchrun --n"
    ):
        parallel()
    with pytest.raises(RuntimeError, match="torchrun"):
        parallel(init_method="file:///tmp/never-made")


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"enabled": 1}, TypeError), ({"sync_batchnorm": "yes"}, TypeError), ({"main_process_id": True}, TypeError),
        ({"main_process_id": "0"}, TypeError), ({"dist_backend": None}, TypeError), ({"init_method": 3}, TypeError),
        ({"main_process_id": 1}, ValueError), ({"main_process_id": -1}, ValueError),
    ],
)  # fmt: skip
def test_arguments_are_checked(wrong, error):
    name = next(iter(wrong)).replace("enabled", "enable_distributed")
    with pytest.raises(error, match=name):
        parallel(**({"enabled": False} | wrong))


def test_one_process_is_the_main_one_and_leaves_the_module_alone():
    one = parallel(enabled=False, sync_batchnorm=True)
    model = nn.Sequential(nn.BatchNorm1d(3))
    assert one.is_main and one.wrap(model) is model and type(model[0]) is nn.BatchNorm1d


def test_every_parameter_of_the_seeds_is_taken():
    assert list(cstorch.backend.get_backend_args("GPU")) == [
        "artifact_dir", "enable_distributed", "main_process_id", "dist_backend", "init_method", "sync_batchnorm",
        "max_checkpoints", "cluster_config",
    ]  # fmt: skip


# two processes


SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch, torch.nn as nn
    from cerebras.pytorch.backend.gpu import DataParallel

    init_method = sys.argv[1] if len(sys.argv) > 1 else None
    parallel = DataParallel(torch.device("cpu"), True, 1, "gloo", init_method, True)
    rank = parallel.rank

    torch.manual_seed(rank)  # the processes start from different values: those of rank 0 count
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    forward = parallel.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(7)
    x, y = torch.randn(5, 8, 4, generator=data), torch.randint(0, 3, (5, 8), generator=data)
    mine = slice(4 * rank, 4 * rank + 4)
    gradients = None
    for step in range(5):
        loss = nn.functional.cross_entropy(forward(x[step, mine]), y[step, mine])
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or [p.grad.tolist() for p in model.parameters()]
        optimizer.step()

    norm = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    alone = nn.BatchNorm1d(2)
    # torch lets synchronised norms run on a GPU only, so here they are made and not run
    assert parallel.synchronised(norm) is norm
    wrapped = parallel.synchronised(alone)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    Path(f"result_{rank}.json").write_text(json.dumps(dict(
        rank=rank, world_size=parallel.world_size, is_main=parallel.is_main,
        gradients=gradients, parameters=[p.tolist() for p in model.parameters()],
        keys=list(model.state_dict()), norm=type(norm[1][0]).__name__,
        alone=[type(wrapped).__name__, wrapped.running_mean is alone.running_mean, wrapped.weight is alone.weight],
        frozen=parallel.wrap(frozen) is frozen, directory=str(parallel.own_directory("logs")),
    )))
    torch.distributed.barrier()
    os._exit(0)  # all is done and written; gloo's threads now and then abort a process that ends
"""


@pytest.mark.parametrize("init", ["torchrun", "file"])
def test_two_processes_train_as_one_on_the_joined_batch(run_script, tmp_path, init):
    arguments = [f"file://{tmp_path}/store"] if init == "file" else []
    run_script(SCRIPT, *arguments, launcher=TORCHRUN)
    results = [json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in (0, 1)]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(7)
    x, y = torch.randn(5, 8, 4, generator=data), torch.randint(0, 3, (5, 8), generator=data)
    gradients = None
    for step in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step]), y[step]).backward()
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()

    assert results[0]["parameters"] == results[1]["parameters"], "the same in both processes, bit for bit"
    for rank, result in enumerate(results):
        assert (result["rank"], result["world_size"], result["is_main"]) == (rank, 2, rank == 1)
        for found, want in zip(result["gradients"], gradients):
            assert torch.allclose(torch.tensor(found), want, atol=1e-6)
        for found, want in zip(result["parameters"], model.parameters()):
            assert torch.allclose(torch.tensor(found), want, atol=1e-6)
        assert result["keys"] == list(model.state_dict()), "no prefix: checkpoints are those of one process"
        assert result["norm"] == "SyncBatchNorm" and result["alone"] == ["SyncBatchNorm", True, True]
        assert result["frozen"], "nothing to average"
        assert result["directory"] == ("logs" if rank == 1 else "logs/rank_0")


BACKEND = """
    import logging, os
    import torch, torch.nn as nn
    import cerebras.pytorch as cstorch
    from cerebras.pytorch.backend.gpu import GPUBackend

    # The whole backend, with the CPU as its device: what CUDA adds is the transfer of tensors.
    GPUBackend._device = staticmethod(lambda: torch.device("cpu"))
    logging.basicConfig(level=logging.INFO)
    backend = cstorch.backend("GPU", artifact_dir="logs", enable_distributed=True, dist_backend="gloo", max_checkpoints=1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Linear(3, 1, bias=False)
    compiled = cstorch.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @cstorch.trace
    def step(x):
        loss = compiled(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.checkpoint_closure
    def save(step):
        cstorch.save(model.state_dict(), f"checkpoint_{step}.mdl")
        logging.getLogger("cerebras.pytorch").info("saved %d in %d", step, rank)

    loader = cstorch.utils.data.DataLoader(lambda: [torch.full((2, 3), float(rank))] * 4)
    executor = cstorch.utils.data.DataExecutor(loader, checkpoint_steps=2)
    for batch in executor:
        step(batch)
        save(executor.user_iteration)
    torch.distributed.barrier()
    assert torch.equal(cstorch.load("checkpoint_4.mdl")["weight"], model.weight.detach())
    torch.distributed.barrier()
    logging.shutdown()
    os._exit(0)  # as above
"""


def test_the_main_process_saves_and_logs_and_each_has_its_own_directory(run_script, tmp_path):
    done = run_script(BACKEND, launcher=TORCHRUN)
    assert [p.name for p in tmp_path.glob("*.mdl")] == ["checkpoint_4.mdl"], "one file, of the main process, rotated"
    assert "saved 4 in 0" in done.stderr and "in 1" not in done.stderr
    logs = tmp_path / "logs"
    assert (logs / "executors/000001/performance.json").is_file() and not (logs / "executors/000002").exists()
    assert (logs / "rank_1/executors/000001/performance.json").is_file()


def test_main_process_id_beyond_the_processes(run_script):
    source = """
        import torch
        from cerebras.pytorch.backend.gpu import DataParallel
        DataParallel(torch.device("cpu"), True, 2, "gloo", None, False)
    """
    done = run_script(textwrap.dedent(source), launcher=TORCHRUN, check=False)
    assert done.returncode != 0 and "main_process_id must be a rank below 2, got 2" in done.stderr
