"""Paths and links."""

import itertools
import os

StrPath = str | os.PathLike
"""What names a file: a str or a pathlib.Path."""

_counter = itertools.count()


def create_symlink(path: StrPath, target: StrPath, target_is_directory: bool = False) -> None:
    """Makes `path` a symbolic link to `target`, in place of a link that may be there, with no moment without one.

    Args:
        path: the link; its directory must exist.
        target: what it points to; a relative one is read from the link's directory, and need not exist.
        target_is_directory: for Windows, which tells links to directories apart.

    Raises:
        FileExistsError: `path` is a file or directory, which would be lost.
    """
    path = os.fspath(path)
    if os.path.lexists(path) and not os.path.islink(path):
        raise FileExistsError(
            f"{path} exists and is not a symbolic link, so it is not replaced by one to {target}. Move it away."
        )
    temporary = f"{path}.{os.getpid()}.{next(_counter)}.tmp"
    os.symlink(target, temporary, target_is_directory=target_is_directory)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
