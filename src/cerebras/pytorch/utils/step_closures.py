"""The public place of the step closures; the engine's part is in `core/closures.py`."""

from ..core.closures import checkpoint_closure, step_closure

__all__ = ["checkpoint_closure", "step_closure"]
