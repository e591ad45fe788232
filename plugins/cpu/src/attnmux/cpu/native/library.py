"""The functions of the kernels' library, on torch's threads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import BackendFailed
from attnmux.cpu.compiled import ADDRESS, HINT, library_for

if TYPE_CHECKING:
    from attnmux.core import Platform

TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Numbers of the dtypes, as `Type` in values.h has them."""


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
    return _checked(*_bound(library_for(platform), "linear", Linear))


def load_write(platform: Platform) -> Write:
    """The function that writes rows of K and V. Raises as `load` does."""
    function, parallel_for = _bound(library_for(platform), "write_rows", Written)
    return lambda call: function(call, parallel_for)


def load_lay_out(platform: Platform) -> LayOut:
    """The function that lays a step's keys out. Raises as `load` does."""
    function: Any = library_for(platform).lay_out
    function.argtypes = (ctypes.POINTER(Layout),)
    function.restype = ctypes.c_int64
    return lambda layout: int(function(ctypes.byref(layout)))


def bound(library: ctypes.CDLL) -> Attend:
    """The attention function of a library of any level. Raises BackendFailed where torch lacks its
    part."""
    return _checked(*_bound(library, "attend", Call))


def _bound(
    library: ctypes.CDLL, name: str, struct: type[ctypes.Structure]
) -> tuple[Callable[..., int], ctypes.c_void_p]:
    """A function of the struct and of torch's threads, and these."""
    try:
        torch_library = ctypes.CDLL(str(_torch_library()))
        parallel_for = ctypes.cast(torch_library.torch_parallel_for, ctypes.c_void_p)
    except (OSError, AttributeError) as error:
        raise BackendFailed(ADDRESS, str(error), hint=HINT) from error
    function: Any = getattr(library, name)
    function.argtypes = (ctypes.POINTER(struct), ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function, parallel_for


def _checked(
    function: Callable[..., int], parallel_for: ctypes.c_void_p
) -> Callable[[ctypes.Structure], None]:
    """Raises OutOfMemoryError if the function returns anything but 0."""

    def checked(call: ctypes.Structure) -> None:
        if function(call, parallel_for):
            raise torch.OutOfMemoryError("the partial results of a step do not fit into memory")

    return checked


def _torch_library() -> Path:
    ending = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    return Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ending}"
