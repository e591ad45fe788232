"""Whether what a backend answered is right: against float64 on sampled queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attnmux.bench.steps import Step
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.kv.quantise import FP8_DTYPES
from attnmux.testing import reference

MOST_ERROR: Mapping[torch.dtype, float] = {
    # Weights and results are rounded to the format, each by 2^-9 at most, and kernels differ in
    # where; what is wrong is off by far more.
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-4,
}
"""Norm of the difference by the norm of what is expected."""

HEADS = 4
"""Sampled of the query heads that share a KV head."""


def most_error(step: Step, *, fp8_products: bool) -> float:
    """fp8_products: as on the card."""
    limit, stored = MOST_ERROR[step.q.dtype], step.pool.dtype
    if fp8_products and stored in FP8_DTYPES:
        limit += torch.finfo(stored).eps / 2
    return limit


def error_of(step: Step) -> float:
    """How far off `step.out` is, which the last layer wrote; infinite where it is not finite.

    The first, a middle and the last query of the first, a middle and the last request.
    """
    work, layer = step.workload, step.layers[-1]
    requests = sorted({0, work.batch_size // 2, work.batch_size - 1})
    tokens = sorted({0, work.new // 2, work.new - 1})
    device = step.q.device
    rows = torch.tensor([r * work.new + t for r in requests for t in tokens], device=device)
    cached = torch.tensor([work.prefix + t for _ in requests for t in tokens], device=device).int()
    ones = torch.ones_like(cached)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        req_pool_indices=step.batch.req_pool_indices[rows // work.new],
        seq_lens=cached + ones,
        out_cache_loc=step.batch.out_cache_loc[rows],
        positions=cached.long(),
        extend_seq_lens=ones,
        extend_prefix_lens=cached,
        extend_num_tokens=len(rows),
    )
    heads = _sampled_heads(step, device)
    expected, _ = reference.attention(
        step.q[rows][:, heads],
        replace(
            layer,
            tp_q_head_num=len(heads),
            sinks=None if layer.sinks is None else layer.sinks[heads],
        ),
        batch,
        step.table.req_to_token,
        step.pool,
        q_rope=None if step.q_rope is None else step.q_rope[rows][:, heads],
    )
    found = step.out[rows][:, heads].double()
    off = float((found - expected).norm() / expected.norm())
    return off if off == off else float("inf")


def _sampled_heads(step: Step, device: torch.device) -> torch.Tensor:
    """The same number of query heads of each KV head: float64 over all would take long."""
    layer = step.layers[-1]
    group = layer.tp_q_head_num // layer.tp_k_head_num
    of_group = torch.arange(0, group, max(1, group // HEADS), device=device)
    starts = torch.arange(layer.tp_k_head_num, device=device) * group
    return (starts[:, None] + of_group).flatten()
