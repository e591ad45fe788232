"""The Triton kernels of AITER that `aiter` calls, which are checked wherever Triton runs.

AITER's assembly runs on AMD's devices alone: `aiter_mla.py` calls it, a backend of its own, whose
proof is weaker. Its Composable Kernel functions are not called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnmux.core.plugin import KernelLibrary


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterKernels:
    """Functions of `aiter.ops.triton`. Each writes its result to a tensor of the caller."""

    unified_attention: Callable[..., Any]
    """Causal attention of packed queries to pages. It reads the unused slots of a request's last
    page, which must hold finite values: their weight is 0."""
    extend_attention_fwd: Callable[..., Any]
    """Attention of packed queries to cached rows by their slots, then to the new tokens' own K and
    V, under a mask if there is one."""
    decode_attention_fwd_grouped_rope: Callable[..., Any]
    """Attention of one query a request to latents by their slots; with `use_rope=False` it rotates
    nothing."""


FUNCTIONS = ("unified_attention", "extend_attention", "mla_decode_rope")
"""The modules that define them."""


def _provider(package: str) -> Callable[[], AiterKernels]:
    return partial(
        KernelLibrary.imported, AiterKernels, *(f"{package}.{name}" for name in FUNCTIONS)
    )


PROVIDERS = {
    "aiter": _provider("aiter.ops.triton.attention"),
    "aiter 0.1.7": _provider("aiter.ops.triton"),
}
"""Releases after 0.1.7 moved the modules."""
