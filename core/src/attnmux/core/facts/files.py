"""Reading a file of which anything may be wrong, and replacing one as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def read_file(path: str, most: int, *, writable: bool = False) -> bytes:
    """The bytes of a regular file. Never waits. Raises OSError for anything else, for a file of
    more than `most` bytes and, where it has to be `writable`, for one that is not."""
    # A pipe without a writer would hold up a plain open
    how = os.O_RDWR if writable else os.O_RDONLY
    descriptor = os.open(path, how | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        # Unbuffered, and without a count: `read(most)` would first allocate as much
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            content = b"" if status.st_size > most else file.readall()
    finally:
        os.close(descriptor)
    if max(status.st_size, len(content)) > most:
        raise OSError(f"it has more than {most} bytes")
    return content


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
