"""The generator's state inside a traced step.

The body's random operations become operations of the graph; while it is recorded the generator stands still. Code that
saves the state and draws again from it (torch.utils.checkpoint recomputing a dropout) must get the same numbers, so
the results of draws made after a `get_rng_state` are kept, and drawing again after `set_rng_state` returns them.
"""

import contextlib

import torch

from .errors import StaticGraphError
from .tensor import aten, map_tensors


class DrawLog:
    """What was drawn since the body first asked for the generator's state."""

    def __init__(self):
        self._log: list[tuple] = []
        self._tokens: dict[int, tuple] = {}
        self._position: int | None = None  # where a replay is, None while drawing

    @contextlib.contextmanager
    def installed(self):
        instead = {
            "get_rng_state": self._get, "set_rng_state": self._set, "manual_seed": self._refuse, "seed": self._refuse,
        }  # fmt: skip
        saved = [(m, n, getattr(m, n)) for m in (torch, torch.random) for n in instead]
        for module, name, _ in saved:
            setattr(module, name, instead[name])
        try:
            yield self
        finally:
            for module, name, original in saved:
                setattr(module, name, original)

    @staticmethod
    def _refuse(*args):
        raise StaticGraphError(
            "The generator is seeded inside a traced step, whose body runs once.",
            "seed it with torch.manual_seed before the loop, or in the loop's body before the step",
        )

    def _get(self):
        token = torch.default_generator.get_state()
        self._tokens[id(token)] = (token, len(self._log) if self._position is None else self._position)
        return token

    def _set(self, state):
        if id(state) not in self._tokens:
            raise StaticGraphError(
                "The generator's state is set inside a traced step to one from outside: it would be the same at every "
                "step.",
                "set it between steps, or seed with torch.manual_seed before the loop",
            )
        position = self._tokens[id(state)][1]
        self._position = None if position == len(self._log) else position

    def draw(self, recorder, func, args, record):
        """Records a random operation, or gives the result that it had when it was drawn first."""
        if self._position is None:
            out = record()
            if self._tokens:
                with recorder:
                    self._log.append((func, map_tensors(aten.clone.default, out)))
            return out
        if self._position >= len(self._log) or self._log[self._position][0] is not func:
            raise StaticGraphError(
                f"After set_rng_state the step draws {func}, which it did not draw in this place before.",
                "draw the same numbers in the same order in what is computed again",
            )
        kept = self._log[self._position][1]
        self._position += 1
        if self._position == len(self._log):
            self._position = None
        with recorder:
            if func._schema.is_mutable:
                return aten.copy_.default(args[0], kept)
            return map_tensors(aten.clone.default, kept)
