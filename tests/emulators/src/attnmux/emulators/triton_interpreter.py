"""Kernels through Triton's interpreter, on the CPU, as torch operations that a graph can repeat."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch.library import Library
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from triton.runtime import interpreter

from attnmux.emulators.triton_recorded import recorded

FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
COMPARISONS = frozenset(
    {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
)

launches: list[Callable[[Sequence[torch.Tensor]], None]] = []


def _launch(tensors: Sequence[torch.Tensor], number: int) -> None:
    launches[number](tensors)


library = Library("attnmux_interpreted", "DEF")  # type: ignore[no-untyped-call]  # torch's
library.define("launch(Tensor(a!)[] tensors, int number) -> ()")  # type: ignore[no-untyped-call]  # as above
library.impl("launch", _launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above


patch_core = interpreter._patch_lang_core


def _named(lang: Any, scope: Any) -> None:  # noqa: ANN401  # the interpreter's
    """Let the interpreter find e4m3fnuz by its name, whose type it has."""
    patch_core(lang, scope)
    known = lang.dtype.to_ir

    def to_ir(dtype: tl.dtype, builder: Any) -> Any:  # noqa: ANN401  # as above
        return builder.get_fp8e4b8_ty() if dtype.is_fp8e4b8() else known(dtype, builder)

    scope.set_attr(lang.dtype, "to_ir", to_ir)


def _inlined(function: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # the kernel's
    return function.rewrite()(*args, **options)


def _widened(value: Any) -> Any:  # noqa: ANN401  # the interpreter's
    if value.dtype.scalar != tl.bfloat16:
        return value
    bits = value.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _converted(values: Any, source: tl.dtype, target: tl.dtype, _rounding: Any) -> Any:  # noqa: ANN401  # as above
    # To the nearest, ties to even. What is too large for e4m3 is NaN: a kernel saturates.
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{values.itemsize}"))
    floats = bits.view(FLOATS[source]).to(FLOATS[target])
    words = floats.view(WORDS[floats.itemsize]).numpy()
    return words.view(f"u{floats.itemsize}")


@contextmanager
def interpreted() -> Iterator[None]:
    """A launch is an operation, so that `RecordingGraphs` notes it; and floats are as on a device.

    The interpreter keeps bfloat16 as integers and multiplies those; that of Triton 3.9 compares
    them too. It cuts off what bfloat16 cannot hold, and of 8-bit floats it rounds ties up and loses
    the carry into an odd exponent. A comparison has the type of what was compared, and repeated
    that of a number, which Triton 3.9 takes for no mask.
    """
    call, made = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder
    dot, splat, operate = made.create_dot, made.create_splat, made.binary_op

    def launched(grid: Any, *args: Any, **options: Any) -> None:  # noqa: ANN401  # the kernel's
        given = [*args, *options.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]

        def again(tensors: Sequence[torch.Tensor]) -> None:
            rest = iter(tensors)
            values = [next(rest) if isinstance(each, torch.Tensor) else each for each in given]
            named = dict(zip(options, values[len(args) :], strict=True))
            with _disable_current_modes(), warnings.catch_warnings():
                # That a number is an array of one, as the interpreter has it, goes with numpy 2.4.
                warnings.simplefilter("ignore", DeprecationWarning)
                warnings.simplefilter("ignore", RuntimeWarning)  # of NaN, which some cases hold
                call(grid, *values[: len(args)], **named)

        launches.append(again)
        torch.ops.attnmux_interpreted.launch(tensors, len(launches) - 1)
        if not _get_current_dispatch_mode_stack():
            launches.pop()  # nothing recorded it, and it keeps its tensors

    def multiplied(builder: Any, a: Any, b: Any, *rest: Any) -> Any:  # noqa: ANN401  # as above
        return dot(builder, _widened(a), _widened(b), *rest)

    def repeated(builder: Any, shape: Any, value: Any) -> Any:  # noqa: ANN401  # as above
        tile = splat(builder, shape, value)
        if value.data.dtype == np.bool_:
            tile.data = tile.data.astype(np.bool_)
        return tile

    def operated(builder: Any, a: Any, b: Any, op: Any) -> Any:  # noqa: ANN401  # as above
        if op in COMPARISONS:
            a, b = _widened(a), _widened(b)
        return operate(builder, a, b, op)

    builder = interpreter.interpreter_builder
    # Half of all additions are of indices, and each would be checked in 64 bits.
    unchecked = replace(builder.options, sanitize_overflow=False)
    with (
        patch.object(interpreter.GridExecutor, "__call__", launched),
        patch.object(interpreter, "_convert_float", _converted),
        patch.object(interpreter, "_patch_lang_core", _named),
        patch.object(made, "create_dot", multiplied),
        patch.object(made, "create_splat", repeated),
        patch.object(made, "binary_op", operated),
        patch.object(interpreter.InterpretedFunction, "__call__", _inlined),
        patch.object(builder, "options", unchecked),
        # numpy says what infinities come to; the kernels mean them.
        np.errstate(all="ignore"),
        recorded(),
    ):
        yield
    launches.clear()
