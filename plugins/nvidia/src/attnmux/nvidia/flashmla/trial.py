"""One launch before the first step: has the library a kernel for this device and these dtypes?"""

from __future__ import annotations

import torch

from attnmux.core.context import BackendContext
from attnmux.nvidia.flashmla.calls import PAGE, LayerCall
from attnmux.nvidia.flashmla.kernels import Kernels
from attnmux.nvidia.latent import RANK, ROPE, latent_layers
from attnmux.nvidia.trial import trial

REFUSALS = (ImportError, AssertionError, AttributeError, TypeError)
"""What the packages raise besides RuntimeError. The last two are of other builds of FlashMLA, which
have the same name and neither all functions nor all arguments."""


def try_kernels(kernels: Kernels, context: BackendContext) -> None:
    """Attend to one key with the first layer's heads, and wait for it.

    Raises BackendFailed with what the library said, InvalidInput for layers and pools that it does
    not serve.
    """
    layer, device = latent_layers(context)[0], context.device
    call = LayerCall.of(layer, context, kernels)
    heads, dtype = layer.tp_q_head_num, context.token_to_kv_pool.dtype
    one = torch.ones(1, dtype=torch.int32, device=device)
    with trial("nvidia/flashmla", device, *REFUSALS):
        tiles, splits = kernels.schedule(one, heads, call.is_fp8)
        kernels.flash_mla_with_kvcache(
            torch.zeros(1, 1, heads, RANK + ROPE, device=device).to(dtype),
            torch.zeros(1, PAGE, 1, RANK + ROPE, device=device).to(dtype),
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            one,
            RANK,
            **kernels.schedule_arguments(tiles, splits),
            **call.arguments,
        )
