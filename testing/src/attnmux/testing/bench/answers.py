"""Checks a backend's answer against float64 on sampled queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from attnmux.core import ForwardBatch, ForwardMode, KVPool
from attnmux.testing import Errors, errors_between, reference
from attnmux.testing.bench.steps import Step

MAX_ERROR: Mapping[torch.dtype, float] = {
    # Weights and results are rounded to the format, each by 2^-9 at most, and kernels differ in
    # where. A wrong answer is off by far more.
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-4,
}
"""Norm of the difference divided by the norm of the expected answer."""

HEADS = 4
"""Query heads that are sampled of those that share a KV head."""


def max_error(step: Step, *, fp8_products: bool = False) -> float:
    """The largest relative error of a right answer. fp8_products: as on the card."""
    limit, stored = MAX_ERROR[step.q.dtype], step.pool.dtype
    if fp8_products and stored in KVPool.FP8_DTYPES:
        limit += torch.finfo(stored).eps / 2
    return limit


def error_of(step: Step, out: torch.Tensor | None = None, *, layer: int = -1) -> float:
    """The relative error that `errors_of` finds."""
    return errors_of(step, out, layer=layer).relative


def errors_of(step: Step, out: torch.Tensor | None = None, *, layer: int = -1) -> Errors:
    """Errors of `out` [T, Hq, Dv], a layer's answer, against `attnmux.testing.reference`.

    The reference reads the K and V that the pool stores: rounding to the KV dtype is no error.
    Samples the first, a middle and the last query of the first, a middle and the last request.
    out: the step's own by default, which the last layer wrote. layer: index of the layer.
    """
    work, spec, batch = step.workload, step.layers[layer], step.batch
    device, news, starts = step.q.device, work.new_lens, work.starts
    sampled_tokens = [
        (request, starts[request] + token)
        for request in sorted({0, len(news) // 2, len(news) - 1})
        for token in sorted({0, news[request] // 2, news[request] - 1})
    ]
    requests, rows = torch.tensor(sampled_tokens, device=device).unbind(1)
    cached = batch.positions[rows].int()
    ones = torch.ones_like(cached)
    sampled = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        req_pool_indices=batch.req_pool_indices[requests],
        seq_lens=cached + ones,
        out_cache_loc=batch.out_cache_loc[rows],
        positions=cached.long(),
        extend_seq_lens=ones,
        extend_prefix_lens=cached,
        extend_num_tokens=len(rows),
        topk_indices=None if batch.topk_indices is None else batch.topk_indices[rows],
    )
    heads = _sampled_heads(spec.tp_q_head_num, spec.tp_k_head_num, device)
    sinks = None if spec.sinks is None else spec.sinks[heads]
    slopes = None if spec.alibi_slopes is None else spec.alibi_slopes[heads]
    table = None if spec.relative_bias is None else spec.relative_bias[heads]
    expected, _ = reference.attention(
        step.q[rows][:, heads],
        replace(
            spec,
            tp_q_head_num=len(heads),
            sinks=sinks,
            alibi_slopes=slopes,
            relative_bias=table,
        ),
        sampled,
        step.table.req_to_token,
        step.pool,
        q_rope=None if step.q_rope is None else step.q_rope[rows][:, heads],
    )
    out = step.out if out is None else out
    return errors_between(out[rows][:, heads].double(), expected, out.dtype)


def _sampled_heads(q_heads: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """The same number of query heads of each KV head: float64 over all of them would take long."""
    group = q_heads // kv_heads
    of_group = torch.arange(0, group, max(1, group // HEADS), device=device)
    starts = torch.arange(kv_heads, device=device) * group
    return (starts[:, None] + of_group).flatten()
