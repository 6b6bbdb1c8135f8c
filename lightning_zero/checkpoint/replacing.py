"""A checkpoint takes its name when it is complete; until then what had the name before keeps it.

    write a part   ->   flush it to the disk   ->   it gets the name, at once   ->   what had the name goes

A run that is killed leaves a hidden part behind, which the next one that writes the same checkpoint overwrites.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
import warnings
from pathlib import Path

__all__ = ["discard", "flush", "part_name", "part_of", "require_place", "take_place"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def part_name(name: str) -> str:
    """What the checkpoint ``name`` is called until it is complete."""
    # Without its name: who looks for checkpoints by a part of their names must not find this.
    return f".{hashlib.sha1(os.fsencode(name)).hexdigest()[:12]}.part"


def part_of(path: Path) -> Path:
    """Where the checkpoint ``path`` is written until it is complete."""
    return path.with_name(part_name(path.name))


def require_place(path: Path) -> None:
    """See that nothing but a checkpoint would make room for ``path``.

    Raises:
        IsADirectoryError: it is a folder with something else in it.
    """
    if path.is_dir() and not path.is_symlink() and not (path / ".metadata").is_file() and any(path.iterdir()):
        raise IsADirectoryError(f"it is a folder, and no checkpoint. Name a file in it, as `{path / 'last.ckpt'}`")


def discard(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems flush no directories.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def take_place(part: Path, path: Path) -> None:
    """Give ``part`` the name ``path`` in one step; what had it is removed after that."""
    if not os.path.lexists(path) or not (part.is_dir() or path.is_dir()):
        os.replace(part, path)
        flush(path.parent)
        return
    _exchange(part, path)
    flush(path.parent)
    try:
        discard(part)
    except OSError as error:
        warnings.warn(f"What `{path}` replaced could not be removed from `{part}`: {error}", stacklevel=2)


def _exchange(part: Path, path: Path) -> None:
    """Swap two names. A directory cannot replace another one that is not empty."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if rename is not None:
            names = (os.fsencode(part), os.fsencode(path))
            if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
                return
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(code, os.strerror(code), str(path))
    # Some file systems cannot: for a moment the old checkpoint is at `.old` alone.
    old = path.with_name(f"{path.name}.old")
    discard(old)
    os.rename(path, old)
    os.rename(part, path)
    os.rename(old, part)
