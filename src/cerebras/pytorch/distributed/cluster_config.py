"""ClusterConfig: where a CSX run gets its boxes, streamers and weight servers."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://)?(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:{_WORD}/)?{_WORD}=(?:{_WORD})?")
_PRIORITIES = ("p1", "p2", "p3")


@dataclass(frozen=True)
class ClusterConfig:
    """What a run asks of the cluster. Checked when it is made, hashable, unchangeable (`dataclasses.replace` to vary).

    Args:
        mgmt_address: `host:port` of the cluster's head; None for the appliance embedded in this process.
        mgmt_namespace: namespace of the run on the cluster.
        credentials_path: file with the credentials.
        num_csx: boxes to run on, >= 0.
        max_wgt_servers: most weight servers, 0 for no limit of your own.
        max_act_per_csx: most activation servers of a box, 0 for no limit of your own.
        num_workers_per_csx: streamers of each box, 0 to let the cluster choose.
        cbcore_image: container image of the services.
        job_labels: `key=value` strings that the jobs carry.
        job_priority: "p1" (first), "p2" or "p3".
        job_time_sec: seconds after which the run is ended, not counting the queue; None for no limit.
        mount_dirs: directories that the streamers need; must exist, unless disable_mount_check.
        python_paths: entries of the streamers' PYTHONPATH; must exist.
        automount: find the directories to mount from the script's imports.
        mount_all: mount every directory that the cluster shares with this machine.
        disable_mount_check: do not check that the mounts can be seen from the cluster.
        disable_version_check: do not compare the versions of client and cluster.
        workflow_id: the group of jobs that this run belongs to.
        notifications: whom to tell when the run ends: str or mapping each.

    Lists are kept as tuples, and one str stands for a list of one.

    Raises:
        TypeError: an unknown field, or a value of the wrong type.
        ValueError: a value out of range, or a path that does not exist; names field, value and what is allowed.

    API page: cerebras.pytorch.distributed.ClusterConfig
    """

    mgmt_address: str | None = None
    mgmt_namespace: str | None = None
    credentials_path: str | None = None
    num_csx: int = 1
    max_wgt_servers: int = 0
    max_act_per_csx: int = 0
    num_workers_per_csx: int = 1
    cbcore_image: str | None = None
    job_labels: tuple[str, ...] = ()
    job_priority: str = "p2"
    job_time_sec: int | None = None
    mount_dirs: tuple[str, ...] = ()
    python_paths: tuple[str, ...] = ()
    automount: bool = False
    mount_all: bool = False
    disable_mount_check: bool = False
    disable_version_check: bool = False
    workflow_id: str | None = None
    notifications: tuple[Any, ...] = ()

    def __post_init__(self):
        for name in ("mgmt_address", "mgmt_namespace", "credentials_path", "cbcore_image", "workflow_id"):
            value = getattr(self, name)
            if name == "credentials_path" and isinstance(value, os.PathLike):
                value = self._set(name, os.fspath(value))
            if value is not None and not isinstance(value, str):
                raise self._wrong(TypeError, name, "a str or None")
            if value == "":
                raise self._wrong(ValueError, name, "a str that is not empty, or None")
        for name in ("num_csx", "max_wgt_servers", "max_act_per_csx", "num_workers_per_csx"):
            self._check_int(name, 0)
        if self.job_time_sec is not None:
            self._check_int("job_time_sec", 1, " (seconds), or None")
        for name in ("automount", "mount_all", "disable_mount_check", "disable_version_check"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(TypeError, name, "True or False")
        self._check_address()
        self._check_lists()
        if self.job_priority not in _PRIORITIES:
            kind = ValueError if isinstance(self.job_priority, str) else TypeError
            raise self._wrong(kind, "job_priority", f"one of {', '.join(map(repr, _PRIORITIES))}")

    def _set(self, name: str, value: Any) -> Any:
        object.__setattr__(self, name, value)
        return value

    def _wrong(self, kind: type[Exception], name: str, allowed: str, value: Any = None) -> Exception:
        value = getattr(self, name) if value is None else value
        return kind(f"ClusterConfig: {name}={value!r} ({type(value).__name__}) is refused; use {allowed}.")

    def _check_int(self, name: str, low: int, more: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(TypeError, name, f"an int >= {low}{more}")
        if value < low:
            raise self._wrong(ValueError, name, f"an int >= {low}{more}")

    def _check_address(self) -> None:
        if self.mgmt_address is None:
            return
        match = _ADDRESS.fullmatch(self.mgmt_address)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise self._wrong(ValueError, "mgmt_address", "host:port, such as 'head.example.org:6379', or None")

    def _check_lists(self) -> None:
        for name in ("job_labels", "mount_dirs", "python_paths"):
            value = getattr(self, name)
            items = () if value is None else (value,) if isinstance(value, (str, os.PathLike)) else value
            if not isinstance(items, (list, tuple)):
                raise self._wrong(TypeError, name, "a list of str")
            paths = name != "job_labels"
            items = tuple(os.fspath(item) if paths and isinstance(item, os.PathLike) else item for item in items)
            for item in items:
                if not isinstance(item, str):
                    raise self._wrong(TypeError, name, "a list of str")
            self._set(name, items)
        for label in self.job_labels:
            if not _LABEL.fullmatch(label):
                raise self._wrong(
                    ValueError,
                    "job_labels",
                    "'key=value' of letters, digits, '-', '_' and '.', such as 'team=nlp'",
                    label,
                )
        if not self.disable_mount_check:
            for path in self.mount_dirs:
                if not os.path.isdir(path):
                    raise self._wrong(ValueError, "mount_dirs", "directories that exist on this machine", path)
        for path in self.python_paths:
            if not os.path.exists(path):
                raise self._wrong(ValueError, "python_paths", "paths that exist on this machine", path)
        notifications = self.notifications
        if notifications is None:
            notifications = ()
        elif isinstance(notifications, (str, Mapping)):
            notifications = (notifications,)
        if not isinstance(notifications, (list, tuple)) or not all(
            isinstance(target, (str, Mapping, tuple)) for target in notifications
        ):
            raise self._wrong(TypeError, "notifications", "a list of str or mappings")
        self._set("notifications", tuple(map(_freeze, notifications)))


def _freeze(value: Any) -> Any:
    """Mappings and lists as tuples, so that the configuration can be hashed."""
    if isinstance(value, Mapping):
        return tuple((key, _freeze(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))
    return value
