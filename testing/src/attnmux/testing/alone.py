"""One request of a step by itself: what a deterministic backend must not tell apart."""

from __future__ import annotations

from dataclasses import replace

from attnmux.testing.builders import PreparedStep


def alone(step: PreparedStep, request: int) -> tuple[PreparedStep, slice]:
    """A step of one of the requests, whose K and V are in the pool, and its rows in the whole."""
    batch = step.batch
    new = batch.extend_seq_lens
    start = request if new is None else int(new[:request].sum())
    num_tokens = 1 if new is None else int(new[request])
    tokens = slice(start, start + num_tokens)
    part = batch.slice(request, request + 1, first_token=tokens.start, last_token=tokens.stop)
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
