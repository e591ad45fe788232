"""The kernels' library for a CPU: that of the wheel, or `attend.cpp` compiled here and kept.

Importing this module imports no torch: a compiler may begin while torch is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from attnmux.core import BackendFailed, Settings
from attnmux.core.plugin import Files, elapsed_shown
from attnmux.cpu.levels import COMPILERS, FOLDER, SECONDS, SOURCE, Level, find_compiler, serving

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from attnmux.core import Platform

LOG = logging.getLogger(__name__)
ADDRESS = "cpu/native"
HINT = "install g++ 12 or later, or clang++, or take torch_native"
UNLOCKABLE = (OSError, NotImplementedError)
"""Errors of filelock if another process has the lock, for a folder that cannot be written, and
for a file system without locks."""


def begin(platform: Platform) -> None:
    """Begin to compile the kernels for a CPU if they are not there, and return at once.

    `library_for` waits for them, in every process, and reports errors. The compiler ends with this
    process. Without a cache folder nothing begins.
    """
    level = serving(platform.arch, platform.features)
    path = _place(level)
    if path is None or path.is_file() or (FOLDER / level.file_name).is_file():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        lock.acquire(timeout=0)
    except UNLOCKABLE:
        return
    Thread(target=_fill, args=(level, path, lock), daemon=True).start()


def is_made(platform: Platform) -> bool:
    """Whether the kernels came with the wheel or were compiled before. Waits for a compiler that
    runs."""
    level = serving(platform.arch, platform.features)
    library = _installed_library(level) or _kept_library(level)
    path = _place(level)
    if library is None and path is not None and _lock_file(path).exists():
        with _alone(path) as waited:
            library = _kept_library(level) if waited else None
    return library is not None


@lru_cache(maxsize=4)
def library_for(platform: Platform) -> ctypes.CDLL:
    """All kernels for a CPU. Raises BackendFailed as `load` does."""
    level = serving(platform.arch, platform.features)
    return _installed_library(level) or _kept_library(level) or _compiled_library(level)


def _installed_library(level: Level) -> ctypes.CDLL | None:
    """The library that came with the wheel. Warns, and returns None, if it cannot be loaded."""
    path = FOLDER / level.file_name
    if not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        LOG.warning("the kernels of the wheel are not used: %s", error)
        return None


def _kept_library(level: Level) -> ctypes.CDLL | None:
    """The library that was compiled here before. Warns, and returns None, if it was changed or if
    another user could have written it."""
    path = _place(level)
    if path is None:
        return None
    try:
        with Files.opened(str(path), own=True) as descriptor:
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read()
            if Files.read(str(_seal(path)), len(_sealed(content)), own=True) != _sealed(content):
                raise OSError("it has other bytes than those that were compiled")
            # By its name another file could be loaded than the one that was read. The descriptor
            # stays open: loaders know libraries by name, and the next one must not get this one's
            of_process = f"/proc/self/fd/{os.dup(descriptor)}"
            return ctypes.CDLL(of_process if os.path.exists(of_process) else str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        LOG.warning("%s cannot be loaded and is compiled again: %s", path, error)
        return None


def _compiled_library(level: Level) -> ctypes.CDLL:
    compiler, path = find_compiler(), _place(level)
    if compiler is None:
        raise BackendFailed(ADDRESS, f"none of {', '.join(COMPILERS)} is on PATH", hint=HINT)
    is_new = path is not None and not path.is_file()
    often = "once" if path is not None else "at each start, as no folder is there to keep them"
    what = f"compiling the kernels of native for {level.name}, {often}: up to a minute"
    LOG.warning("%s; --backend torch_native needs no compiler", what)
    try:
        shown = elapsed_shown(f"compiling the kernels of native for {level.name}")
        with shown, _alone(path) as waited:
            # A file that was there is the one that could not be loaded
            library = _kept_library(level) if waited or is_new else None
            return library or _compiled_here(level, path)
    except OSError as error:
        raise BackendFailed(ADDRESS, str(error), hint=HINT) from error


def _compiled_here(level: Level, path: Path | None) -> ctypes.CDLL:
    with _compiled_file(level) as file:
        if path is not None:
            with suppress(OSError):
                _keep(file.read_bytes(), path)
        return _kept_library(level) or ctypes.CDLL(str(file))


@contextmanager
def _compiled_file(level: Level) -> Iterator[Path]:
    """The library, newly compiled. A loaded one outlives its file."""
    compiler = find_compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory(prefix="attnmux-", ignore_cleanup_errors=True) as scratch:
        file = Path(scratch) / level.file_name
        _run(level.command(compiler, file))
        yield file


def _fill(level: Level, path: Path, lock: BaseFileLock) -> None:
    """Compile and keep the library, then release the lock. Whoever needs the library meets the
    same error again, and reports it."""
    try:
        with suppress(OSError, BackendFailed), _compiled_file(level) as file:
            _keep(file.read_bytes(), path)
    finally:
        lock.release()


@contextmanager
def _alone(path: Path | None) -> Iterator[bool]:
    """Let one process at a time compile the library; whether another one did meanwhile.

    Without a folder that can be locked, all compile.
    """
    if path is None:
        yield False
        return
    waited, lock = False, _lock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            waited = True
            lock.acquire(timeout=SECONDS)
    except UNLOCKABLE:
        pass
    try:
        yield waited
    finally:
        lock.release()


def _lock(path: Path) -> BaseFileLock:
    """The lock of a kept library. The system releases it if its process dies."""
    from filelock import FileLock  # noqa: PLC0415  # torch brings it, and no card needs it

    return FileLock(_lock_file(path), mode=0o600, thread_local=False)


def _lock_file(path: Path) -> Path:
    return path.with_suffix(".lock")


def _place(level: Level) -> Path | None:
    """Where the cache folder has the library for this source, compiler and level, or gets it; None
    without a folder or a compiler."""
    folder, compiler = Settings.load().cache_folder(), find_compiler()
    if folder is None or compiler is None:
        return None
    sources = [file.read_text() for file in (SOURCE, *sorted(FOLDER.glob("*.h")))]
    parts = json.dumps([*sources, level.command(compiler, Path(level.file_name))])
    digest = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return folder / f"native-{level.name}-{digest}.so"


def _seal(path: Path) -> Path:
    """The file that tells the length and the hash of a kept library."""
    return path.with_suffix(".sha256")


def _sealed(content: bytes) -> bytes:
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n".encode()


def _keep(content: bytes, path: Path) -> None:
    """Raises OSError where the cache folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for place, written in ((_seal(path), _sealed(content)), (path, content)):
        with Files.replacing(place, mode=0o700) as file:
            file.buffer.write(written)


def _run(command: list[str]) -> None:
    """Run the compiler. It ends, with all that it started, when this process stops waiting or
    ends."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        compiler = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        # A thread that waits does not see how the process ends
        end = partial(_end, compiler)
        atexit.register(end)
        try:
            code = compiler.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            reason = f"{command[0]} took more than {SECONDS:g} s"
            raise BackendFailed(ADDRESS, reason, hint=HINT) from error
        finally:
            atexit.unregister(end)
            if compiler.returncode is None:
                _end(compiler)
        if code:
            said.seek(0)
            lines = [line for line in said.read().splitlines() if "error" in line]
            reason = lines[0] if lines else f"it ended with {code}"
            raise BackendFailed(ADDRESS, f"{command[0]}: {reason}", hint=HINT)


def _end(compiler: subprocess.Popen[bytes]) -> None:
    """End a compiler that runs, and what it started. It removes its files if it is asked to end."""
    if not hasattr(os, "killpg"):
        compiler.kill()
        return
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(compiler.pid, how)
        with suppress(subprocess.TimeoutExpired):
            compiler.wait(5)
            return
