"""Kernels through Triton's interpreter, on the CPU, as torch operations that a graph can repeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402  # where there is a Triton
from triton.runtime import interpreter  # noqa: E402  # as above

FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
}
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Script = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Any) -> Script:
    """Runs the test's own file as a script with the compiler, and returns the JSON lines that it
    prints: the interpreter and the compiler cannot share a process."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(request.path), *arguments],
            env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


patched: set[str] = set()
launches: list[Callable[[Sequence[torch.Tensor]], None]] = []


def _launch(tensors: Sequence[torch.Tensor], number: int) -> None:
    launches[number](tensors)


library = Library("attnmux_interpreted", "DEF")
library.define("launch(Tensor(a!)[] tensors, int number) -> ()")
library.impl("launch", _launch, "CompositeExplicitAutograd")


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> Iterator[None]:
    """A launch is an operation, so that `RecordingGraphs` notes it; and floats are as on a device.

    The interpreter keeps bfloat16 as integers and multiplies those. It cuts off what bfloat16
    cannot hold, and of 8-bit floats it rounds ties up and loses the carry into an odd exponent.
    """
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=0")
    call, dot = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.create_dot

    def launched(grid: Any, *args: Any, **options: Any) -> None:
        given = [torch.Tensor if isinstance(arg, torch.Tensor) else arg for arg in args]

        def again(tensors: Sequence[torch.Tensor]) -> None:
            rest = iter(tensors)
            patched.clear()
            with _disable_current_modes(), warnings.catch_warnings():
                # That a number is an array of one, as the interpreter has it, goes with numpy 2.4.
                warnings.simplefilter("ignore", DeprecationWarning)
                call(
                    grid, *(next(rest) if arg is torch.Tensor else arg for arg in given), **options
                )

        launches.append(again)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        torch.ops.attnmux_interpreted.launch(tensors, len(launches) - 1)

    def inlined(function: Any, *args: Any, **options: Any) -> Any:
        # Once a launch for each module of functions, not at every call.
        module = function.fn.__module__
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **options)

    def widened(value: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return value
        bits = value.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def multiplied(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, widened(a), widened(b), *rest)

    def converted(values: Any, source: tl.dtype, target: tl.dtype, _rounding: Any) -> Any:
        # To the nearest, ties to even. What is too large for e4m3 is NaN: a kernel saturates.
        bits = torch.from_numpy(np.ascontiguousarray(values).view(f"i{values.itemsize}"))
        floats = bits.view(FLOATS[source]).to(FLOATS[target])
        words = floats.view(WORDS[floats.itemsize]).numpy()
        return words.view(f"u{floats.itemsize}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(interpreter, "_convert_float", converted)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
        patch.setattr(interpreter.InterpretedFunction, "__call__", inlined)
        # Half of all additions are of indices, and each would be checked in 64 bits.
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        # numpy says what infinities come to; the kernels mean them.
        with np.errstate(all="ignore"):
            yield
    launches.clear()
