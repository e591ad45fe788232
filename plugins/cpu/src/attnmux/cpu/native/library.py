"""Loads the kernels for this CPU: those of the wheel, or `attend.cpp` compiled here and kept."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import BackendFailed, Settings, replacing
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
"""As `Type` in values.h."""
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


Attend = Callable[[Call], None]
Multiply = Callable[[Linear], None]


def load(platform: Platform) -> Attend:
    """The attention kernels' function, which runs on torch's threads.

    platform: the CPU that they are for. Raises BackendFailed where they did not come with the wheel
    and there is no compiler, or where what it made cannot be loaded.
    """
    return bound(library_for(platform))


def load_linear(platform: Platform) -> Multiply:
    """The function of linear layers. Raises as `load` does."""
    multiply: Multiply = _bound(library_for(platform), "linear", Linear)
    return multiply


@lru_cache(maxsize=4)
def library_for(platform: Platform) -> ctypes.CDLL:
    """All kernels for a CPU. Raises BackendFailed as `load` does."""
    level = serving(platform.arch, platform.features)
    return _installed_library(level) or _compiled_library(level)


def _installed_library(level: Level) -> ctypes.CDLL | None:
    """What came with the wheel."""
    return _loaded(FOLDER / level.file_name, "the kernels of the wheel are not used")


def _loaded(path: Path, otherwise: str) -> ctypes.CDLL | None:
    """The library in a file. Warns, and returns None, where it cannot be loaded."""
    if not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        LOG.warning("%s: %s", otherwise, error)
        return None


def bound(library: ctypes.CDLL) -> Attend:
    """The attention function of a library of any level. Raises BackendFailed where torch lacks its
    part."""
    attend: Attend = _bound(library, "attend", Call)
    return attend


def _bound(library: ctypes.CDLL, name: str, struct: type[ctypes.Structure]) -> Any:  # noqa: ANN401  # a function of the struct
    try:
        torch_library = ctypes.CDLL(str(_torch_library()))
        parallel_for = ctypes.cast(torch_library.torch_parallel_for, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise BackendFailed(ADDRESS, str(error), hint=HINT) from error
    function: Any = getattr(library, name)
    function.argtypes = (ctypes.POINTER(struct), ctypes.c_void_p)
    function.restype = ctypes.c_int

    def run(call: ctypes.Structure) -> None:
        if function(ctypes.byref(call), parallel_for):
            raise torch.OutOfMemoryError("the partial results of a step do not fit into memory")

    return run


def _torch_library() -> Path:
    ending = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ending}"


def _is_own(path: Path) -> bool:
    """Whether only this user and root can write the file, whose code will run."""
    status = os.stat(path)
    if not hasattr(os, "geteuid"):  # access lists decide there
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _compiled_library(level: Level) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise BackendFailed(ADDRESS, f"none of {', '.join(COMPILERS)} is on PATH", hint=HINT)
    try:
        path = _place(level, compiler)
        if path is not None and path.is_file() and _is_own(path):
            kept = _loaded(path, f"{path} cannot be loaded and is compiled again")
            if kept is not None:
                return kept
        often = "once" if path is not None else "at each start, as no folder is there to keep them"
        LOG.warning("compiling the kernels of native for %s, %s: about 15 s", level.name, often)
        # A loaded library outlives its file.
        with tempfile.TemporaryDirectory(prefix="attnmux-", ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / level.file_name
            _run(level.command(compiler, made))
            return ctypes.CDLL(str(made if path is None else _kept(made, path)))
    except OSError as error:
        raise BackendFailed(ADDRESS, str(error), hint=HINT) from error


def _place(level: Level, compiler: str) -> Path | None:
    """Where the cache folder has the library for this source, compiler and level, or gets it; None
    without a folder."""
    folder = Settings.load().cache_folder()
    if folder is None:
        return None
    sources = [file.read_text() for file in (SOURCE, *sorted(FOLDER.glob("*.h")))]
    parts = json.dumps([*sources, level.command(compiler, Path(level.file_name))])
    digest = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return folder / f"native-{level.name}-{digest}.so"


def _kept(made: Path, path: Path) -> Path:
    """Where the library is in the cache folder; `made` itself where that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o700) as file:
            file.buffer.write(made.read_bytes())
    except OSError:
        return made
    return path


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        reason = f"{command[0]} took more than {SECONDS:g} s"
        raise BackendFailed(ADDRESS, reason, hint=HINT) from error
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [str(error)]
        raise BackendFailed(ADDRESS, f"{command[0]}: {lines[0]}", hint=HINT) from error
