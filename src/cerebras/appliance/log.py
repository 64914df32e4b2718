"""Loggers: the package's own, one for each class that asks, and levels for the services of a cluster.

API page: cerebras.appliance.log
"""

import logging
from dataclasses import dataclass
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

TRACE = 5
VERBOSE = 15
logging.addLevelName(TRACE, "TRACE")
logging.addLevelName(VERBOSE, "VERBOSE")

logger = logging.getLogger("cerebras.appliance")
wsc_logger = logging.getLogger("wsc")
"""Levels of the services of a cluster: `wsc_logger.getChild("execute.wrk").setLevel("DEBUG")`.

It writes nothing itself. A child's name is `<mode>.<role>.<tag>`, each part optional.
"""

WSC_MODES = ("compile", "execute")
WSC_ROLES = ("crd", "chf", "wgt", "act", "cmd", "wrk", "br")


def get_level_name(level: int | str) -> int:
    """The number of a logging level given by name in any case, or by number; `logging` and its loggers take it.

    Raises:
        ValueError: a name that is no level.
        TypeError: neither a str nor an int.
    """
    if isinstance(level, bool) or not isinstance(level, (int, str)):
        raise TypeError(f"get_level_name: {level!r} is a {type(level).__name__}; use a level's name or number.")
    if isinstance(level, int):
        return level
    if level.isdigit():
        return int(level)
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        names = logging.getLevelNamesMapping()
        known = ", ".join(sorted(names, key=names.__getitem__))
        raise ValueError(f"get_level_name: {level!r} is not a logging level. Use one of {known}, or a number.")
    return number


class ClassLogger:
    """Base of classes that log as `self.logger`; the name comes from `named_class_logger`, else from the package."""

    logger: logging.Logger = logger


def named_logger(name: str) -> logging.Logger:
    """The package's logger for a part of it: a child of `cerebras.appliance`."""
    return logger.getChild(name)


def named_class_logger(name: str | type | None = None) -> Any:
    """Class decorator that gives a class, and instances, the attribute `logger`.

    Args:
        name: the logger's name below `cerebras.appliance`; the class's own name where the decorator is used bare.

    Raises:
        TypeError: something that is neither a name nor a class.
    """
    if isinstance(name, type):
        return _name(name, name.__name__)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"named_class_logger takes a name, or decorates a class; got {type(name).__name__}.")
    return lambda cls: _name(cls, name or cls.__name__)


def _name(cls: _Class, name: str) -> _Class:
    cls.logger = named_logger(name)
    return cls


@dataclass(frozen=True)
class WscLogSetting:
    """Level of some services of a cluster; None in a field means all.

    Args:
        level: as logging counts.
        mode: "compile" or "execute".
        role: one of WSC_ROLES.
        tag: name of a logger inside the service.
    """

    level: int
    mode: str | None = None
    role: str | None = None
    tag: str | None = None


def collect_wsc_log_settings() -> list[WscLogSetting]:
    """What was set below `wsc_logger`, the general before the specific, so that later settings win."""
    settings = []
    prefix = f"{wsc_logger.name}."
    if wsc_logger.level != logging.NOTSET:
        settings.append(WscLogSetting(wsc_logger.level))
    for name, known in list(logging.root.manager.loggerDict.items()):
        if name.startswith(prefix) and isinstance(known, logging.Logger) and known.level != logging.NOTSET:
            parts = name.removeprefix(prefix).split(".")
            mode = parts.pop(0) if parts[0] in WSC_MODES else None
            role = parts.pop(0) if parts and parts[0] in WSC_ROLES else None
            settings.append(WscLogSetting(known.level, mode, role, ".".join(parts) or None))
    return sorted(
        settings,
        key=lambda setting: (
            *(part is not None for part in (setting.mode, setting.role, setting.tag)),
            *(part or "" for part in (setting.mode, setting.role, setting.tag)),
        ),
    )
