"""Optimizers, and schedulers of their hyper-parameters."""

from . import lr_scheduler, scheduler, weight_decay_scheduler
from .adadelta import Adadelta
from .adafactor import Adafactor
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .adamax import Adamax
from .asgd import ASGD
from .lamb import Lamb
from .lion import Lion
from .muon import Muon
from .nadam import NAdam
from .optimizer import Optimizer, ParamsT
from .radam import RAdam
from .rmsprop import RMSprop
from .rprop import Rprop
from .sgd import SGD

__all__ = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lamb",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "ParamsT",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "lr_scheduler",
    "scheduler",
    "weight_decay_scheduler",
]
