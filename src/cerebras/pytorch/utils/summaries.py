"""`summarize_scalar` and `summarize_tensor`: values of a step, written to the executor's SummaryWriter."""

import numbers

import torch

from ..core.closures import step_closure


def summarize_scalar(name: str, value) -> None:
    """Writes a scalar to TensorBoard at the end of the step, under the 1-based step (plus the writer's base_step - 1).

    Visible only where a SummaryWriter was given to the DataExecutor. May be called inside a traced step.

    Args:
        name: the tag.
        value: a tensor of one element, or a number.

    API reference: cerebras.pytorch.summarize_scalar.
    """
    _check_name("summarize_scalar", name)
    if not isinstance(value, (torch.Tensor, numbers.Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"summarize_scalar({name!r}) takes a number or a tensor of one element, not {value!r}")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"summarize_scalar({name!r}) takes a tensor of one element, not shape {tuple(value.shape)}; "
            "use summarize_tensor"
        )
    _write("add_scalar", name, value)


def summarize_tensor(name: str, value: torch.Tensor) -> None:
    """Writes a whole tensor at the end of the step; read it with SummaryReader.read_tensor.

    API reference: cerebras.pytorch.summarize_tensor.
    """
    _check_name("summarize_tensor", name)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"summarize_tensor({name!r}) takes a tensor, not {type(value).__name__}")
    _write("add_tensor", name, value)


def _check_name(function: str, name) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{function}: the name must be a str, not {name!r}")


@step_closure
def _write(method: str, name: str, value) -> None:
    from ..backend import current_backend_impl

    backend = current_backend_impl(raise_exception=False)
    executor = backend.executor if backend is not None else None
    writer = executor.writer if executor is not None else None
    if writer is None:
        return
    step = executor.iteration + getattr(writer, "base_step", 1)
    if method == "add_scalar":
        writer.add_scalar(name, value.item() if isinstance(value, torch.Tensor) else value, step)
    else:
        writer.add_tensor(name, value, step)
