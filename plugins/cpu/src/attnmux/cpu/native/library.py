"""Loads the kernels for this CPU: those of the wheel, or `attend.cpp` compiled here and kept."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import BackendFailed, Settings
from attnmux.core.plugin import Files, elapsed_shown
from attnmux.cpu.levels import COMPILERS, FOLDER, SECONDS, SOURCE, Level, find_compiler, serving

if TYPE_CHECKING:
    from attnmux.core import Platform

LOG = logging.getLogger(__name__)
ADDRESS = "cpu/native"
TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Numbers of the dtypes, as `Type` in values.h has them."""
HINT = "install g++ 12 or later, or clang++, or take torch_native"


class Keys(ctypes.Structure):
    """The struct `Keys` of step.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "span_indptr", "span_start", "slots")),
        *((name, ctypes.c_void_p) for name in ("first", "end", "hidden_from", "hidden_to")),
        *((name, ctypes.c_void_p) for name in ("mask", "mask_row", "mask_start")),
        ("num_requests", ctypes.c_int64),
    )


class Call(ctypes.Structure):
    """The struct `Call` of step.h."""

    _fields_ = (
        ("keys", Keys),
        *((name, ctypes.c_void_p) for name in ("q", "q_rope", "k", "v", "out", "lse", "sinks")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "rope_token", "rope_head")),
        *((name, ctypes.c_int64) for name in ("k_slot", "k_head", "v_slot", "v_head")),
        *((name, ctypes.c_int64) for name in ("out_token", "out_head", "lse_token", "lse_head")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("D", "rope", "Dv", "q_type", "kv_type")),
        *((name, ctypes.c_float) for name in ("scaling", "cap", "v_scale")),
        *((name, ctypes.c_int32) for name in ("split", "num_threads")),
    )


class Linear(ctypes.Structure):
    """The struct `Linear` of linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_row", "weight_row", "out_row")),
        *((name, ctypes.c_int64) for name in ("num_rows", "width", "num_out")),
        *((name, ctypes.c_int32) for name in ("type", "num_threads")),
    )


class Copied(ctypes.Structure):
    """The struct `Copied` of rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("from_rows", "to_rows")),
        *((name, ctypes.c_int64) for name in ("from_token", "from_head", "to_slot", "to_head")),
        *((name, ctypes.c_int64) for name in ("num_heads", "head_bytes")),
    )


class Written(ctypes.Structure):
    """The struct `Written` of rows.h."""

    _fields_ = (
        ("loc", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_slots")),
        ("num_threads", ctypes.c_int32),
        *((name, Copied) for name in ("first", "second")),
    )


class Layout(ctypes.Structure):
    """The struct `Layout` of rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("new_lens", "cached", "encoder", "rows", "table")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "page")),
        *((name, ctypes.c_int64) for name in ("num_requests", "num_tokens", "room")),
        *((name, ctypes.c_int64) for name in ("window", "chunk")),
        ("is_causal", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("qo_indptr", "span_indptr", "span_start", "slots")),
        *((name, ctypes.c_void_p) for name in ("first", "end")),
    )


Attend = Callable[[Call], None]
Write = Callable[[Written], int]
"""Returns 0, or 1 for a slot that is none."""
LayOut = Callable[[Layout], int]
"""Returns the number of slots, or -1."""
Multiply = Callable[[Linear], None]


def load(platform: Platform) -> Attend:
    """The attention kernels' function, which runs on torch's threads.

    platform: the CPU that they are for. Raises BackendFailed where they did not come with the wheel
    and there is no compiler, or where what it made cannot be loaded.
    """
    return bound(library_for(platform))


def load_linear(platform: Platform) -> Multiply:
    """The function of linear layers. Raises as `load` does."""
    return _checked(_bound(library_for(platform), "linear", Linear))


def load_write(platform: Platform) -> Write:
    """The function that writes rows of K and V. Raises as `load` does."""
    write: Write = _bound(library_for(platform), "write_rows", Written)
    return write


def load_lay_out(platform: Platform) -> LayOut:
    """The function that lays a step's keys out. Raises as `load` does."""
    function: Any = library_for(platform).lay_out
    function.argtypes = (ctypes.POINTER(Layout),)
    function.restype = ctypes.c_int64
    return lambda layout: int(function(ctypes.byref(layout)))


def is_made(platform: Platform) -> bool:
    """Whether the kernels came with the wheel or were compiled before."""
    level = serving(platform.arch, platform.features)
    return (_installed_library(level) or _kept_library(level)) is not None


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


def bound(library: ctypes.CDLL) -> Attend:
    """The attention function of a library of any level. Raises BackendFailed where torch lacks its
    part."""
    return _checked(_bound(library, "attend", Call))


def _bound(library: ctypes.CDLL, name: str, struct: type[ctypes.Structure]) -> Callable[[Any], int]:
    """A function of the struct, on torch's threads."""
    try:
        torch_library = ctypes.CDLL(str(_torch_library()))
        parallel_for = ctypes.cast(torch_library.torch_parallel_for, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise BackendFailed(ADDRESS, str(error), hint=HINT) from error
    function: Any = getattr(library, name)
    function.argtypes = (ctypes.POINTER(struct), ctypes.c_void_p)
    function.restype = ctypes.c_int

    return lambda call: int(function(ctypes.byref(call), parallel_for))


def _checked(run: Callable[[Any], int]) -> Callable[[Any], None]:
    """Raises OutOfMemoryError if the function returns anything but 0."""

    def checked(call: ctypes.Structure) -> None:
        if run(call):
            raise torch.OutOfMemoryError("the partial results of a step do not fit into memory")

    return checked


def _torch_library() -> Path:
    ending = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ending}"


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
    often = "once" if path is not None else "at each start, as no folder is there to keep them"
    LOG.warning("compiling the kernels of native for %s, %s: up to a minute", level.name, often)
    try:
        # A loaded library outlives its file.
        with tempfile.TemporaryDirectory(prefix="attnmux-", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / level.file_name
            with elapsed_shown(f"compiling the kernels of native for {level.name}"):
                _run(level.command(compiler, made))
            if path is not None:
                with suppress(OSError):
                    _keep(made.read_bytes(), path)
            return _kept_library(level) or ctypes.CDLL(str(made))
    except OSError as error:
        raise BackendFailed(ADDRESS, str(error), hint=HINT) from error


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
    """Run the compiler. It ends, with all that it started, when this process stops waiting."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        compiler = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            code = compiler.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            reason = f"{command[0]} took more than {SECONDS:g} s"
            raise BackendFailed(ADDRESS, reason, hint=HINT) from error
        finally:
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
