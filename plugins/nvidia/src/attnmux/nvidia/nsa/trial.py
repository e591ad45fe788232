"""One launch before the first step: has the library a kernel for this device, and which LSE?

The kernels write natural logarithms. The binding of sgl_kernel 0.4.5 multiplies them by log2 e
(csrc/python_api.cpp of its FlashMLA), and sgl-flash-mla 1.0.0 does so when asked. So the base is
measured: two keys of logit 0 have ln 2 or log2 2.
"""

from __future__ import annotations

import math

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import BackendFailed
from attnmux.nvidia.latent import RANK, latent_layers
from attnmux.nvidia.nsa.calls import TOPK_MULTIPLE, WIDTH, LayerCall
from attnmux.nvidia.nsa.kernels import Kernels
from attnmux.nvidia.trial import trial

REFUSALS = (ImportError, AssertionError, AttributeError, TypeError)
"""What the packages raise besides RuntimeError. The last two are of other builds of FlashMLA, which
have the same name and neither all functions nor all arguments."""
UNITS = {1.0: math.log(2), math.log(2): 1.0}
"""What LSE is multiplied by to be natural, and what two keys of logit 0 give then."""


def measured_lse_unit(kernels: Kernels, context: BackendContext) -> float:
    """Attend to two equal keys with the first layer's heads, and wait for it. Returns what LSE is
    to be multiplied by.

    Raises BackendFailed with what the library said, InvalidInput for layers and pools that it does
    not serve.
    """
    layer, device = latent_layers(context)[0], context.device
    call = LayerCall.of(layer, context)
    indices = torch.full((1, 1, TOPK_MULTIPLE), -1, dtype=torch.int32, device=device)
    indices[..., :2] = torch.arange(2, device=device)
    with trial("nvidia/nsa", device, *REFUSALS):
        _, _, lse = kernels.flash_mla_sparse_fwd(
            torch.zeros(1, call.kernel_heads, WIDTH, dtype=torch.bfloat16, device=device),
            torch.zeros(2, 1, WIDTH, dtype=torch.bfloat16, device=device),
            indices,
            layer.scaling,
            RANK,
            **kernels.constants,
        )
        found = float(lse[0, 0])
    for unit, expected in UNITS.items():
        if math.isclose(found, expected, rel_tol=1e-3):
            return unit
    raise BackendFailed(
        "nvidia/nsa", f"two keys of logit 0 have LSE {found:.4f}, neither ln 2 nor log2 2"
    )
