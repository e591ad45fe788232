"""Compiles a kernel for a GPU that need not be here, for the tests that run as scripts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

SHARED = {
    "sm75": 65536,
    "sm80": 166912,
    "sm86": 101376,
    "sm89": 101376,
    "sm90": 232448,
    "sm100": 232448,
    "sm103": 232448,
    "sm120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
    "gfx1100": 65536,
    "gfx1201": 65536,
}
"""Bytes of shared memory that a program may take: NVIDIA's CUDA programming guide, "Technical
specifications per compute capability"; AMD's local data share, by its manuals of instructions."""

SM90 = GPUTarget("cuda", 90, 32)
FRAME = re.compile(rb"\x04\x11\x08\x00.{4}(.{4})", re.DOTALL)
"""EIATTR_FRAME_SIZE in a cubin: a symbol, and the bytes of local memory that its code takes."""


def compile_kernel(
    kernel: Any,
    words: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    target: GPUTarget = SM90,
    options: Mapping[str, int],
    odd_strides: frozenset[str] = frozenset(),
) -> Any:
    """A `triton.compiler.CompiledKernel`.

    words: Triton's types by argument, "constexpr" for a tensor that is None; int32 for those left
    out. Addresses and all strides but odd_strides are multiples of 16.
    """
    signature, fixed, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, word = parameter.name, words.get(parameter.name, "i32")
        if parameter.is_constexpr or word == "constexpr":
            word, fixed[name] = "constexpr", constants.get(name)
        elif word.startswith("*") or (name.endswith("stride") and name not in odd_strides):
            attributes[place,] = [["tt.divisibility", 16]]
        signature[name] = word
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, signature, fixed, attributes), target=target, options=dict(options)
    )


def facts(compiled: Any) -> dict[str, int]:
    """Bytes of shared memory, and how often some instructions occur."""
    ptx = compiled.asm["ptx"]
    return {
        "shared": compiled.metadata.shared,
        "matrix": ptx.count("wgmma.mma_async"),
        "wide copies": ptx.count("cp.async.cg"),
        "narrow copies": ptx.count("cp.async.ca"),
        "local memory": local_memory(compiled),
    }


def local_memory(compiled: Any) -> int:
    """The instructions that load and store registers that spilled.

    Only code with a frame is disassembled, which takes longer than to compile it.
    """
    frames = FRAME.findall(compiled.asm["cubin"])
    if frames and not any(map(any, frames)):
        return 0
    sass = compiled.asm["sass"]
    return int(sass.count("LDL") + sass.count("STL"))
