"""Keeping the newest checkpoints of a run."""

import logging
import os
import re

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\d+")


def step_of(path: str | os.PathLike) -> int | None:
    """The step in a checkpoint's name: the last number of the name without its suffix; None where there is none."""
    numbers = _NUMBER.findall(os.path.splitext(os.path.basename(os.fspath(path)))[0])
    return int(numbers[-1]) if numbers else None


def _series_of(path: str) -> tuple[str, str, str]:
    """What the checkpoints of one series share: the directory, and the name around the step."""
    directory, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    last = list(_NUMBER.finditer(stem))[-1]
    return directory, stem[: last.start()], stem[last.end() :] + suffix


class CheckpointRotation:
    """Keeps the newest `limit` checkpoints of each series that this run wrote or adopted, and deletes no other file.

    1. A series is a directory and a name around a step: `run/checkpoint_*.mdl`. A name without a number is in none and
       is never deleted.
    2. Newest is by the number, not by time. The file just written stays whatever its number.
    3. A file that is not the one written or adopted any more (another inode) is left alone.
    4. A checkpoint that was loaded is adopted when the run writes a later step of its series: that is a resume.

    Args:
        limit: how many to keep; None keeps all.
    """

    def __init__(self, limit: int | None = None):
        self._files: dict[str, tuple[int, int]] = {}
        self._loaded: dict[str, tuple[int, int]] = {}
        self.limit = limit

    @property
    def limit(self) -> int | None:
        """How many checkpoints of a series are kept; None for all."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise TypeError(f"max_checkpoints must be a positive int or None, not {limit!r}")
        if limit is not None and limit <= 0:
            raise ValueError(f"max_checkpoints must be positive, not {limit}. Use None to keep all checkpoints.")
        self._limit = limit

    def adopt(self, path: str | os.PathLike) -> None:
        """Counts an existing file, such as the one a run resumes from, as one of this run's; deletes nothing.

        Raises:
            FileNotFoundError: there is no such file.
        """
        path = os.path.abspath(os.fspath(path))
        if step_of(path) is not None:
            stat = os.lstat(path)
            self._files[path] = (stat.st_dev, stat.st_ino)

    def loaded(self, path: str | os.PathLike, stat: os.stat_result) -> None:
        """Remembers a checkpoint that was loaded, in case the run goes on from it."""
        path = os.path.abspath(os.fspath(path))
        if step_of(path) is not None:
            self._loaded[path] = (stat.st_dev, stat.st_ino)

    def _adopt_resumed(self, path: str) -> None:
        series, step = _series_of(path), step_of(path)
        for other in [p for p in self._loaded if _series_of(p) == series and step_of(p) < step]:
            self._files.setdefault(other, self._loaded.pop(other))

    def wrote(self, path: str | os.PathLike) -> list[str]:
        """Counts a complete new checkpoint and deletes what is beyond the limit; returns the deleted paths."""
        path = os.path.abspath(os.fspath(path))
        if step_of(path) is None:
            return []
        self.adopt(path)
        self._adopt_resumed(path)
        if self._limit is None:
            return []
        series = sorted((p for p in self._files if _series_of(p) == _series_of(path)), key=step_of)
        series.remove(path)
        surplus = len(series) + 1 - self._limit
        return [old for old in series[: max(0, surplus)] if self._delete(old)]

    def _delete(self, path: str) -> bool:
        identity = self._files.pop(path)
        try:
            stat = os.lstat(path)
            if (stat.st_dev, stat.st_ino) != identity:
                return False
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._files[path] = identity
            logger.warning("The old checkpoint %s could not be deleted: %s", path, error)
            return False
        logger.info("Deleted the old checkpoint %s (max_checkpoints=%s)", path, self._limit)
        return True
