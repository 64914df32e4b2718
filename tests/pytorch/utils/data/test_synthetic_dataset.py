"""SyntheticDataset: structures, workers, and refusals with a path."""

import itertools
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils.data import DataLoader

from cerebras.pytorch.utils.data.dataset import SyntheticDataset

Pair = namedtuple("Pair", "image label")


def number(index):
    return torch.tensor(index)


def test_a_sample_has_the_structure_of_its_specification():
    spec = {"a": [torch.zeros(2), number], "b": (number,), "c": OrderedDict(x=number), "d": Pair(torch.ones(3), number)}
    (sample,) = itertools.islice(SyntheticDataset(spec), 5, 6)
    assert list(sample) == ["a", "b", "c", "d"]
    assert type(sample["a"]) is list and type(sample["b"]) is tuple and type(sample["c"]) is OrderedDict
    assert type(sample["d"]) is Pair
    assert sample["d"].label == sample["a"][1] == sample["b"][0] == sample["c"]["x"] == 5


def test_a_tensor_leaf_is_cloned_so_that_samples_do_not_share_memory():
    spec = torch.zeros(2)
    one, two = SyntheticDataset(spec, num_samples=2)
    one += 1
    assert two.tolist() == spec.tolist() == [0, 0]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_index_comes_once_whatever_the_number_of_workers(workers):
    dataset = SyntheticDataset(number, num_samples=11)
    seen = [int(value) for batch in DataLoader(dataset, batch_size=2, num_workers=workers) for value in batch]
    assert sorted(seen) == list(range(11))
    assert len(dataset) == 11


def test_without_an_end_workers_stay_disjoint_and_there_is_no_length():
    dataset = SyntheticDataset(number)
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    seen = [int(value) for batch in itertools.islice(loader, 4) for value in batch]
    assert sorted(seen) == list(range(16))
    with pytest.raises(TypeError, match="no end"):
        len(dataset)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"x": [number, 3]}, r"sample_spec\['x'\]\[1\]"),
        (Pair(number, "y"), r"sample_spec\.label"),
        ({"x": {}}, r"sample_spec\['x'\] is an empty dict"),
        ([], "sample_spec is an empty list"),
        (None, "sample_spec is None"),
    ],
)
def test_a_bad_leaf_is_named_by_its_path(spec, path):
    with pytest.raises(ValueError, match=path):
        SyntheticDataset(spec)


def test_num_samples_is_checked():
    with pytest.raises(ValueError, match="num_samples=0"):
        SyntheticDataset(number, num_samples=0)
    with pytest.raises(TypeError, match="num_samples=2.0"):
        SyntheticDataset(number, num_samples=2.0)


def test_a_callable_that_returns_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"\['y'\] returned int for sample 0"):
        next(iter(SyntheticDataset({"y": int})))
