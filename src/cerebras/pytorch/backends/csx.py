"""The flags of the CSX backend: `cerebras.pytorch.backends.csx.*`.

API page: cerebras.pytorch Package, Performance/Debug Flags.
"""

from ._flags import (
    MAX_TRANSFER_BYTES,
    Flag,
    Group,
    boolean,
    choice,
    debug_args,
    ini,
    integer,
    micro_batch_size,
    names,
    optional_text,
)
from ._settings import DebugArgs, Ini

_memory = integer(low=1, optional=True)


class Precision(Group):
    """Numerical precision of the compiled program."""

    optimization_level = Flag(
        1, integer(0, 2), "Precision optimization level: 0 is the most exact, 2 the fastest. int in [0, 3)."
    )


class Performance(Group):
    """Speed and memory of the compiled program and of its data transfers."""

    micro_batch_size = Flag(
        "auto",
        micro_batch_size,
        'Samples computed at once: "auto", "explore", an int, None (no tiling), or {"explore": {"min", "max"}}.',
    )
    transfer_processes = Flag(5, integer(low=1), "Processes that move tensors to and from the appliance.")
    max_transfer_bytes = Flag(
        MAX_TRANSFER_BYTES, integer(0, MAX_TRANSFER_BYTES), "Most bytes that one transfer process moves at once."
    )
    compress_weights = Flag(False, boolean, "Compress weights when they are written to storage.")
    use_speculative_optimizers = Flag(
        True, boolean, "Let the update run before the gradient's finiteness is known, and undo it if it was not finite."
    )


class Debug(Group):
    """Aids to find a fault, and limits of the cluster's services."""

    retrace_every_iteration = Flag(
        False, boolean, "Run the step's body at each iteration and compare its graph with the first."
    )
    lazy_initialization = Flag(True, boolean, "Record weight initialisation and replay it when it is needed.")
    compiler = Flag(
        "inductor",
        choice("inductor", "eager"),
        'What runs the captured step: "inductor" compiles it, "eager" interprets it operation by operation.',
    )
    debug_args = Flag(DebugArgs(), debug_args, "Tree of settings for the cluster's services.")
    ini = Flag(Ini(), ini, "Flat settings for the cluster's services.")
    compile_crd_memory_gi = Flag(None, _memory, "Memory limit of the compile coordinator, GiB.")
    execute_crd_memory_gi = Flag(None, _memory, "Memory limit of the execute coordinator, GiB.")
    wrk_memory_gi = Flag(None, _memory, "Memory limit of a streaming worker, GiB.")
    act_memory_gi = Flag(None, _memory, "Memory limit of an activation host, GiB.")
    cmd_memory_gi = Flag(None, _memory, "Memory limit of a command host, GiB.")
    wgt_memory_gi = Flag(None, _memory, "Memory limit of a weight host, GiB.")
    chf_memory_gi = Flag(None, _memory, "Memory limit of a chief host, GiB.")
    drop_data = Flag(False, boolean, "Drop the values of parameters; a checkpoint must then supply all state.")
    log_initialization = Flag(True, boolean, "Log the progress of weight initialisation.")
    fabric_type_blacklist = Flag(None, names, "Kinds of system that the program must not be placed on.")


class Cluster(Group):
    """Behaviour of the cluster around a run."""

    auto_taint = Flag(False, boolean, "Keep a node that failed out of the restarted run.")


class S3(Group):
    """Object storage."""

    profile = Flag(None, optional_text, "Named profile whose credentials reach S3.")


class Storage(Group):
    """Where checkpoints go."""

    _groups = {"s3": S3}


class Csx(Group):
    """Root of the CSX flags."""

    _groups = {
        "precision": Precision,
        "performance": Performance,
        "debug": Debug,
        "cluster": Cluster,
        "storage": Storage,
    }
