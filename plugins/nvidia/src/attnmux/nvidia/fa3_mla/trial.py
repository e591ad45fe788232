"""One launch of each kernel before the first step: has the library one for this device?"""

from __future__ import annotations

import torch

from attnmux.core.context import BackendContext
from attnmux.nvidia.fa3.kernels import Kernels
from attnmux.nvidia.latent import RANK, ROPE
from attnmux.nvidia.trial import trial


def try_kernels(kernels: Kernels, context: BackendContext) -> None:
    """Attend to one cached token with the first layer's heads, merge, and wait for it.

    A build for other devices imports, and fails when it is launched.
    Raises BackendFailed with what the library said.
    """
    heads, device = context.layers[0].tp_q_head_num, context.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    row = zeros(1, 1, 1, RANK + ROPE)
    with trial("nvidia/fa3_mla", device):
        out, lse, *_ = kernels.flash_attn_with_kvcache(
            zeros(1, 1, heads, ROPE),
            row[..., RANK:],
            row[..., :RANK],
            qv=zeros(1, 1, heads, RANK),
            cache_seqlens=torch.ones(1, dtype=torch.int32, device=device),
            page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
            causal=True,
            return_softmax_lse=True,
        )
        state = out.flatten(0, 1), lse.flatten(1)
        kernels.merge_state_v2(*state, *state)
