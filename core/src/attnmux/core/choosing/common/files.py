"""Reading a file of which anything may be wrong."""

from __future__ import annotations

import os
import stat


def read_file(path: str, most: int) -> bytes:
    """The bytes of a regular file. Never waits. Raises OSError for anything else, and for a file of
    more than `most` bytes."""
    # A pipe without a writer would hold up a plain open
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most} bytes")
    return content
