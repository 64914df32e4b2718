"""Moving modules and batches to csx."""

import torch

from . import device as dev
from . import tensor as tensor_module
from .tensor import Cell, CsxTensor


def move_to_csx(module: torch.nn.Module) -> None:
    """Moves parameters and buffers, in place: every parameter object stays the same, so optimizers and ties hold."""
    moved: dict[int, CsxTensor] = {}
    with torch.no_grad():
        for sub in module.modules():
            for name, param in list(sub._parameters.items()):
                if param is None or isinstance(param, CsxTensor):
                    continue
                if id(param) not in moved:
                    replacement = torch.nn.Parameter(_on_csx(param.data), param.requires_grad)
                    grad = param.grad
                    param.grad = None
                    torch.utils.swap_tensors(param, replacement)
                    if grad is not None:
                        param.grad = _on_csx(grad)
                    moved[id(param)] = param
                sub._parameters[name] = moved[id(param)]
            for name, buffer in list(sub._buffers.items()):
                if buffer is None or isinstance(buffer, CsxTensor):
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = _on_csx(buffer)
                    moved[-id(buffer)] = buffer  # keeps the id from being used again
                sub._buffers[name] = moved[id(buffer)]


def _on_csx(value: torch.Tensor) -> CsxTensor:
    tape = tensor_module.tape
    if tape.mode == "drop":
        with tensor_module.fake_mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=dev.execution_device())
        return CsxTensor(Cell(fake=fake, status="dropped"))
    return tensor_module.wrap(value.to(dev.execution_device()))


def send(batch):
    """A batch with every tensor on csx; memory is shared where the program runs on the CPU."""
    device = dev.execution_device()
    on_cpu = device.type == "cpu"

    def move(t):
        if isinstance(t, CsxTensor):
            return t
        return CsxTensor(Cell(real=t if on_cpu else t.to(device, non_blocking=True)))

    return _map(move, batch)


def _map(fn, value):
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) in (list, tuple):
        return type(value)([_map(fn, v) for v in value])
    if type(value) is dict:
        return {k: _map(fn, v) for k, v in value.items()}
    from ..utils.nest import map_torch_tensors

    return map_torch_tensors(lambda scope, t: fn(t), value)
