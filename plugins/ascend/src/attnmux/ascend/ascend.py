"""torch-npu's operators for the layers of a model: over pages for MHA and GQA, over latents for
MLA, and with expanded heads for MLA's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnmux.ascend.latents import AscendLatentBackend
from attnmux.ascend.npu_kernels import NPUKernels, load_kernels
from attnmux.ascend.pages import AscendPagesBackend
from attnmux.ascend.ring import NOPE, ROPE, AscendRingBackend
from attnmux.core.plugin import KernelLibrary, rehearse

if TYPE_CHECKING:
    from attnmux.core import AttentionBackend, BackendContext


def _backend(
    context: BackendContext, options: Mapping[str, object], kernels: NPUKernels
) -> AttentionBackend:
    """Raises InvalidInput for layers and pools that the operators do not serve."""
    if any(layer.kind == "mla" for layer in context.layers):
        return AscendLatentBackend(context, options, kernels)
    if all(layer.qk_head_dim == NOPE + ROPE for layer in context.layers):
        return AscendRingBackend(context, options, kernels)
    return AscendPagesBackend(context, options, kernels)


make = KernelLibrary(
    address="ascend/ascend",
    backend=_backend,
    providers={"torch-npu": load_kernels},
    trial=rehearse,
    hint="torch-npu needs CANN, for MLA also NNAL, and the release of torch that it was built for; "
    "pip install 'attnmux-ascend[npu]'",
)
