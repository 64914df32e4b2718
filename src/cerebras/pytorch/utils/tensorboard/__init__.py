"""TensorBoard event files, and whole tensors beside them.

API page: cerebras.pytorch Package, Tensorboard utilities.
"""

from .reader import SummaryReader, TensorDescriptor
from .writer import SummaryWriter

__all__ = ["SummaryReader", "SummaryWriter", "TensorDescriptor"]
