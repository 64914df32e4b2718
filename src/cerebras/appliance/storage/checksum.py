"""The checksums of a checkpoint: fast enough to be always on.

Data: each 4096-byte block is summed as little-endian 64-bit words, and the sums are hashed with BLAKE2b. That runs at the
speed of memory, and notices every change within one word of a block and every block that is lost, zeroed or moved; it is
made for accidents, not against forgery. Metadata: BLAKE2b over all names and values.
"""

import hashlib

import numpy as np

BLOCK = 4096
_DIGEST_SIZE = 16


class DataChecksum:
    """Accumulates the checksum of one array; every `update` but the last takes a multiple of `BLOCK` bytes."""

    def __init__(self):
        self._sums = hashlib.blake2b(digest_size=_DIGEST_SIZE)
        self._size = 0

    def update(self, data: memoryview | np.ndarray) -> None:
        """Adds bytes (one dimension, uint8)."""
        size = len(data)
        self._size += size
        whole = size - size % BLOCK
        if whole:
            words = np.frombuffer(data[:whole], "<u8").reshape(-1, BLOCK // 8)
            self._sums.update(words.sum(axis=1, dtype="<u8"))
        if whole < size:
            words = np.frombuffer(bytes(data[whole:]).ljust(BLOCK, b"\0"), "<u8")
            self._sums.update(words.sum(dtype="<u8").tobytes())

    def hexdigest(self) -> str:
        """The checksum as 32 hexadecimal digits."""
        self._sums.update(self._size.to_bytes(8, "little"))
        return self._sums.hexdigest()


def digest_of(attributes: dict[str, object]) -> str:
    """The checksum of names and values (str, numbers, bool, small arrays), whatever their order."""
    out = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for name in sorted(attributes):
        value = attributes[name]
        text = value if isinstance(value, str) else repr(value.item() if isinstance(value, np.generic) else value)
        for part in (name, type(value).__name__ if isinstance(value, str) else "number", text):
            data = part.encode("utf-8", "surrogateescape")
            out.update(len(data).to_bytes(8, "little"))
            out.update(data)
    return out.hexdigest()
