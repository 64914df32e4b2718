"""What SummaryWriter writes, SummaryReader reads; and a tensor file cannot run code."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cerebras.pytorch.utils.tensorboard import SummaryReader, SummaryWriter


@pytest.fixture
def writer(tmp_path):
    with SummaryWriter(log_dir=str(tmp_path)) as writer:
        yield writer


def test_scalars_come_back_by_name_and_step(writer, tmp_path):
    for step in range(3):
        writer.add_scalar("train/loss", 10.0 - step, step)
    writer.add_scalar("lr", 0.5, 7)
    writer.flush()
    reader = SummaryReader(str(tmp_path))
    assert reader.scalar_names() == {"train/loss", "lr"}
    assert reader.scalar_groups() == {"train"}
    assert [(event.step, event.value) for event in reader.read_scalar("train/loss")] == [(0, 10.0), (1, 9.0), (2, 8.0)]
    assert reader.read_scalar("train/loss", 1).value == 9.0
    assert reader.read_scalar("train/loss", 99) is None
    assert reader.read_scalar("unknown") == []
    assert reader.Scalars("lr")[0].step == 7
    assert reader.Tags()["scalars"] == ["lr", "train/loss"]


def test_no_scalar_is_dropped_by_sampling(writer, tmp_path):
    for step in range(12000):
        writer.add_scalar("loss", step, step)
    writer.flush()
    assert len(SummaryReader(tmp_path).read_scalar("loss")) == 12000


def test_reload_takes_in_later_events_and_tensors(writer, tmp_path):
    writer.add_scalar("loss", 1.0, 0)
    writer.flush()
    reader = SummaryReader(tmp_path)
    writer.add_scalar("loss", 2.0, 1)
    writer.add_tensor("w", torch.ones(1), 1)
    writer.flush()
    assert reader.tensor_names() == set()
    reader.reload()
    assert len(reader.read_scalar("loss")) == 2
    assert reader.tensor_names() == {"w"}


def test_runs_below_one_directory_and_several_directories_are_joined(tmp_path):
    for name, step in (("a/one", 0), ("a/two", 1), ("b", 2)):
        with SummaryWriter(log_dir=str(tmp_path / name)) as writer:
            writer.add_scalar("loss", float(step), step)
            writer.add_tensor("w", torch.tensor(step), step)
    reader = SummaryReader([tmp_path / "a", tmp_path / "b"])
    assert [event.value for event in reader.read_scalar("loss")] == [0.0, 1.0, 2.0]
    assert {step: found.tensor.item() for step, found in reader.read_tensor("w").items()} == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_keep_dtype_shape_and_bits(writer, tmp_path, dtype):
    tensor = torch.randn(4, 6)[::2, 1:].to(dtype)
    writer.add_tensor("model.fc.weight/grad", tensor, 3)
    found = SummaryReader(tmp_path).read_tensor("model.fc.weight/grad", 3)
    assert found.step == 3 and found.utc.year >= 2024
    assert found.tensor.dtype == dtype and torch.equal(found.tensor, tensor)


def test_a_step_written_again_gives_the_latest_and_all_on_request(writer, tmp_path):
    for value in range(20):
        writer.add_tensor("w", torch.tensor(value), 1)
    writer.add_tensor("w", torch.tensor(100), 10)
    reader = SummaryReader(tmp_path)
    assert {step: found.tensor.item() for step, found in reader.read_tensor("w").items()} == {1: 19, 10: 100}
    assert [found.tensor.item() for found in reader.read_tensor("w", 1, latest_only=False)] == list(range(20))
    assert len(reader.read_tensor("w", latest_only=False)[10]) == 1
    assert reader.read_tensor("w", 2) is None and reader.read_tensor("w", 2, latest_only=False) == []
    assert reader.read_tensor("unknown") == {}


def test_texts_come_back_under_the_name_they_were_given(writer, tmp_path):
    writer.add_text("notes", "hello", 4)
    writer.flush()
    reader = SummaryReader(tmp_path)
    assert reader.text_summary_names() == ["notes"]
    assert reader.read_text_summary("notes", 4).tensor_proto.string_val[0] == b"hello"
    assert reader.read_text_summary("unknown") == []


def test_the_filter_keeps_groups_that_start_with_it(writer, tmp_path):
    for name in ("train/loss", "training/lr", "val/loss", "train"):
        writer.add_scalar(name, 1.0, 0)
        writer.add_tensor(f"{name}_t", torch.zeros(1), 0)
    writer.flush()
    reader = SummaryReader(tmp_path, filter="train")
    assert reader.scalar_names() == {"train/loss", "training/lr"}
    assert reader.tensor_names() == {"train/loss_t", "training/lr_t"}
    assert reader.read_scalar("val/loss") == [] and reader.read_tensor("val/loss_t") == {}


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a//b", "a/../../x"])
def test_a_name_cannot_leave_the_directory(writer, name):
    with pytest.raises(ValueError, match="cannot name a tensor"):
        writer.add_tensor(name, torch.zeros(1), 0)


def test_what_is_no_tensor_or_no_step_is_refused(writer):
    with pytest.raises(TypeError, match="float"):
        writer.add_tensor("w", 1.0, 0)
    with pytest.raises(ValueError, match="step=-1"):
        writer.add_tensor("w", torch.zeros(1), -1)
    with pytest.raises(TypeError, match="base_step"):
        SummaryWriter(base_step="1")


def test_the_directory_of_tensors_stands_beside_the_event_file(writer):
    event_file = Path(writer._get_file_writer().event_writer._file_name)
    directory = Path(writer.cs_events_dir)
    assert directory.is_dir() and directory.parent == event_file.parent
    assert directory.name == event_file.name.replace("tfevents", "csevents")
    writer.add_tensor("w", torch.zeros(1), 5)
    (file,) = (directory / "tensors" / "w").iterdir()
    assert file.name.startswith("5.") and file.suffix == ".pt"


def test_a_pickle_in_a_tensor_file_does_not_run(writer, tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "created"), "w"))

    writer.add_tensor("w", torch.zeros(1), 0)
    (file,) = (Path(writer.cs_events_dir) / "tensors" / "w").iterdir()
    torch.save(Payload(), file)
    with pytest.raises(RuntimeError, match="cannot be read as a tensor"):
        SummaryReader(tmp_path).read_tensor("w")
    assert not (tmp_path / "created").exists()


def test_a_missing_directory_is_said():
    with pytest.raises(FileNotFoundError, match="/does/not/exist"):
        SummaryReader("/does/not/exist")


def test_utils_alone_does_not_import_tensorboard():
    code = "import sys, cerebras.pytorch.utils; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_step_a_scalar_gets_the_iteration_of_the_running_executor(tmp_path):
    code = f"""
import torch
import cerebras.pytorch as cstorch
from cerebras.pytorch.utils.tensorboard import SummaryReader, SummaryWriter

cstorch.backend("CPU", artifact_dir={str(tmp_path / "artifacts")!r})
loader = cstorch.utils.data.DataLoader(lambda: [torch.zeros(2, 1)] * 3)
with SummaryWriter(log_dir={str(tmp_path / "log")!r}) as writer:
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=3):
        writer.add_scalar("loss", 1.0)
print([event.step for event in SummaryReader({str(tmp_path / "log")!r}).read_scalar("loss")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[0, 1, 2]", done.stderr
