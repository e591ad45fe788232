"""One launch before the first step: has the library a kernel for this device and these dims?"""

from __future__ import annotations

import torch

from attnmux.core.context import BackendContext
from attnmux.nvidia.dual_chunk.kernels import Kernels
from attnmux.nvidia.trial import trial


def try_kernels(kernels: Kernels, context: BackendContext) -> None:
    """Attend to one key with the first layer's heads, and wait for it.

    A build for other devices imports, and fails when it is launched.
    Raises BackendFailed with what the library said.
    """
    layer, device = context.layers[0], context.device
    dtype = context.token_to_kv_pool.dtype

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    with trial("nvidia/dual_chunk_flash_attn", device):
        kernels.flash_attn_with_kvcache(
            zeros(1, 1, layer.tp_q_head_num, layer.qk_head_dim),
            zeros(1, 1, layer.tp_k_head_num, layer.qk_head_dim),
            zeros(1, 1, layer.tp_v_head_num, layer.v_head_dim),
            cache_seqlens=torch.ones(1, dtype=torch.int32, device=device),
            page_table=zeros(1, 1, dtype=torch.int32),
            causal=True,
            return_softmax_lse=True,
        )
