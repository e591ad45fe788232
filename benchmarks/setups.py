"""What the steps of `adapters.py` and of `triton_gpu.py` have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.context import BackendContext
from attnmux.core.layer import LayerSpec

DIM, RANK, ROPE = 128, 512, 64
"""Of a head, of a latent, and of the rotary part beside that."""
LATENT_SCALING = 192**-0.5
"""Of the expanded heads, 128 and 64 dims, of DeepSeek-V3."""
COLD_BYTES = 256e6
"""Several times what a GPU's cache holds."""


def paged(buffer: torch.Tensor, page: int) -> torch.Tensor:
    """[pages, page, heads, dim]: a layer's buffer, a view."""
    return buffer.view(-1, page, *buffer.shape[1:])


def make_layer(layer_id: int, *, is_latent: bool, q_heads: int, kv_heads: int) -> LayerSpec:
    """kv_heads: 1 of a latent."""
    return LayerSpec(
        layer_id=layer_id,
        kind="mla" if is_latent else "mha",
        tp_q_head_num=q_heads,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        qk_head_dim=RANK + ROPE if is_latent else DIM,
        v_head_dim=RANK if is_latent else DIM,
        scaling=LATENT_SCALING if is_latent else DIM**-0.5,
    )


def make_batch(context: BackendContext, tokens: Sequence[torch.Tensor], new: int) -> ForwardBatch:
    """Requests whose last `new` tokens are queries; one decodes. tokens: the slots of each
    request's, [keys] int64."""
    table, device = context.req_to_token_pool, context.device
    rows = torch.tensor(table.alloc(len(tokens)), device=device)
    lens = torch.tensor([len(slots) for slots in tokens], dtype=torch.int32, device=device)
    table.write(rows, torch.zeros_like(lens), lens, torch.cat(list(tokens)))
    news = torch.full_like(lens, new)
    is_extend = new > 1
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND if is_extend else ForwardMode.DECODE,
        batch_size=len(tokens),
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        seq_lens_sum=int(lens.sum()),
        out_cache_loc=torch.cat([slots[-new:] for slots in tokens]),
        positions=((lens - news)[:, None] + torch.arange(new, device=device)).flatten().long(),
        extend_seq_lens=news if is_extend else None,
        extend_seq_lens_cpu=news.cpu() if is_extend else None,
        extend_prefix_lens=lens - news if is_extend else None,
        extend_prefix_lens_cpu=(lens - news).cpu() if is_extend else None,
        extend_num_tokens=new * len(tokens) if is_extend else None,
    )
