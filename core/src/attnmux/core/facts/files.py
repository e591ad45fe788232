"""Reading untrusted files, and replacing a file as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from attnmux.core.facts.errors import InvalidInput


def read_all(descriptor: int, most: int) -> bytes:
    """The bytes of an open file. Raises OSError for more than `most`."""
    size = os.fstat(descriptor).st_size
    # Unbuffered, and without a count: `read(most)` would first allocate as much
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        content = b"" if size > most else file.readall()
    if max(size, len(content)) > most:
        raise OSError(f"it has more than {most} bytes")
    return content


def check_own(status: os.stat_result) -> None:
    """Raise OSError for a file, folder or link that another user owns, or that a group or every
    user can write. In a sticky folder, nobody can replace the files of others."""
    if not hasattr(os, "geteuid"):  # access lists decide there
        return
    if status.st_uid not in (0, os.geteuid()):
        raise OSError("belongs to another user")
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared and not is_sticky and not stat.S_ISLNK(status.st_mode):
        raise OSError("can be written by a group or by every user")


class Files:
    """Untrusted files, read in bounds and replaced as a whole."""

    @staticmethod
    def read(path: str, most: int, *, writable: bool = False, own: bool = False) -> bytes:
        """The bytes of a file, as `read_all` reads what `opened` opens."""
        with Files.opened(path, writable=writable, own=own) as descriptor:
            return read_all(descriptor, most)

    @staticmethod
    @contextmanager
    def opened(
        path: str, *, writable: bool = False, own: bool = False, folder: int | None = None
    ) -> Iterator[int]:
        """The descriptor of a regular file. Never waits.

        writable: the file must be writable. own: as `check_own` demands. folder: the descriptor of
        the folder that `path` is relative to. Raises OSError for a file that is not as demanded and
        for anything else than a regular file.
        """
        # A pipe without a writer would hold up a plain open
        how = (os.O_RDWR if writable else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, how, dir_fd=folder)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is no regular file")
            if own:
                check_own(status)
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def check_replaceable(argument: str, path: Path) -> None:
        """Raise InvalidInput, before any work, for a path whose folder does not exist, and for
        anything else than a regular file: a device or a pipe must not be replaced."""
        if not path.parent.is_dir():
            raise InvalidInput(argument, got=str(path), expected="a file in a folder that exists")
        if path.exists() and not path.is_file():
            raise InvalidInput(argument, got=str(path), expected="a regular file, or a new one")

    @staticmethod
    @contextmanager
    def replacing(path: Path, *, mode: int = 0o666) -> Iterator[TextIO]:
        """A file to write, which takes the place of `path` when the block ends without an error.

        No reader sees half of it. The scratch file is new and cannot be guessed, so that a link in
        a shared folder is not followed. mode: its permissions, less the process's mask. Raises
        OSError.
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
