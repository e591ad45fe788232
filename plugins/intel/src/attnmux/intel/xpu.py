"""sgl-kernel-xpu for the layers of a model: over pages for MHA and GQA, over latents for MLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnmux.core.plugin import KernelLibrary, rehearse
from attnmux.intel.xpu_latents import XPULatentBackend
from attnmux.intel.xpu_library import XPUKernels, load_kernels
from attnmux.intel.xpu_pages import XPUPagesBackend

if TYPE_CHECKING:
    from attnmux.core import AttentionBackend, BackendContext


def _backend(
    context: BackendContext, options: Mapping[str, object], kernels: XPUKernels
) -> AttentionBackend:
    """Raises InvalidInput for layers and pools that the kernels do not serve."""
    if any(layer.kind == "mla" for layer in context.layers):
        return XPULatentBackend(context, options, kernels)
    return XPUPagesBackend(context, options, kernels)


make = KernelLibrary(
    address="intel/intel_xpu",
    backend=_backend,
    providers={"sgl-kernel": load_kernels},
    trial=rehearse,
    hint="the kernels are on no index: build them with oneAPI's compiler, "
    "pip install git+https://github.com/sgl-project/sgl-kernel-xpu",
)
