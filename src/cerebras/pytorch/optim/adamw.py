"""AdamW; it shares its update with Adam, see adam.py."""

from .adam import AdamW

__all__ = ["AdamW"]
