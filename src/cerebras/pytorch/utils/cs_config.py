"""CSConfig, release 2.0's name for the cluster's configuration. New code uses ClusterConfig and the flags."""

import warnings
from dataclasses import dataclass, fields
from typing import Any

from .call_once import call_once


@call_once()
def _deprecated() -> None:
    warnings.warn(
        "cerebras.pytorch.utils.CSConfig is deprecated. Use cerebras.pytorch.distributed.ClusterConfig, and the flags "
        "cerebras.pytorch.backends.csx.{performance.transfer_processes, precision.optimization_level, debug.debug_args}.",
        DeprecationWarning,
        stacklevel=5,
    )


@dataclass
class CSConfig:
    """Configuration of the cluster, in the old spelling: part ClusterConfig, part flags.

    Args:
        mgmt_address, credentials_path, num_csx, max_wgt_servers, max_act_per_csx, num_workers_per_csx, job_time_sec,
            mount_dirs, python_paths, job_labels: as in ClusterConfig.
        transfer_processes: the flag csx.performance.transfer_processes.
        debug_args: the flag csx.debug.debug_args.
        precision_opt_level: the flag csx.precision.optimization_level.

    Raises:
        TypeError, ValueError: as ClusterConfig and the flags, at construction.

    API page: cerebras.pytorch.utils.CSConfig
    """

    mgmt_address: str | None = None
    credentials_path: str | None = None
    num_csx: int = 1
    max_wgt_servers: int = 24
    max_act_per_csx: int = 1
    num_workers_per_csx: int = 1
    transfer_processes: int = 5
    job_time_sec: int | None = None
    mount_dirs: list[str] | None = None
    python_paths: list[str] | None = None
    job_labels: list[str] | None = None
    debug_args: Any = None
    precision_opt_level: int = 1

    def __post_init__(self):
        _deprecated()
        self._cluster_config()
        # Check now, where the user's line is on the stack; set in `to_cluster_config`.
        from ..backends.csx import Debug, Performance, Precision

        for flag, name in (
            (Performance.transfer_processes, "transfer_processes"),
            (Precision.optimization_level, "precision_opt_level"),
            (Debug.debug_args, "debug_args"),
        ):
            value = getattr(self, name)
            try:
                flag.check(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"CSConfig: {name}={value!r} is refused: {error}") from None

    def _cluster_config(self):
        from ..distributed.cluster_config import ClusterConfig

        shared = {field.name for field in fields(ClusterConfig)}
        return ClusterConfig(
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name in shared}
        )

    def flag_values(self) -> dict[str, Any]:
        """Dotted flag to value, of the flags that were given another value than their default."""
        values = {}
        if self.transfer_processes != 5:
            values["csx.performance.transfer_processes"] = self.transfer_processes
        if self.precision_opt_level != 1:
            values["csx.precision.optimization_level"] = self.precision_opt_level
        if self.debug_args is not None:
            values["csx.debug.debug_args"] = self.debug_args
        return values

    def to_cluster_config(self):
        """The ClusterConfig of the same run. Sets the flags of `flag_values`, and leaves the others as they are."""
        from .. import backends

        csx = backends.csx
        for name, value in self.flag_values().items():
            _, group, flag = name.split(".")
            setattr(getattr(csx, group), flag, value)
        return self._cluster_config()
