"""AITER for the layers of a model: over pages for MHA and GQA, over slots for MLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnmux.amd.aiter_kernels import PROVIDERS, AiterKernels
from attnmux.amd.aiter_latents import AiterLatentBackend
from attnmux.amd.aiter_pages import AiterPagesBackend
from attnmux.core.plugin import KernelLibrary, rehearse

if TYPE_CHECKING:
    from attnmux.core import AttentionBackend, BackendContext


def _backend(
    context: BackendContext, options: Mapping[str, object], kernels: AiterKernels
) -> AttentionBackend:
    """Raises InvalidInput for layers and pools that the kernels do not serve."""
    if any(layer.kind == "mla" for layer in context.layers):
        return AiterLatentBackend(context, options, kernels)
    return AiterPagesBackend(context, options, kernels)


make = KernelLibrary(
    address="amd/aiter",
    backend=_backend,
    providers=PROVIDERS,
    trial=rehearse,
    hint="AITER needs ROCm's PyTorch and Triton; pip install 'attnmux-amd[aiter]'",
)
