"""One request of a step by itself: what a deterministic backend must not tell apart."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnmux.core.testing.builders import PreparedStep


def alone(step: PreparedStep, request: int) -> tuple[PreparedStep, slice]:
    """A step of one of the requests, whose K and V are in the pool, and its rows in the whole."""
    batch = step.batch
    new = batch.extend_seq_lens
    start = request if new is None else int(new[:request].sum())
    num_tokens = 1 if new is None else int(new[request])
    tokens = slice(start, start + num_tokens)
    one = slice(request, request + 1)

    def of_request(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[one]

    part = replace(
        batch,
        batch_size=1,
        req_pool_indices=batch.req_pool_indices[one],
        seq_lens=batch.seq_lens[one],
        out_cache_loc=batch.out_cache_loc[tokens],
        positions=batch.positions[tokens],
        seq_lens_cpu=of_request(batch.seq_lens_cpu),
        seq_lens_sum=None if batch.seq_lens_sum is None else int(batch.seq_lens[request]),
        extend_seq_lens=of_request(new),
        extend_seq_lens_cpu=of_request(batch.extend_seq_lens_cpu),
        extend_prefix_lens=of_request(batch.extend_prefix_lens),
        extend_prefix_lens_cpu=of_request(batch.extend_prefix_lens_cpu),
        extend_num_tokens=None if new is None else num_tokens,
        topk_indices=None if batch.topk_indices is None else batch.topk_indices[tokens],
    )
    inputs = tuple(
        replace(
            given,
            q=given.q[tokens],
            q_rope=None if given.q_rope is None else given.q_rope[tokens],
            topk_indices=None if given.topk_indices is None else given.topk_indices[tokens],
        )
        for given in step.inputs
    )
    prepared = replace(
        step,
        batch=part,
        inputs=inputs,
        num_real_tokens=num_tokens,
        num_request_tokens=num_tokens,
    )
    return prepared, tokens
