"""Why a run on the appliance ended. What restarts a run tells the causes apart by class.

API page: cerebras.appliance.errors
"""


class ApplianceError(RuntimeError):
    """A run on the appliance failed."""


class ApplianceCompilationError(ApplianceError):
    """The program does not compile; running it again does not help."""


class ApplianceDeadlockError(ApplianceError):
    """Services of the run wait for each other, or for data that does not come."""


class ApplianceNanError(ApplianceError):
    """A value that has to be finite is NaN or infinite."""


class ApplianceUnknownError(ApplianceError):
    """The run failed, and no service said why."""


class ClusterJobCancelledByCsctl(ApplianceError):
    """Somebody cancelled the job from outside; it is not to be restarted."""
