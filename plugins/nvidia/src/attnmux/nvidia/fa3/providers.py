"""The packages that have FlashAttention 3, in the order of trial.

`sgl_kernel` comes first: it has all features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from attnmux.core.plugin import KernelLibrary
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.nvidia.fa3.ops import from_flash_attn, from_vllm

K = TypeVar("K")

PROVIDERS: Mapping[str, Callable[[], FA3Kernels]] = {
    "sgl_kernel": partial(
        KernelLibrary.imported, FA3Kernels, "sgl_kernel", "sgl_kernel.flash_attn"
    ),
    "flash_attn_3": from_flash_attn,
    "vllm.vllm_flash_attn": from_vllm,
}


def providers_of(make: Callable[[FA3Kernels], K]) -> dict[str, Callable[[], K]]:
    """The same packages, for a backend that calls some of the functions."""

    def provider(provide: Callable[[], FA3Kernels]) -> Callable[[], K]:
        return lambda: make(provide())

    return {name: provider(provide) for name, provide in PROVIDERS.items()}
