"""max_checkpoints deletes only what this run wrote or adopted, oldest step first, and only after a complete save."""

import sys

import pytest
import torch

from cerebras.pytorch import storage


@pytest.fixture
def rotate(monkeypatch):
    rotation = storage.CheckpointRotation()
    # The function of the same name hides the module from an attribute path.
    monkeypatch.setattr(sys.modules["cerebras.pytorch.storage.save"], "_rotation", rotation)
    return rotation


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_the_newest_by_number_stay(tmp_path, rotate):
    (tmp_path / "ckpt_1.mdl").write_text("of another run")
    (tmp_path / "unrelated.txt").write_text("x")
    storage.set_max_checkpoints(2)
    for step in (8, 9, 10, 100):
        storage.save([step], tmp_path / f"ckpt_{step}.mdl")
    assert names(tmp_path) == ["ckpt_1.mdl", "ckpt_10.mdl", "ckpt_100.mdl", "unrelated.txt"]


def test_an_adopted_file_counts(tmp_path, rotate):
    storage.save([5], tmp_path / "ckpt_5.mdl")
    rotate.__init__(limit=1)
    storage.save([6], tmp_path / "ckpt_6.mdl")
    assert names(tmp_path) == ["ckpt_5.mdl", "ckpt_6.mdl"]
    storage.adopt(tmp_path / "ckpt_5.mdl")
    storage.save([7], tmp_path / "ckpt_7.mdl")
    assert names(tmp_path) == ["ckpt_7.mdl"]
    with pytest.raises(FileNotFoundError):
        storage.adopt(tmp_path / "ckpt_8.mdl")


def test_a_failing_save_deletes_nothing(tmp_path, rotate):
    storage.set_max_checkpoints(1)
    storage.save([1], tmp_path / "ckpt_1.mdl")
    undo = storage.register_tensor_resolver(lambda tensor: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            storage.save([torch.ones(1)], tmp_path / "ckpt_2.mdl")
    finally:
        undo()
    assert storage.load(tmp_path / "ckpt_1.mdl") == [1] and names(tmp_path) == ["ckpt_1.mdl"]


def test_the_file_just_written_stays_even_with_a_lower_step(tmp_path, rotate):
    storage.set_max_checkpoints(1)
    storage.save([100], tmp_path / "ckpt_100.mdl")
    storage.save([5], tmp_path / "ckpt_5.mdl")
    assert names(tmp_path) == ["ckpt_5.mdl"]


def test_a_name_without_a_step_and_another_series_stay(tmp_path, rotate):
    storage.set_max_checkpoints(1)
    for name in ("final.mdl", "best.mdl", "a_1.mdl", "b_1.mdl", "a_2.mdl"):
        storage.save([1], tmp_path / name)
    assert names(tmp_path) == ["a_2.mdl", "b_1.mdl", "best.mdl", "final.mdl"]


def test_a_file_put_in_place_of_ours_stays(tmp_path, rotate):
    storage.set_max_checkpoints(1)
    storage.save([1], tmp_path / "c_1.mdl")
    (tmp_path / "new").write_text("somebody's")
    (tmp_path / "new").replace(tmp_path / "c_1.mdl")
    storage.save([2], tmp_path / "c_2.mdl")
    assert names(tmp_path) == ["c_1.mdl", "c_2.mdl"]


def test_the_checkpoint_a_run_resumes_from_is_adopted_when_a_later_step_is_saved(tmp_path, rotate):
    for name in ("c_1.mdl", "c_2.mdl", "c_9.mdl", "other_1.mdl"):
        storage.save([1], tmp_path / name)
    rotate.__init__(limit=1)  # a new run
    for name in ("c_2.mdl", "c_9.mdl", "other_1.mdl"):
        storage.load(tmp_path / name)
    storage.save([3], tmp_path / "c_3.mdl")
    assert names(tmp_path) == ["c_1.mdl", "c_3.mdl", "c_9.mdl", "other_1.mdl"]


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_that_would_keep_nothing_are_refused(limit):
    with pytest.raises(ValueError, match="positive"):
        storage.set_max_checkpoints(limit)
    with pytest.raises(TypeError):
        storage.set_max_checkpoints(True)
