"""Sizes in bytes: for people, and from one unit to another."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_BYTES = {unit.lower(): 1024**power for power, unit in enumerate(_BINARY)} | {
    unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)
}


def bytes_to_human(num: int, /, fmt: str = "{value:.1f}{unit}", log_base: int = 2) -> str:
    """A number of bytes in the largest unit of which there is at least one, such as "1.5GiB".

    Args:
        num: bytes; may be negative.
        fmt: how to join the fields `value` (float) and `unit` (str).
        log_base: 2 for steps of 1024 (KiB, MiB, ...), 10 for steps of 1000 (KB, MB, ...).

    Raises:
        ValueError: another log_base.
    """
    if log_base not in (2, 10):
        raise ValueError(f"bytes_to_human: log_base={log_base!r}; use 2 (KiB, MiB, ...) or 10 (KB, MB, ...).")
    units, step = (_BINARY, 1024) if log_base == 2 else (_DECIMAL, 1000)
    power = 0
    while power + 1 < len(units) and abs(num) >= step ** (power + 1):
        power += 1
    return fmt.format(value=num / step**power, unit=units[power])


def convert_byte_unit(num: int | float, tgt_unit: str, /, src_unit: str = "B", precision: int = 0) -> int | float:
    """A size in another unit. KB, MB, ... are steps of 1000 and KiB, MiB, ... of 1024; case does not matter.

    Args:
        num: the size, in `src_unit`.
        tgt_unit: the unit to convert to.
        src_unit: the unit to convert from.
        precision: decimals to round to; with 0 the result is an int.

    Raises:
        ValueError: an unknown unit, or a negative precision.
    """
    for unit in (tgt_unit, src_unit):
        if not isinstance(unit, str) or unit.strip().lower() not in _BYTES:
            raise ValueError(
                f"convert_byte_unit: {unit!r} is not a unit. Use one of {', '.join(_DECIMAL)}, {', '.join(_BINARY[1:])}."
            )
    if precision < 0:
        raise ValueError(f"convert_byte_unit: precision={precision}; use 0 or more.")
    source, target = _BYTES[src_unit.strip().lower()], _BYTES[tgt_unit.strip().lower()]
    # Multiplied first: a whole number of bytes stays exact.
    value = num * source / target if num * source % target else num * source // target
    return round(value, precision) if precision else round(value)
