"""The framework-agnostic part of cstorch: logging, errors, storage, cluster. Nothing here imports torch."""

from .log import logger

__all__ = ["logger"]
