"""Reading a file of which anything may be wrong, and replacing one as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def read_file(
    path: str, most: int, *, writable: bool = False, own: bool = False, folder: int | None = None
) -> bytes:
    """The bytes of a regular file. Never waits.

    writable: the file must be writable. own: as `check_own` demands. folder: the descriptor of the
    folder that `path` is relative to. Raises OSError for a file that is not as demanded, for
    anything else than a regular file, and for a file of more than `most` bytes.
    """
    # A pipe without a writer would hold up a plain open
    how = os.O_RDWR if writable else os.O_RDONLY
    descriptor = os.open(path, how | getattr(os, "O_NONBLOCK", 0), dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if own:
            check_own(status)
        # Unbuffered, and without a count: `read(most)` would first allocate as much
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            content = b"" if status.st_size > most else file.readall()
    finally:
        os.close(descriptor)
    if max(status.st_size, len(content)) > most:
        raise OSError(f"it has more than {most} bytes")
    return content


def check_own(status: os.stat_result) -> None:
    """Raise OSError for a file or folder that another user owns, or that a group or every user can
    write. In a sticky folder, nobody can replace the files of others."""
    if not hasattr(os, "geteuid"):  # access lists decide there
        return
    if status.st_uid not in (0, os.geteuid()):
        raise OSError("it belongs to another user")
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise OSError("users besides its owner can write it")


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[TextIO]:
    """A file to write, which takes the place of `path` when the block ends without an error.

    No reader sees half of it. The scratch file is new and cannot be guessed, so that a link in a
    shared folder is not followed. mode: its permissions, less the process's mask. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(
            scratch, "x", encoding="utf-8", opener=lambda p, how: os.open(p, how, mode)
        ) as file:
            yield file
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
