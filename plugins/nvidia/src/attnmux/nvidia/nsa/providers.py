"""The packages that FlashMLA comes in. They carry the same kernel and differ in what they call it
and in the base of its LSE, which `trial` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attnmux.nvidia.nsa.kernels import Kernels


def from_sgl_kernel(library: Any) -> Kernels:  # noqa: ANN401  # a module
    """`sgl_kernel.flash_mla`, of sglang-kernel."""
    return Kernels(
        flash_mla_sparse_fwd=library.flash_mla_sparse_fwd, constants=MappingProxyType({})
    )


def from_flash_mla(library: Any) -> Kernels:  # noqa: ANN401  # a module
    """`flash_mla`, of sgl-flash-mla: rows of 576 are read by its legacy half."""
    return Kernels(
        flash_mla_sparse_fwd=library.flash_mla_sparse_fwd,
        constants=MappingProxyType({"use_legacy": True}),
    )


PROVIDERS: Mapping[str, Callable[[Any], Kernels]] = MappingProxyType(
    {"flash_mla": from_flash_mla, "sgl_kernel.flash_mla": from_sgl_kernel}
)
"""By module, in the order in which they are tried."""
