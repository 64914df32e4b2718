"""The base of all optimizers: state made up front, exact checkpoints, hooks around `zero_grad`."""
# ruff: noqa: UP006, UP007, UP035  (annotations spelled as the published signatures are, tools compare them)

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Dict, Iterable, Union

import torch
from torch.utils.hooks import RemovableHandle

ParamsT = Union[Iterable[torch.Tensor], Iterable[Dict[str, Any]]]

STEP = "step"


def host_scalar(value: float = 0.0) -> torch.Tensor:
    """A counter of the optimizer: 0-d float32 on the host, whatever the default dtype and device are."""
    return torch.full((), value, dtype=torch.float32, device="cpu")


def check_hyper_parameters(name: str, **values: float) -> None:
    """Raises ValueError for the first of `values` that is negative."""
    for key, value in values.items():
        if value is not None and value < 0:
            raise ValueError(f"{name}: {key} must be at least 0, got {value}.")


def check_betas(name: str, betas: tuple) -> None:
    """Raises ValueError unless `betas` is a pair of decay rates in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {betas}.")


class Optimizer(torch.optim.Optimizer):
    """Base class of the optimizers of `cerebras.pytorch.optim`.

    It differs from `torch.optim.Optimizer` in what a step captured once as a static graph needs:

    1. State exists before the first step. The constructor calls `preinitialize()`, and so does `add_param_group()`;
       `step()` creates nothing.
    2. `step()` is ordinary tensor code, one parameter after the other, without Python control flow on numbers that
       change between steps. A key that a scheduler drives counts as changing.
    3. `load_state_dict()` writes into the existing tensors, so that a captured step keeps seeing them, and keeps their
       dtype: `state_dict()` followed by `load_state_dict()` is exact.

    To write an optimizer, override either `preinitialize()` and `step()`, or the two functions for one parameter that
    they call: `_init_state(group, param, state)` and `_update(group, param, grad, state)`.

    Args:
        params: parameters, or dictionaries that each describe a group of them.
        defaults: hyper-parameters for groups that do not give their own.
        enable_global_step: keep a counter for each parameter, see `increment_global_step`.
    """

    def __init__(self, params: ParamsT, defaults: Dict[str, Any], enable_global_step: bool = False):
        self._ready = False
        self.enable_global_step = enable_global_step
        self._scheduled_keys: set[str] = set()
        self._zero_grad_pre_hooks: OrderedDict = OrderedDict()
        self._zero_grad_post_hooks: OrderedDict = OrderedDict()
        super().__init__(params, defaults)
        self._ready = True
        self._make_state()

    def __getstate__(self) -> Dict[str, Any]:
        own = ("enable_global_step", "_scheduled_keys")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        # hooks are not copied, in torch neither
        self.__dict__.setdefault("_ready", True)
        self.__dict__.setdefault("enable_global_step", False)
        self.__dict__.setdefault("_scheduled_keys", set())
        self.__dict__.setdefault("_zero_grad_pre_hooks", OrderedDict())
        self.__dict__.setdefault("_zero_grad_post_hooks", OrderedDict())

    # state

    def preinitialize(self) -> None:
        """Creates the state of every trainable parameter that has none yet."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self.state.get(param):
                    state: Dict[str, Any] = {}
                    self._init_state(group, param, state)
                    if state:
                        self.state[param] = state

    def _init_state(self, group: Dict[str, Any], param: torch.Tensor, state: Dict[str, Any]) -> None:
        """Fills `state` for one parameter. The default: no state."""

    def _make_state(self) -> None:
        with torch.no_grad():
            self.preinitialize()
            if self.enable_global_step:
                for group in self.param_groups:
                    for param in group["params"]:
                        self.state[param].setdefault(STEP, host_scalar())

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group of parameters and creates their state."""
        super().add_param_group(param_group)
        if self._ready:
            self._make_state()

    def increment_global_step(self, p: torch.Tensor) -> torch.Tensor:
        """Adds one to the step counter of parameter `p` and returns the counter, a 0-d tensor.

        Raises:
            RuntimeError: the optimizer keeps no counter for `p`.
        """
        if STEP not in self.state.get(p, ()):
            raise RuntimeError(
                f"{type(self).__name__} keeps no step counter for a parameter of shape {tuple(p.shape)}. "
                "Pass enable_global_step=True to Optimizer.__init__."
            )
        step = self.state[p][STEP]
        step += 1
        return step

    def visit_state(self, fn: Callable[[torch.Tensor], Any]) -> None:
        """Calls `fn` on every tensor of the state; a tensor that it returns takes the place of the old one."""
        for state in self.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    new = fn(value)
                    if new is not None:
                        state[key] = new

    def apply(self, f: Callable[["Optimizer"], Any]) -> None:
        """Calls `f(optimizer)`: how a sparsity algorithm, for one, attaches itself."""
        f(self)

    # one step

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Updates every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients; a parameter of shape {tuple(param.shape)} "
                        "has one. Build its embedding with sparse=False."
                    )
                state = self.state[param]
                if not state:  # it was frozen when the state was made
                    self._init_state(group, param, state)
                self._update(group, param, -grad if group.get("maximize") else grad, state)
        return loss

    def _update(self, group: Dict[str, Any], param: torch.Tensor, grad: torch.Tensor, state: Dict[str, Any]) -> None:
        """Updates one parameter and its state in place."""
        raise NotImplementedError(f"{type(self).__name__} must override step().")

    def _decays(self, group: Dict[str, Any]) -> bool:
        """Whether weight decay belongs in the step: always where a scheduler drives it, whatever its value now."""
        return "weight_decay" in self._scheduled_keys or group["weight_decay"] != 0

    # gradients

    def zero_grad(self, *args, **kwargs) -> None:
        """Drops the gradients (or zeroes them, `set_to_none=False`), between the registered hooks."""
        for hook in tuple(self._zero_grad_pre_hooks.values()):
            hook(self, args, kwargs)
        super().zero_grad(*args, **kwargs)
        for hook in tuple(self._zero_grad_post_hooks.values()):
            hook(self, args, kwargs)

    def register_zero_grad_pre_hook(self, hook: Callable) -> RemovableHandle:
        """Calls `hook(optimizer, args, kwargs)` before each `zero_grad`."""
        handle = RemovableHandle(self._zero_grad_pre_hooks)
        self._zero_grad_pre_hooks[handle.id] = hook
        return handle

    def register_zero_grad_post_hook(self, hook: Callable) -> RemovableHandle:
        """Calls `hook(optimizer, args, kwargs)` after each `zero_grad`."""
        handle = RemovableHandle(self._zero_grad_post_hooks)
        self._zero_grad_post_hooks[handle.id] = hook
        return handle

    # checkpoints

    def state_dict(self, *args, **kwargs) -> Dict[str, Any]:
        """The state by parameter index, and the groups without their parameters, as in `torch.optim`."""
        return super().state_dict(*args, **kwargs)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Copies a `state_dict()` of this class, or of its counterpart in `torch.optim`, into this optimizer.

        A parameter without saved state keeps its fresh state. Keys that a saved group lacks keep their value.

        Raises:
            ValueError: other groups or parameters, or a tensor of another shape; the message names the parameter index.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            if result is not None:
                state_dict = result
        groups = [self._upgrade_group(dict(group)) for group in state_dict["param_groups"]]
        by_index = self._match_parameters(groups)
        updates = []
        for index, saved in state_dict["state"].items():
            index = int(index)
            if index not in by_index:
                raise ValueError(f"The saved state is for parameter {index}, which no saved group contains.")
            param, group = by_index[index]
            saved = self._upgrade_state(group, dict(saved))
            self._check_shapes(index, param, saved)
            updates.append((param, saved))
        # everything was checked: from here on nothing fails halfway
        for group, saved in zip(self.param_groups, groups):
            for key, value in saved.items():
                if key != "params":
                    group[key] = _like(group.get(key), value)
        for param, saved in updates:
            self._copy_state(param, saved)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _upgrade_group(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """Turns the hyper-parameters of a group saved by another implementation into ours."""
        return group

    def _upgrade_state(self, group: Dict[str, Any], state: Dict[str, Any]) -> Dict[str, Any]:
        """Turns the state of one parameter saved by another implementation into ours."""
        return state

    def _match_parameters(self, groups: list) -> dict:
        """{saved index: (parameter, saved group)}."""
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"The saved {type(self).__name__} has {len(groups)} parameter groups, this one {len(self.param_groups)}."
            )
        by_index = {}
        for i, (mine, saved) in enumerate(zip(self.param_groups, groups)):
            if len(mine["params"]) != len(saved["params"]):
                raise ValueError(
                    f"Group {i} of the saved {type(self).__name__} has {len(saved['params'])} parameters, "
                    f"here it has {len(mine['params'])}."
                )
            by_index.update({int(index): (param, saved) for index, param in zip(saved["params"], mine["params"])})
        return by_index

    def _check_shapes(self, index: int, param: torch.Tensor, saved: Dict[str, Any]) -> None:
        for key, mine in self.state.get(param, {}).items():
            value = saved.get(key)
            if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape != mine.shape:
                raise ValueError(
                    f"Parameter {index} (shape {tuple(param.shape)}): the saved '{key}' has shape "
                    f"{tuple(value.shape)}, this optimizer's has {tuple(mine.shape)}."
                )

    def _copy_state(self, param: torch.Tensor, saved: Dict[str, Any]) -> None:
        state = self.state[param]
        for key, value in saved.items():
            mine = state.get(key)
            if isinstance(mine, torch.Tensor):
                if value is not None:  # torch's SGD saves None for a buffer that does not exist yet
                    mine.copy_(value) if isinstance(value, torch.Tensor) else mine.fill_(value)
            elif isinstance(value, torch.Tensor):
                device = "cpu" if value.dim() == 0 and param.dim() > 0 else param.device
                state[key] = value.detach().to(device=device, copy=True)
            elif value is not None:
                state[key] = deepcopy(value)


def _like(mine: Any, saved: Any) -> Any:
    """A saved hyper-parameter in the type that this optimizer uses: files turn tuples to lists and numbers to tensors."""
    if isinstance(saved, torch.Tensor) and saved.dim() == 0 and not isinstance(mine, torch.Tensor):
        return saved.item()
    if isinstance(saved, (list, tuple)) and isinstance(mine, tuple):
        return tuple(_like(None, value) for value in saved)
    return deepcopy(saved)
