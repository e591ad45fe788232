"""The operators of sgl-kernel-xpu that the adapters call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class XPUKernels:
    """Operators of the namespace `sgl_kernel`, as the build for Intel's GPUs registers them."""

    fwd: Callable[..., tuple[torch.Tensor, ...]]
    """Attention of packed queries to pages; the result comes first. With one query a request it
    runs the kernels for decode, else those for prefill, each on its requests. It takes a soft cap
    and returns an LSE, and computes neither."""
    flash_mla_decode: Callable[..., None]
    """Attention of one query a request to pages of latents. It writes to a tensor of the caller."""
    flash_mla_prefill: Callable[..., None]
    """Causal attention of packed queries to pages of latents. It may write up to 256 rows after the
    last query's."""
    flash_mla_get_workspace_size: Callable[[int, int, int, int, int], int]
    """Bytes of scratch memory of `flash_mla_decode`."""


def load_kernels() -> XPUKernels:
    """Import sgl-kernel, whose build for Intel's GPUs registers the operators.

    Raises ImportError if it is missing or is a build for another device, OSError if a library
    of oneAPI is missing, and AttributeError if the build lacks an operator.
    """
    import_module("sgl_kernel")
    ops = torch.ops.sgl_kernel
    return XPUKernels(
        fwd=ops.fwd,
        flash_mla_decode=ops.flash_mla_decode,
        flash_mla_prefill=ops.flash_mla_prefill,
        flash_mla_get_workspace_size=ops.flash_mla_get_workspace_size,
    )
