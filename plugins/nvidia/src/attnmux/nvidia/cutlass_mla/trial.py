"""One launch before the first step: has the library a kernel for this device and this dtype?"""

from __future__ import annotations

import torch

from attnmux.core.context import BackendContext
from attnmux.nvidia.cutlass_mla.calls import PAGE
from attnmux.nvidia.cutlass_mla.kernels import Kernels
from attnmux.nvidia.latent import RANK, ROPE, latent_layers
from attnmux.nvidia.trial import trial


def try_kernels(kernels: Kernels, context: BackendContext) -> None:
    """Attend to one key with the first layer's heads, and wait for it.

    Raises BackendFailed with what the library said: it knows SM100 alone.
    """
    layer, device = latent_layers(context)[0], context.device
    heads, dtype = layer.tp_q_head_num, context.token_to_kv_pool.dtype

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    with trial("nvidia/cutlass_mla", device, AssertionError):
        kernels.cutlass_mla_decode(
            zeros(1, heads, RANK),
            zeros(1, heads, ROPE),
            zeros(1, PAGE, RANK + ROPE),
            torch.ones(1, dtype=torch.int32, device=device),
            zeros(1, 1, dtype=torch.int32),
            zeros(kernels.cutlass_mla_get_workspace_size(PAGE, 1), dtype=torch.uint8),
            1.0,
        )
