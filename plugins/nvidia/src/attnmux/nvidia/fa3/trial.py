"""One launch before the first step: has the library a kernel for this device and these dims?"""

from __future__ import annotations

import torch

from attnmux.core.context import BackendContext
from attnmux.nvidia.fa3.kernels import Kernels
from attnmux.nvidia.trial import trial


def try_kernels(kernels: Kernels, context: BackendContext) -> None:
    """Attend to one key with the first layer's heads, merge, and wait for it.

    A build for other devices imports, and fails when it is launched.
    Raises BackendFailed with what the library said.
    """
    layer, device = context.layers[0], context.device
    dtype = torch.bfloat16

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
    with trial("nvidia/fa3", device):
        out, lse, *_ = kernels.flash_attn_varlen_func(
            zeros(1, layer.tp_q_head_num, layer.qk_head_dim),
            zeros(1, layer.tp_k_head_num, layer.qk_head_dim),
            zeros(1, layer.tp_v_head_num, layer.v_head_dim),
            bounds,
            bounds,
            max_seqlen_q=1,
            max_seqlen_k=1,
            causal=True,
            return_softmax_lse=True,
        )
        state = out, lse.t().contiguous()
        kernels.merge_state_v2(*state, *state)
