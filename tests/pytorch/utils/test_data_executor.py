"""The loop over batches: its counts, its files, its closures, and what becomes of it when something goes wrong."""

import copy
import dataclasses
import json
import logging
import typing

import pytest
import torch
import torch.nn as nn

import cerebras.pytorch as cstorch
from cerebras.pytorch.utils.data import DataExecutor, DataLoader, RestartableDataLoader, Schedule
from cerebras.pytorch.utils.profiler import Activity
from cerebras.pytorch.utils.tensorboard import SummaryReader, SummaryWriter

BACKENDS = ["CPU", "CSX"]


def make_backend(kind="CPU", **kwargs):
    cstorch.backends.csx.debug.compiler = "eager"
    return cstorch.backend(kind, **kwargs)


def numbers(count, size=2):
    """A loader whose batch i is full of i."""
    return DataLoader(lambda: [torch.full((size, 3), float(i)) for i in range(count)])


@cstorch.trace
def double(x):
    return (x * 2).sum()


@pytest.fixture(params=BACKENDS)
def backend(request):
    return make_backend(request.param)


# counts


def test_num_steps_defaults_to_the_length_of_the_loader(backend):
    executor = DataExecutor(numbers(3))
    assert executor.num_steps == len(executor) == 3 and len(list(executor)) == 3


def test_a_loader_shorter_than_num_steps_is_repeated(backend):
    seen = []

    @cstorch.step_closure
    def keep(value):
        seen.append(value.item())

    for x in DataExecutor(numbers(3), num_steps=7):
        keep(double(x))
    assert seen == [12.0 * i for i in (0, 1, 2, 0, 1, 2, 0)]


@pytest.mark.parametrize(
    "value, error", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("3", TypeError)]
)
def test_num_steps_is_a_positive_int(value, error):
    make_backend()
    with pytest.raises(error, match="num_steps must be"):
        DataExecutor(numbers(2), num_steps=value)


def test_a_loader_without_length_needs_num_steps(backend):
    loader = DataLoader(lambda: (torch.ones(2) for _ in range(2)))
    with pytest.raises(ValueError, match=r"num_steps is needed.*\n.*num_steps=\.\.\."):
        DataExecutor(loader)
    assert len(list(DataExecutor(loader, num_steps=5))) == 5, "the generator is made again for each pass"


def test_iteration_is_zero_based_and_user_iteration_one_based(backend):
    executor = DataExecutor(numbers(3))
    seen, in_closures = [], []

    def state():
        return executor.iteration, executor.user_iteration, executor.is_initial_step, executor.on_final_iteration

    @cstorch.step_closure
    def keep(value):
        in_closures.append(state())

    for x in executor:
        seen.append(state())
        keep(double(x))
    assert seen == in_closures == [(0, 1, True, False), (1, 2, False, False), (2, 3, False, True)]
    assert state() == (3, 4, False, True), "after the loop"


def test_an_executor_can_be_iterated_again(backend):
    executor = DataExecutor(numbers(2))
    for run in (1, 2):
        assert [executor.iteration for _ in executor] == [0, 1]
        assert executor.artifact_dir.name == f"{run:06d}"


def test_current_executor_is_that_of_the_running_loop(backend):
    with pytest.raises(RuntimeError, match="No DataExecutor is running"):
        cstorch.current_executor()
    executor = DataExecutor(numbers(1))
    for _ in executor:
        assert cstorch.current_executor() is executor is backend.executor
    with pytest.raises(RuntimeError, match="No DataExecutor is running"):
        cstorch.current_executor()


def test_without_a_backend_there_is_no_executor():
    with pytest.raises(RuntimeError, match="There is no backend yet"):
        DataExecutor(numbers(1))


# checkpoints


def checkpoints(executor):
    steps = []

    @cstorch.checkpoint_closure
    def save():
        steps.append(executor.user_iteration)

    for x in executor:
        double(x)
        save()
    return steps


@pytest.mark.parametrize(
    "steps, want",
    [
        (4, [4, 8, 10]), (10, [10]), (100, [10]), (None, []), (0, []),
        (Schedule([Schedule.Range(0, 3, 2, False)]), [1, 3]),
        (Schedule([Schedule.Range(start=4, end=10, step=3, include_last=True)]), [5, 8, 10]),
    ],
)  # fmt: skip
def test_checkpoint_closures_run_on_checkpoint_steps_and_at_the_end(backend, steps, want):
    assert checkpoints(DataExecutor(numbers(10), checkpoint_steps=steps)) == want


@pytest.mark.parametrize("value, error", [(-1, ValueError), (2.5, TypeError), (True, TypeError), ([4], TypeError)])
def test_checkpoint_steps_is_an_int_or_a_schedule(value, error):
    make_backend()
    with pytest.raises(error, match="checkpoint_steps"):
        DataExecutor(numbers(2), checkpoint_steps=value)


def test_activation_steps_are_reduced_to_meet_the_checkpoints(caplog):
    make_backend()
    executor = DataExecutor(numbers(2), num_steps=20, checkpoint_steps=6, activation_steps=4)
    assert executor.activation_steps == 2
    assert "activation_steps is reduced from 4 to 2" in caplog.text
    assert DataExecutor(numbers(2), checkpoint_steps=6, activation_steps=3).activation_steps == 3
    for value, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="activation_steps"):
            DataExecutor(numbers(2), activation_steps=value)


# measurements and files


class LargestBatch(Activity):
    name = "largest_batch"

    def __init__(self, profiler):
        super().__init__(profiler)
        self.largest = 0

    def step(self, batch_size):
        self.largest = max(self.largest, batch_size)

    @property
    def value(self):
        return self.largest


def test_profiler_activities_are_measured_and_saved(backend):
    executor = DataExecutor(numbers(3, size=5), profiler_activities=[LargestBatch])
    for x in executor:
        double(x)
    assert executor.profiler.largest_batch == 5 and executor.profiler.rate_tracker.total_samples == 15
    saved = json.loads((executor.artifact_dir / "performance.json").read_text())
    assert saved["largest_batch"] == 5 and saved["total_samples"] == 15
    assert saved.keys() > {"flops_utilization", "global_rate", "rate", "samples_per_sec", "total_time"}


def test_profiler_activities_are_checked_when_the_executor_is_made():
    make_backend()
    with pytest.raises(TypeError, match="profiler_activities"):
        DataExecutor(numbers(1), profiler_activities=["rate"])
    with pytest.raises(ValueError, match="largest_batch"):
        DataExecutor(numbers(1), profiler_activities=[LargestBatch, type("Other", (LargestBatch,), {})])


def test_an_activity_that_cannot_be_saved_leaves_the_backend_usable(backend):
    unsaved = type("Unsaved", (LargestBatch,), {"value": property(lambda self: {1, 2})})
    with pytest.raises(TypeError, match="largest_batch"):
        list(DataExecutor(numbers(1), profiler_activities=[unsaved]))
    assert backend.executor is None and len(list(DataExecutor(numbers(1)))) == 1


def test_release_2_0_spelling_of_the_activities_works_with_a_deprecation():
    make_backend()
    with pytest.warns(DeprecationWarning, match="additional_activities.*profiler_activities") as caught:
        executor = DataExecutor(numbers(1), additional_activities=[LargestBatch])
    assert caught[0].filename == __file__
    list(executor)
    assert executor.profiler.largest_batch == 2


def test_the_time_of_capture_and_compilation_is_not_in_the_rates(tmp_path):
    backend = make_backend("CSX")
    cstorch.backends.csx.debug.compiler = "inductor"
    backend.compile_dir = tmp_path / "cache"
    executor = DataExecutor(numbers(2), num_steps=50)
    for x in executor:
        double(x)
    tracker = executor.profiler.rate_tracker
    assert tracker.total_samples == 100
    assert tracker.total_time > backend.reports[0].compile["seconds"]
    assert tracker.global_rate > 4 * tracker.total_samples / tracker.total_time
    assert tracker.rate > 4 * tracker.total_samples / tracker.total_time


def test_each_run_has_a_directory_and_latest_points_to_the_last(backend, tmp_path):
    executor = DataExecutor(numbers(1))
    assert executor.artifact_dir == backend.artifact_dir, "before it runs"
    for x in executor:
        double(x)
        assert executor.artifact_dir == tmp_path / "cerebras_logs" / "executors" / "000001"
        assert executor.artifact_dir.is_dir()
    second = DataExecutor(numbers(1))
    list(second)
    latest = tmp_path / "cerebras_logs" / "executors" / "latest"
    assert latest.is_symlink() and str(latest.readlink()) == "000002"
    track = json.loads((executor.artifact_dir / "track.json").read_text())
    assert track["Initialization"][0] >= 0 and track["Initialization"][1] == {}


def test_a_directory_of_an_earlier_process_is_not_used_again(backend, tmp_path):
    (tmp_path / "cerebras_logs" / "executors" / "000001").mkdir(parents=True)
    executor = DataExecutor(numbers(1))
    list(executor)
    assert executor.artifact_dir.name == "000002"


# leaving and failing


def test_after_a_break_another_executor_can_start(backend):
    seen = []

    @cstorch.step_closure
    def keep(value):
        seen.append(value.item())

    executor = DataExecutor(numbers(5))
    for x in executor:
        keep(double(x))
        if executor.user_iteration == 2:
            break
    assert seen == [0.0, 12.0], "the closures of the step that was left ran"
    assert executor.iteration == 1 and backend.executor is None
    assert len(list(DataExecutor(numbers(2)))) == 2
    assert (executor.artifact_dir / "performance.json").is_file()


def test_an_exception_in_the_loop_body_leaves_the_backend_usable(backend):
    with pytest.raises(KeyError, match="mine"):
        for x in DataExecutor(numbers(3)):
            double(x)
            raise KeyError("mine")
    assert backend.executor is None
    for x in DataExecutor(numbers(1)):
        assert double(x).shape == ()


def test_an_exception_in_a_closure_is_raised_with_its_own_traceback(backend):
    @cstorch.step_closure
    def fails(value):
        raise ZeroDivisionError(f"value {value.item()}")

    with pytest.raises(ZeroDivisionError, match="value 0.0") as caught:
        for x in DataExecutor(numbers(3)):
            fails(double(x))
    assert caught.traceback[-1].name == "fails"
    assert backend.executor is None and len(list(DataExecutor(numbers(1)))) == 1


def test_a_closure_that_fails_at_a_break_is_not_silent(backend, caplog):
    @cstorch.step_closure
    def fails(value):
        raise ZeroDivisionError("at the break")

    for x in DataExecutor(numbers(3)):
        fails(double(x))
        break
    assert "A closure failed at step 1" in caplog.text and "ZeroDivisionError: at the break" in caplog.text
    assert backend.executor is None


def test_an_exception_in_the_loader_is_the_users_own(backend):
    def batches():
        yield torch.ones(2)
        raise FileNotFoundError("shard-7")

    executor = DataExecutor(DataLoader(batches), num_steps=3)
    with pytest.raises(FileNotFoundError, match="shard-7"):
        list(executor)
    assert executor.iteration == 0 and backend.executor is None


def test_executors_nest_on_cpu():
    make_backend("CPU")
    outer, inner = DataExecutor(numbers(2)), DataExecutor(numbers(3))
    order = []

    @cstorch.step_closure
    def note(what):
        order.append((what, cstorch.current_executor() is outer))

    for _ in outer:
        note("train")
        for _ in inner:
            assert cstorch.current_executor() is inner
            note("validate")
        assert cstorch.current_executor() is outer
    assert order == [("validate", False)] * 3 + [("train", True)] + [("validate", False)] * 3 + [("train", True)]


def test_executors_do_not_nest_on_csx_nor_within_themselves():
    backend = make_backend("CSX")
    with pytest.raises(RuntimeError, match="Another DataExecutor is running"):
        for _ in DataExecutor(numbers(2)):
            list(DataExecutor(numbers(2)))
    assert backend.executor is None
    make_backend("CPU")
    executor = DataExecutor(numbers(2))
    with pytest.raises(RuntimeError, match="This DataExecutor is running"):
        for _ in executor:
            list(executor)


def test_an_executor_of_a_replaced_backend_says_so():
    make_backend("CPU")
    executor = DataExecutor(numbers(1))
    make_backend("CPU")
    with pytest.raises(RuntimeError, match="replaced"):
        list(executor)


# loaders


def test_the_executor_takes_our_loader_only():
    make_backend()
    with pytest.raises(TypeError, match=r"cstorch.utils.data.DataLoader\("):
        DataExecutor([torch.ones(2)])
    with pytest.raises(TypeError, match="takes the function that makes a loader"):
        DataLoader([torch.ones(2)])


@pytest.mark.parametrize("num_steps", [None, 2])
def test_an_input_function_that_returns_no_iterable(backend, num_steps):
    def get_loader():
        return 3

    with pytest.raises(TypeError, match=r"input function .*get_loader returned int.*\n.*Instead: return a torch"):
        list(DataExecutor(DataLoader(get_loader), num_steps=num_steps))
    assert backend.executor is None


def test_an_error_of_the_input_function_is_not_taken_for_a_missing_length():
    make_backend()

    def get_loader():
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        DataExecutor(DataLoader(get_loader))


@pytest.mark.parametrize("num_steps", [None, 2])
def test_an_empty_loader(backend, num_steps):
    with pytest.raises(RuntimeError, match="empty|yields no batch"):
        list(DataExecutor(DataLoader(lambda: []), num_steps=num_steps))
    assert backend.executor is None


def test_arguments_reach_the_input_function():
    make_backend()
    loader = DataLoader(lambda n, *, size: [torch.ones(size)] * n, 3, size=2)
    assert [x.shape for x in DataExecutor(loader)] == [(2,)] * 3


def test_a_copy_of_a_loader_keeps_its_id_and_starts_afresh():
    calls = []

    def get_loader():
        calls.append(1)
        return iter([torch.ones(1)])

    loader, other = DataLoader(get_loader), DataLoader(get_loader)
    assert next(loader.batches()).shape == (1,)
    copied = copy.copy(loader)
    assert copied.id == loader.id != other.id
    assert copied.dataloader is not loader.dataloader and len(calls) == 2


class Pair(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2, 3), "y": {"z": torch.ones(2)}},
        Pair(torch.ones(2, 3), torch.ones(2)),
        [torch.ones(2, 3), (torch.ones(2),)],
        torch.ones(2, 3),
        {"scale": torch.tensor(2.0), "x": torch.ones(2, 3)},
    ],
    ids=["dict", "namedtuple", "list", "tensor", "scalar first"],
)
def test_batches_keep_their_structure(backend, batch):
    seen = []

    def total(value):
        if isinstance(value, torch.Tensor):
            return value.sum()
        return sum(total(v) for v in (value.values() if isinstance(value, dict) else value))

    step = cstorch.trace(lambda b: total(b))

    @cstorch.step_closure
    def keep(value):
        seen.append(value.item())

    executor = DataExecutor(DataLoader(lambda: [batch] * 3))
    for b in executor:
        assert type(b) is type(batch) or isinstance(batch, torch.Tensor)
        keep(step(b))
    assert seen == [total(batch).item()] * 3
    assert executor.profiler.rate_tracker.total_samples == 6


def test_torch_workers_deliver_in_order(backend):
    loader = DataLoader(
        lambda: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(12.0)), batch_size=2, num_workers=2
        )
    )
    seen = []

    @cstorch.step_closure
    def keep(value):
        seen.append(value.item())

    for (x,) in DataExecutor(loader, num_steps=8):
        keep(double(x))
    assert seen == [2.0 * (4 * i + 1) for i in (0, 1, 2, 3, 4, 5, 0, 1)]


def test_cpu_says_that_csx_would_refuse_a_smaller_last_batch(caplog):
    make_backend("CPU")
    loader = DataLoader(lambda: [torch.ones(n, 1) for n in (4, 4, 3, 2)])
    executor = DataExecutor(loader)
    list(executor)
    assert [r.getMessage() for r in caplog.records] == [
        "The batch of step 3 has 3 samples, the first one 4; the CSX backend needs batches of one size (drop_last=True)"
    ]
    assert executor.profiler.rate_tracker.total_samples == 13


class Counting:
    """A restartable loader: yields its position, and remembers what was asked of it."""

    def __init__(self, size=3):
        self.position, self.size, self.calls = 0, size, []

    def __iter__(self):
        while self.position < 100:
            self.position += 1
            yield torch.full((self.size,), float(self.position))

    def state_dict(self):
        self.calls.append("state_dict")
        return dataclasses.asdict(cstorch.distributed.get_worker_state()) | {"position": self.position}

    def load_state_dict(self, state_dict):
        self.calls.append("load_state_dict")
        self.position = state_dict["position"]

    def aggregate_state_dict(self, worker_states):
        self.calls.append("aggregate_state_dict")
        return {"workers": worker_states}

    def deaggregate_state_dict(self, aggregated_state_dict):
        self.calls.append("deaggregate_state_dict")
        return aggregated_state_dict["workers"][0]


def test_a_loader_is_saved_at_checkpoint_steps_and_resumes(backend):
    assert isinstance(Counting(), RestartableDataLoader)
    loader = DataLoader(Counting)
    assert loader.is_restartable
    saved, refused = {}, []

    @cstorch.checkpoint_closure
    def save():
        saved[executor.user_iteration] = loader.state_dict()

    @cstorch.step_closure
    def ask():
        try:
            loader.state_dict()
        except RuntimeError as e:
            refused.append((executor.user_iteration, "checkpoint steps only" in str(e)))

    with pytest.raises(RuntimeError, match="checkpoint steps only"):
        loader.state_dict()
    executor = DataExecutor(loader, num_steps=7, checkpoint_steps=3)
    for x in executor:
        double(x)
        save()
        ask()
        with pytest.raises(RuntimeError, match="only before its executor starts"):
            loader.load_state_dict({})
    assert refused == [(step, True) for step in (1, 2, 4, 5)]
    states = {step: state["workers"][0] for step, state in saved.items()}
    assert {step: s["position"] for step, s in states.items()} == {3: 3, 6: 6, 7: 7}
    assert {step: s["samples_streamed"] for step, s in states.items()} == {3: 9, 6: 18, 7: 21}
    assert states[6]["appliance_step"] == states[6]["worker_step"] == 6
    with pytest.raises(RuntimeError, match="checkpoint steps only"):
        loader.state_dict()

    resumed = DataLoader(Counting)
    resumed.load_state_dict(saved[6], strict=True)
    assert resumed.dataloader.calls == [], "restored when the executor starts"
    first = []

    @cstorch.step_closure
    def keep(value):
        first.append(value.item())

    for x in DataExecutor(resumed, num_steps=2):
        keep(double(x))
    assert first == [2.0 * 3 * 7, 2.0 * 3 * 8]
    assert resumed.dataloader.calls == ["deaggregate_state_dict", "load_state_dict"]


def test_a_loader_that_lacks_a_method_is_not_restartable():
    make_backend()
    loader = DataLoader(lambda: torch.utils.data.DataLoader(torch.arange(3.0)))
    assert not loader.is_restartable
    for act in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(RuntimeError, match="it lacks state_dict, load_state_dict, .*\n.*RestartableDataLoader"):
            act()


def test_release_2_0_can_switch_checkpointing_of_a_loader_off():
    make_backend()
    loader = DataLoader(Counting)
    for _ in DataExecutor(loader, num_steps=1, checkpoint_steps=1):
        state = loader.serialize_state_dict()
    import io

    assert torch.load(io.BytesIO(state))["workers"][0]["position"] == 1
    loader.disable_dataloader_checkpointing()
    assert not loader.is_restartable
    with pytest.raises(RuntimeError, match="disable_dataloader_checkpointing"):
        loader.state_dict()


# NaN


@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: {"loss": v}, lambda v: [0, (v,)]], ids=["bare", "dict", "nested"]
)
def test_a_nan_is_reported_once_with_its_step_and_training_goes_on(backend, caplog, wrap):
    seen = []

    @cstorch.step_closure
    def log_loss(value):
        seen.append(value)

    loader = DataLoader(lambda: [torch.full((2,), v) for v in (1.0, 2.0, float("nan"), float("nan"))])
    for x in DataExecutor(loader):
        log_loss(wrap(double(x)))
    warned = [r.getMessage() for r in caplog.records if "NaN" in r.getMessage()]
    assert len(warned) == 1 and warned[0].startswith("NaN at step 3") and "log_loss" in warned[0]
    assert caplog.records[-1].levelno == logging.WARNING and len(seen) == 4


def test_infinity_is_no_nan(backend, caplog):
    log = cstorch.step_closure(lambda value: None)
    for x in DataExecutor(DataLoader(lambda: [torch.full((2,), float("inf"))])):
        log(double(x))
    assert "NaN" not in caplog.text


# summaries


def test_summaries_are_read_back(backend, tmp_path):
    with SummaryWriter(str(tmp_path / "events"), base_step=11) as writer:
        model = nn.Linear(3, 1, bias=False)
        compiled = cstorch.compile(model, backend)

        @cstorch.trace
        def step(x):
            y = compiled(x)
            cstorch.summarize_scalar("inside/mean", y.mean())
            cstorch.summarize_tensor("inside/y", y)
            return y.sum()

        with pytest.warns(DeprecationWarning, match=r"writer"):
            executor = DataExecutor(numbers(3), writer=writer)
        for x in executor:
            total = step(x)
            cstorch.summarize_scalar("outside/total", total)
            cstorch.summarize_scalar("outside/number", executor.iteration * 0.5)
            cstorch.summarize_tensor("outside/x", x)
    reader = SummaryReader(str(tmp_path / "events"))
    weight = model.weight.detach().cpu()
    for i in range(3):
        y = torch.full((2, 3), float(i)) @ weight.T
        assert reader.read_scalar("inside/mean", i + 11).value == pytest.approx(y.mean().item(), abs=1e-6)
        assert reader.read_scalar("outside/total", i + 11).value == pytest.approx(y.sum().item(), abs=1e-6)
        assert reader.read_scalar("outside/number", i + 11).value == i * 0.5
        assert torch.allclose(reader.read_tensor("inside/y", i + 11).tensor, y)
        assert torch.equal(reader.read_tensor("outside/x", i + 11).tensor, torch.full((2, 3), float(i)))


def test_summaries_without_a_writer_or_an_executor_go_nowhere(backend):
    cstorch.summarize_scalar("x", 1.0)
    for x in DataExecutor(numbers(1)):
        cstorch.summarize_scalar("x", double(x))
        cstorch.summarize_tensor("y", x)


def test_summaries_check_what_they_get():
    with pytest.raises(ValueError, match=r"'x'.*one element.*summarize_tensor"):
        cstorch.summarize_scalar("x", torch.ones(2))
    with pytest.raises(TypeError, match="'x'.*number"):
        cstorch.summarize_scalar("x", "3")
    with pytest.raises(TypeError, match="'y' takes a tensor|'y'.*takes a tensor"):
        cstorch.summarize_tensor("y", [1.0])
    with pytest.raises(TypeError, match="name"):
        cstorch.summarize_scalar(3, 1.0)


def test_a_writer_is_a_summary_writer():
    make_backend()
    with pytest.raises(TypeError, match="SummaryWriter"):
        DataExecutor(numbers(1), writer="events")
