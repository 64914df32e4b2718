"""Every parameter of every backend: honoured, or refused with the reason."""

import importlib
import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn as nn

import cerebras.pytorch as cstorch
from cerebras.pytorch.backend import Backend, BackendType, get_backend_args
from cerebras.pytorch.core.compile import CompiledModule
from cerebras.pytorch.utils.data import DataExecutor, DataLoader

KINDS = ["CPU", "CSX"]


@pytest.fixture(autouse=True)
def interpreted():
    cstorch.backends.csx.debug.compiler = "eager"


def loader(count=2, size=2):
    return DataLoader(lambda: [torch.ones(size, 3)] * count)


def train(backend, model=None, steps=2, each=lambda step, model: None):
    """A few steps of a linear model; returns the losses. `each` is called in every iteration."""
    model = nn.Linear(3, 1) if model is None else model
    compiled = cstorch.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    @cstorch.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    keep = cstorch.step_closure(lambda loss: losses.append(loss.item()))
    for x in (executor := DataExecutor(loader(steps), checkpoint_steps=1)):
        keep(step(x))
        each(executor.user_iteration, model)
    return losses


# making one


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_is_made_by_name_in_any_case_and_is_then_the_current_one(kind):
    backend = cstorch.backend(kind.lower())
    assert cstorch.backend() is backend and isinstance(backend, Backend)
    assert backend.backend_type is BackendType[kind]
    assert (backend.is_cpu, backend.is_gpu, backend.is_csx) == (kind == "CPU", False, kind == "CSX")
    assert cstorch.use_cs() == backend.is_csx
    assert (
        cstorch.current_torch_device()
        == backend.torch_device
        == torch.device(*{"CPU": ("cpu",), "CSX": ("csx", 0)}[kind])
    )
    assert str(backend.device) == kind and backend.is_tracing is False and backend.is_e2e_execution is True
    assert backend.cluster is None and backend.cluster_config is None


def test_without_a_backend():
    for ask in (cstorch.backend, lambda: cstorch.trace(lambda: None)(), lambda: cstorch.current_executor()):
        with pytest.raises(RuntimeError, match=r"There is no backend yet\.\n  Instead: call cstorch\.backend\('CSX'\)"):
            ask()
    assert not cstorch.use_cs() and cstorch.current_torch_device() == torch.device("cpu")


def test_unknown_backends_and_wrong_types():
    with pytest.raises(ValueError, match="Unknown backend 'TPU'; the backends are 'CSX', 'CPU' and 'GPU'"):
        cstorch.backend("TPU")
    with pytest.raises(TypeError, match="backend_type must be a string"):
        cstorch.backend(3)
    with pytest.raises(TypeError, match="only together with a backend type"):
        cstorch.backend(None, artifact_dir="x")
    with pytest.raises(TypeError, match=r"backend\('CPU'\): .*'compile_dir'\. It takes: artifact_dir, max_checkpoints"):
        cstorch.backend("CPU", compile_dir="x")


def test_current_backend_is_deprecated():
    backend = cstorch.backend("CPU")
    with pytest.warns(DeprecationWarning, match=r"use cstorch\.backend\(\)") as caught:
        assert cstorch.current_backend() is backend
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cstorch.current_backend(raise_warning=False) is backend
    cstorch.backend._current = None
    assert cstorch.current_backend(raise_exception=False, raise_warning=False) is None


def test_backend_is_callable_and_a_module():
    module = importlib.import_module("cerebras.pytorch.backend")
    assert module is cstorch.backend and callable(module)
    assert module.Backend is Backend and module.get_backend_args is get_backend_args


def test_the_arguments_of_each_backend_can_be_listed():
    assert list(get_backend_args("CPU")) == ["artifact_dir", "max_checkpoints", "mixed_precision", "cluster_config"]
    csx = get_backend_args(BackendType.CSX)
    assert list(csx) == [
        "artifact_dir", "compile_dir", "compile_only", "validate_only", "drop_data", "max_checkpoints",
        "log_initialization", "retrace_every_iteration", "use_cs_grad_accum", "cluster_config",
    ]  # fmt: skip
    assert csx["compile_only"].default is False and csx["log_initialization"].default is True
    with pytest.raises(ValueError, match="Unknown backend"):
        get_backend_args("TPU")


@pytest.mark.parametrize(
    "kind, name, value, error",
    [
        *[("CSX", n, 1, TypeError) for n in ("compile_only", "validate_only", "drop_data", "log_initialization")],
        ("CSX", "use_cs_grad_accum", None, TypeError), ("CSX", "retrace_every_iteration", "yes", TypeError),
        ("CSX", "compile_dir", 3, TypeError), ("CSX", "artifact_dir", 3, TypeError), ("CPU", "artifact_dir", 3, TypeError),
        ("CPU", "mixed_precision", "yes", TypeError), ("CPU", "cluster_config", {"num_csx": 1}, TypeError),
        *[(k, "max_checkpoints", v, e) for k in KINDS for v, e in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError))],
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(kind, name, value, error):
    with pytest.raises(error, match=name):
        cstorch.backend(kind, **{name: value})
    assert cstorch.backend.current_backend_impl(raise_exception=False) is None, "nothing half-made is left"


# a second one


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_a_second_backend_replaces_the_first(first, second):
    old = cstorch.backend(first)
    want = train(old, model := nn.Linear(3, 1))
    new = cstorch.backend(second)
    assert cstorch.backend() is new is not old
    weight = model.weight.detach().cpu()
    assert weight.isfinite().all(), "the tensors of the first are still there"
    assert len(train(new)) == len(want)


def test_no_second_backend_while_an_executor_runs():
    backend = cstorch.backend("CPU")
    for _ in DataExecutor(loader()):
        with pytest.raises(RuntimeError, match="A DataExecutor of the CPU backend is running"):
            cstorch.backend("CSX")
    assert cstorch.backend() is backend
    cstorch.backend("CSX")


# directories


@pytest.mark.parametrize("kind", KINDS)
def test_artefacts_go_to_cerebras_logs_in_the_working_directory(kind, tmp_path):
    assert cstorch.backend(kind).artifact_dir == tmp_path / "cerebras_logs"
    assert (tmp_path / "cerebras_logs").is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_artefacts_go_where_the_user_says(kind, tmp_path):
    backend = cstorch.backend(kind, artifact_dir=str(tmp_path / "a" / "b"))
    train(backend)
    assert (tmp_path / "a/b/executors/000001/performance.json").is_file()
    assert not (tmp_path / "cerebras_logs").exists()
    backend.artifact_dir = tmp_path / "c"
    train(backend)
    assert (tmp_path / "c/executors/000002/performance.json").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unwritable_artifact_dir_names_the_mend(kind, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        PermissionError,
        match=rf"artifact_dir '.*file/logs' cannot be written \(Not a directory\)\.\n  Instead: .*backend\('{kind}', artifact_dir=",
    ):
        cstorch.backend(kind, artifact_dir=tmp_path / "file" / "logs")


# compile and trace


def test_compile_takes_a_backend_by_name():
    current = cstorch.backend("CSX")
    model = nn.Linear(2, 2)
    cstorch.compile(model, backend="CSX")
    assert cstorch.backend() is current and model.weight.device.type == "csx"
    cstorch.backend._current = None
    cstorch.compile(nn.Linear(2, 2), backend="csx")
    assert cstorch.backend().is_csx


def test_compile_without_a_backend_uses_the_cpu():
    model = nn.Linear(2, 2)
    compiled = cstorch.compile(model)
    assert cstorch.backend().is_cpu
    assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_compile_refuses_what_is_no_module_and_no_backend():
    cstorch.backend("CPU")
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not function"):
        cstorch.compile(lambda x: x)
    with pytest.raises(TypeError, match="not int"):
        cstorch.compile(nn.Linear(1, 1), backend=3)
    with pytest.raises(ValueError, match="Unknown backend"):
        cstorch.compile(nn.Linear(1, 1), backend="TPU")


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_module_is_almost_like_the_module(kind):
    backend = cstorch.backend(kind)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    weight = model[0].weight
    compiled = cstorch.compile(model, backend)
    assert isinstance(compiled, CompiledModule) and not isinstance(compiled, nn.Module)
    assert model[0].weight is weight, "an optimizer made before holds the same parameters"
    assert model.device == compiled.device == backend.torch_device
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    compiled.eval()
    assert not model.training and "Linear" in repr(compiled)
    for private in ("_parameters", "__len__x"):
        with pytest.raises(AttributeError, match="no private attribute"):
            getattr(compiled, private)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = compiled.nothing_of_this_name


def test_trace_decorates_functions():
    with pytest.raises(TypeError, match="trace.. decorates a function, not int"):
        cstorch.trace(3)

    @cstorch.trace
    def training_step(batch):
        """Doc."""

    assert training_step.__name__ == "training_step" and training_step.__doc__ == "Doc."


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_is_a_context_for_new_tensors(kind):
    with (backend := cstorch.backend(kind)).device:
        assert nn.Linear(2, 2).weight.device == backend.torch_device == torch.zeros(1).device
        with backend.device:
            pass
        assert torch.zeros(1).device == backend.torch_device
    assert torch.zeros(1).device == torch.device("cpu")
    with cstorch.device(kind) as device:
        assert device is cstorch.backend().device


# precision


def test_mixed_precision_on_cpu_runs_the_forward_pass_in_bfloat16():
    seen = {}

    class Model(nn.Linear):
        def forward(self, x):
            seen["dtype"] = super().forward(x).dtype
            return super().forward(x)

    for setting, dtype in ((None, torch.float32), (False, torch.float32), (True, torch.bfloat16)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float16 is the default half type, which a CPU does not have
            train(cstorch.backend("CPU", mixed_precision=setting), Model(3, 1))
        assert seen["dtype"] is dtype


# checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_max_checkpoints_keeps_the_newest(kind, tmp_path):
    @cstorch.checkpoint_closure
    def save(step, model):
        cstorch.save(model.state_dict(), f"checkpoint_{step}.mdl")

    train(cstorch.backend(kind, max_checkpoints=2), steps=12, each=save)
    assert sorted(p.name for p in tmp_path.glob("*.mdl")) == ["checkpoint_11.mdl", "checkpoint_12.mdl"]
    train(cstorch.backend(kind, artifact_dir=tmp_path), steps=1, each=lambda step, m: save(step + 12, m))
    assert len(list(tmp_path.glob("*.mdl"))) == 3, "a backend without the limit keeps all"


def test_drop_data_needs_a_checkpoint(tmp_path):
    backend = cstorch.backend("CSX", drop_data=True)
    with backend.device:
        model = nn.Linear(3, 1)
    with pytest.raises(
        RuntimeError, match=r"'weight' of shape \(1, 3\).* holds no data: .*drop_data.*load a checkpoint"
    ):
        train(backend, model)
    assert backend.executor is None


def test_drop_data_trains_from_a_checkpoint(tmp_path):
    cstorch.backend("CPU")
    torch.manual_seed(3)
    reference = nn.Linear(3, 1)
    cstorch.save(reference.state_dict(), "start.mdl")
    want = train(cstorch.backend("CPU"), reference)
    backend = cstorch.backend("CSX", drop_data=True)
    with backend.device:
        model = nn.Linear(3, 1)
    model.load_state_dict(cstorch.load("start.mdl"))
    assert train(backend, model) == want


def test_the_flags_of_initialisation_count_when_the_model_is_made():
    backend = cstorch.backend("CSX")
    debug = cstorch.backends.csx.debug
    debug.lazy_initialization = False
    with backend.device:
        assert "deferred" not in repr(nn.Linear(2, 2).weight)
    debug.lazy_initialization = True
    with backend.device:
        assert "deferred" in repr(nn.Linear(2, 2).weight)
    debug.drop_data = True
    assert backend.drop_data
    with backend.device:
        dropped = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="holds no data"):
        dropped.weight.cpu()


@pytest.mark.parametrize("log", [True, False])
def test_log_initialization(log, caplog):
    caplog.set_level(logging.INFO)
    backend = cstorch.backend("CSX", log_initialization=log)
    with backend.device:
        model = nn.Linear(3, 1)
    train(backend, model)
    assert ("Initialising" in caplog.text) == log


def test_retrace_every_iteration_belongs_to_its_backend():
    calls = []

    def run(backend):
        calls.clear()
        traced = cstorch.trace(lambda x: (calls.append(1), x.sum())[1])
        for x in DataExecutor(loader(4)):
            traced(x)
        return len(calls)

    assert run(cstorch.backend("CSX", retrace_every_iteration=True)) >= 4
    assert run(cstorch.backend("CSX")) < 4
    cstorch.backends.csx.debug.retrace_every_iteration = True
    assert run(cstorch.backend("CSX")) >= 4
    assert run(cstorch.backend("CSX", retrace_every_iteration=False)) < 4


# hints


def hints_of(kind, **kwargs):
    backend = cstorch.backend(kind, **kwargs)
    train(backend)
    return json.loads((backend.artifact_dir / "executors" / "latest" / "report.json").read_text())["hints"]


@pytest.mark.parametrize("kind", KINDS)
def test_performance_hints_are_taken_everywhere_and_the_report_says_what_they_did(kind):
    csx = cstorch.backends.csx
    assert hints_of(kind).keys() <= {"csx.debug.compiler"}
    csx.performance.micro_batch_size = {"explore": {"min": 2, "max": 8}}
    csx.performance.transfer_processes = 7
    csx.precision.optimization_level = 2
    csx.debug.wrk_memory_gi = 12
    hints = hints_of(kind)
    set_here = {
        "csx.performance.micro_batch_size", "csx.performance.transfer_processes", "csx.precision.optimization_level",
        "csx.debug.wrk_memory_gi",
    }  # fmt: skip
    assert set_here <= hints.keys()
    assert hints["csx.performance.transfer_processes"]["value"] == 7
    assert all("no effect" in hints[name]["effect"] for name in set_here)
    assert ("CSX backend" in hints["csx.debug.wrk_memory_gi"]["effect"]) == (kind == "CPU")


def test_use_cs_grad_accum_is_recorded():
    assert "use_cs_grad_accum" not in hints_of("CSX")
    hint = hints_of("CSX", use_cs_grad_accum=True)["use_cs_grad_accum"]
    assert hint["value"] is True and "no effect" in hint["effect"]


# clusters


def cluster(**kwargs):
    return cstorch.distributed.ClusterConfig(**kwargs)


@pytest.mark.parametrize("count", [2, 16])
def test_several_boxes_are_refused_by_name(count):
    with pytest.raises(NotImplementedError, match=rf"num_csx={count}:(.|\n)*ClusterConfig\(num_csx=1\)"):
        cstorch.backend("CSX", cluster_config=cluster(num_csx=count))


def test_a_cluster_config_on_csx_is_in_the_report():
    hints = hints_of("CSX", cluster_config=cluster(num_workers_per_csx=3, job_labels=["a=b"]))
    assert hints["cluster_config.num_workers_per_csx"]["value"] == 3
    assert hints["cluster_config.job_labels"]["value"] == ["a=b"]
    assert "cluster_config.num_csx" not in hints


def test_a_cluster_config_on_cpu_has_no_effect_and_that_is_said_once(caplog):
    config = cluster(num_csx=4, mgmt_address="head.example.org:9000")
    backend = cstorch.backend("CPU", cluster_config=config)
    train(backend)
    train(backend)
    said = [r.getMessage() for r in caplog.records if "cluster_config" in r.getMessage()]
    assert said == ["cluster_config has no effect on the CPU backend: it configures the CSX appliance"]
    assert backend.cluster_config is config


@pytest.mark.parametrize("kind", KINDS)
def test_cs_config_through_the_executor_is_deprecated_and_taken(kind, caplog):
    backend = cstorch.backend(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = cstorch.utils.CSConfig(num_workers_per_csx=2, precision_opt_level=2)
    with pytest.warns(DeprecationWarning, match=r"DataExecutor\(cs_config=.*cluster_config") as caught:
        DataExecutor(loader(), cs_config=config)
    assert caught[0].filename == __file__
    assert backend.cluster_config == cluster(num_workers_per_csx=2, max_wgt_servers=24, max_act_per_csx=1)
    assert cstorch.backends.csx.precision.optimization_level == 2
    assert ("no effect on the CPU backend" in caplog.text) == (kind == "CPU")
    with pytest.warns(DeprecationWarning), pytest.raises(TypeError, match="ClusterConfig, not dict"):
        DataExecutor(loader(), cs_config={"num_csx": 1})
    with pytest.warns(DeprecationWarning):
        DataExecutor(loader(), cs_config=cluster())
    assert backend.cluster_config == cluster()


def test_several_boxes_through_the_executor_are_refused_as_well():
    cstorch.backend("CSX")
    with pytest.warns(DeprecationWarning), pytest.raises(NotImplementedError, match="num_csx=2"):
        DataExecutor(loader(), cs_config=cluster(num_csx=2))


def test_micro_batch_size_through_the_executor_is_deprecated_and_sets_the_flag():
    cstorch.backend("CPU")
    for value in (4, None, "explore"):
        with pytest.warns(DeprecationWarning, match=r"micro_batch_size=.*performance\.micro_batch_size"):
            DataExecutor(loader(), micro_batch_size=value)
        assert cstorch.backends.csx.performance.micro_batch_size == value
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="micro_batch_size"):
        DataExecutor(loader(), micro_batch_size=0)


# the old name


def test_the_old_name_gives_the_same_objects():
    import cerebras_pytorch.utils.data
    from cerebras_pytorch.backend import Backend as OldBackend
    from cerebras_pytorch.utils.tensorboard import SummaryWriter

    import cerebras_pytorch
    import cerebras_pytorch as old

    assert OldBackend is Backend and SummaryWriter is cstorch.utils.tensorboard.SummaryWriter
    assert cerebras_pytorch.utils.data is cstorch.utils.data and cerebras_pytorch.utils.data.DataLoader is DataLoader
    assert old.backends is cstorch.backends and old.__version__ == cstorch.__version__
    for name in cstorch.__all__:
        assert getattr(old, name) is getattr(cstorch, name), name
    assert set(dir(old)) >= set(cstorch.__all__)
    backend = old.backend("CPU")
    assert cstorch.backend() is backend
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cerebras_pytorch.no_such_module")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = old.no_such_name


def test_the_old_name_first_in_a_process(run_script):
    run_script(
        """
        import cerebras_pytorch.backend
        import cerebras_pytorch as cstorch
        from cerebras_pytorch.utils.data import DataLoader
        backend = cstorch.backend("CPU")
        import cerebras.pytorch as new
        assert new.backend() is backend and new.utils.data.DataLoader is DataLoader
        assert cerebras_pytorch.backend is new.backend
        assert new.backend.__name__ == "cerebras.pytorch.backend"
        assert new.backend.__spec__.name == "cerebras.pytorch.backend", "its own spec, so that reload works"
        import pickle
        assert pickle.loads(pickle.dumps(cstorch.distributed.ClusterConfig())) == new.distributed.ClusterConfig()
        """
    )


def test_the_public_names_are_there_and_cheap():
    missing = [name for name in cstorch.__all__ if not hasattr(cstorch, name)]
    assert not missing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cstorch.nothing
    code = (
        "import sys, torch; before = set(sys.modules); import cerebras.pytorch; print(len(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) < 10, "names are imported when they are first used"
