"""Walks over nested structures."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from torch.utils._pytree import tree_flatten

from cerebras.pytorch.utils import nest

Pair = namedtuple("Pair", "one two")


class Batch:
    def __init__(self, items):
        self.items = items


@pytest.fixture
def visitable():
    @nest.register_visit_fn(Batch)
    def visit_batch(batch):
        for index, item in enumerate(batch.items):
            yield ["items", str(index)], item

    yield
    nest.unregister_visit_fn(Batch)


def names(visited):
    return [".".join(scope) for scope, _ in visited]


def test_scopes_are_dotted_names_of_keys_and_positions():
    tensor = torch.zeros(1)
    data = {"a": [tensor, (tensor, 3)], 7: UserDict(b=tensor), "c": Pair(tensor, OrderedDict(d=tensor))}
    expected = ["a.0", "a.1.0", "7.b", "c.0", "c.1.d"]
    assert names(nest.visit_torch_tensors(data)) == expected
    assert names(nest.visit_torch_tensors(data, scope=["root"])) == [f"root.{name}" for name in expected]
    assert names(nest.visit_torch_tensors(tensor)) == [""]


def test_strict_names_the_leaf_that_is_no_tensor():
    with pytest.raises(ValueError, match=r"a\.1 is a int"):
        list(nest.visit_torch_tensors({"a": [torch.zeros(1), 3]}, strict=True))


def test_registered_types_and_their_subclasses_are_entered(visitable):
    class Special(Batch):
        pass

    assert names(nest.visit_torch_tensors([Special([torch.zeros(1), {"x": torch.zeros(1)}])])) == [
        "0.items.0",
        "0.items.1.x",
    ]
    with pytest.raises(ValueError, match="unregister_visit_fn"):
        nest.register_visit_fn(Batch)(print)


def test_an_unregistered_type_is_a_leaf():
    assert nest.find_visit_fn(Batch([])) is None
    with pytest.raises(ValueError, match="no visit function"):
        nest.unregister_visit_fn(Batch)
    with pytest.raises(TypeError, match="one or more classes"):
        nest.register_visit_fn()


def test_a_class_that_can_be_visited_but_not_rebuilt_is_not_silently_left_unmapped(visitable):
    with pytest.raises(TypeError, match="a is a Batch"):
        nest.map_torch_tensors(lambda scope, tensor: tensor + 1, {"a": Batch([torch.zeros(1)])})


def test_map_rebuilds_the_structure_and_tells_the_scope():
    data = {"a": [torch.zeros(1), "text"], "b": Pair(torch.ones(1), None), "c": defaultdict(list, x=torch.ones(1))}
    seen = []

    def double(scope, tensor):
        seen.append(".".join(scope))
        return tensor * 2

    mapped = nest.map_torch_tensors(double, data, scope=["s"])
    assert seen == ["s.a.0", "s.b.0", "s.c.x"]
    assert mapped["a"][1] == "text" and mapped["b"].one.item() == 2 and type(mapped["b"]) is Pair
    assert data["b"].one.item() == 1


def test_recurse_spec_agrees_with_the_order_of_the_leaves():
    data = {"b": [1, {"x": 2}], "a": Pair(3, OrderedDict(y=4)), "d": defaultdict(int, z=5), "e": [], "f": None}
    leaves, spec = tree_flatten(data)
    keys = [".".join(scope) for scope in nest.recurse_spec(spec)]
    assert dict(zip(keys, leaves, strict=True)) == {
        "b.0": 1,
        "b.1.x": 2,
        "a.0": 3,
        "a.1.y": 4,
        "d.z": 5,
        "f": None,
    }


def test_device_tensors_are_selected_by_device_type():
    data = [torch.zeros(1), torch.zeros(1, device="meta")]
    assert names(nest.visit_device_tensors(data, "meta")) == ["1"]
    assert names(nest.visit_lazy_tensors(data)) == []


@pytest.mark.parametrize(
    ("one", "two", "lines"),
    [
        ({"a": torch.tensor([1.0, float("nan")])}, {"a": torch.tensor([1.0, float("nan")])}, []),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a.1: 2 against 3"]),
        ({"a": 1}, {"b": 1}, ["'a' is in the first only", "'b' is in the second only"]),
        ([1], [1, 2], ["1: in the second only"]),
        (torch.zeros(2), torch.zeros(2).half(), ["dtype"]),
        (torch.zeros(2), torch.zeros(3), ["shape"]),
        (torch.zeros(2), torch.ones(2), ["different values"]),
        ([1], (1,), ["list against tuple"]),
        (float("nan"), float("nan"), []),
    ],
)
def test_diff_says_where_and_what(one, two, lines):
    found = list(nest.diff(one, two))
    assert len(found) == len(lines)
    assert all(line in text for line, text in zip(lines, found, strict=True))
