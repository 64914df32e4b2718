"""The checksums of a checkpoint: fast enough to be always on.

Data: each 4096-byte block is summed as little-endian 64-bit words, and the sums are hashed with BLAKE2b. That runs at the
speed of memory, and notices every change within one word of a block and every block that is lost, zeroed or moved; it is
made for accidents, not against forgery. Metadata: BLAKE2b over every byte of the file that is not data.
"""

import hashlib
import os

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


class Seal:
    """The end of a file: which stretches are data, and the checksum of everything else, the metadata.

    A reader compares the metadata with it before HDF5 parses them: on damaged metadata HDF5 can loop for ever.
    Layout: pairs of offset and size (uint64, little-endian) for each stretch, their number, the size of the HDF5 file
    before the seal, 16 bytes of checksum, 8 bytes of `MAGIC`.
    """

    MAGIC = b"\x89CSTSEAL"
    _FIXED = 8 + 8 + _DIGEST_SIZE + len(MAGIC)
    _MARGIN = 64  # stretches closer than this are one; between them is only padding

    @classmethod
    def make(cls, fd: int, extents: list[tuple[int, int]]) -> bytes:
        """The seal for the finished HDF5 file `fd`."""
        size = os.fstat(fd).st_size
        merged: list[list[int]] = []
        for offset, nbytes in sorted(extents):
            if merged and offset - sum(merged[-1]) <= cls._MARGIN:
                merged[-1][1] = offset + nbytes - merged[-1][0]
            else:
                merged.append([offset, nbytes])
        head = np.array(merged, "<u8").tobytes() + np.array([len(merged), size], "<u8").tobytes()
        return head + cls._checksum(fd, head, merged, size) + cls.MAGIC

    @classmethod
    def check(cls, fd: int) -> bool | None:
        """Whether the metadata are as sealed; None where the file has no seal."""
        whole = os.fstat(fd).st_size
        if whole < cls._FIXED:
            return None
        fixed = os.pread(fd, cls._FIXED, whole - cls._FIXED)
        if fixed[-len(cls.MAGIC) :] != cls.MAGIC:
            return None
        count, size = (int(n) for n in np.frombuffer(fixed[:16], "<u8"))
        if size + 16 * count + cls._FIXED != whole:
            return False
        head = os.pread(fd, 16 * count, size)
        extents = np.frombuffer(head, "<u8").reshape(-1, 2).tolist()
        return cls._checksum(fd, head + fixed[:16], extents, size) == fixed[16 : 16 + _DIGEST_SIZE]

    @classmethod
    def _checksum(cls, fd: int, head: bytes, extents, size: int) -> bytes:
        out = hashlib.blake2b(head, digest_size=_DIGEST_SIZE)
        at = 0
        for offset, nbytes in [*extents, (size, 0)]:
            while at < min(offset, size):
                part = os.pread(fd, min(1 << 20, offset - at), at)
                if not part:
                    return b""
                out.update(part)
                at += len(part)
            at = max(at, offset + nbytes)
        return out.digest()
