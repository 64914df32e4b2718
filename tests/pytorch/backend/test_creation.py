"""`cstorch.full` and its kin live on the backend's device, also inside a traced step."""

import torch

import cerebras.pytorch as cstorch


def test_constants_are_csx_tensors_on_csx_and_plain_ones_on_cpu():
    assert cstorch.zeros(3).device.type == "cpu"
    cstorch.backend("CSX")
    made = cstorch.full((2, 3), 1.5)
    assert made.device.type == "csx" and made.dtype is torch.float32
    assert torch.equal(made.cpu(), torch.full((2, 3), 1.5))
    assert cstorch.ones_like(made).device.type == "csx"
    assert cstorch.zeros_like(torch.ones(2)).device.type == "cpu", "like a CPU tensor is on the CPU"
    cstorch.backend("CPU")
    assert cstorch.zeros(3).device.type == "cpu"


def test_a_constant_inside_a_traced_step_is_part_of_the_graph():
    cstorch.backends.csx.debug.compiler = "eager"
    cstorch.backend("CSX")
    total = cstorch.zeros(2)

    @cstorch.trace
    def step(x):
        total.add_(x + cstorch.ones(2))
        return total * 1

    for x in (torch.ones(2), 2 * torch.ones(2)):
        result = step(x)
    assert result.tolist() == [5.0, 5.0]
    assert total.tolist() == [5.0, 5.0]
