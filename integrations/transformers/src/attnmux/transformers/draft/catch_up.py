"""Steps in which a draft model reads what was accepted, of one size for every request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import ForwardBatch, ForwardMode
from attnmux.transformers.requests.batching import StepBuilder
from attnmux.transformers.requests.sequence import SequenceState, Step


def can_reread(states: Sequence[SequenceState], num_tokens: int) -> bool:
    """Whether `reread` serves the requests."""
    return all(each.num_pending <= num_tokens <= len(each.token_ids) for each in states)


def reread(states: Sequence[SequenceState], steps: StepBuilder, num_tokens: int) -> Step:
    """A DRAFT_EXTEND step over the last d tokens of each request, which include all pending ones.

    Graphs hold steps with as many tokens for every request. Where fewer are pending, the tokens
    before them run again, and write the same K and V to their slots: unlike padding, they have
    slots and keys.
    num_tokens: d. The requests own all of their slots. Raises as `StepBuilder.extend` does.
    """
    taken = steps.extend(states, forward_mode=ForwardMode.DRAFT_EXTEND).batch
    starts = [state.num_cached - num_tokens for state in states]
    host = torch.tensor(
        [
            [token for state in states for token in state.token_ids[-num_tokens:]],
            [start + place for start in starts for place in range(num_tokens)],
        ]
    )
    input_ids, positions = host.to(steps.device, non_blocking=True).unbind()
    rows = taken.req_pool_indices.repeat_interleave(num_tokens, output_size=len(positions))
    counts_cpu = torch.full((len(states),), num_tokens, dtype=torch.int32)
    assert taken.seq_lens_cpu is not None
    batch = ForwardBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND,
        batch_size=len(states),
        req_pool_indices=taken.req_pool_indices,
        seq_lens=taken.seq_lens,
        out_cache_loc=steps.req_to_token_pool.req_to_token[rows, positions].long(),
        positions=positions,
        seq_lens_cpu=taken.seq_lens_cpu,
        seq_lens_sum=taken.seq_lens_sum,
        extend_seq_lens=counts_cpu.to(steps.device),
        extend_seq_lens_cpu=counts_cpu,
        extend_prefix_lens=taken.seq_lens - num_tokens,
        extend_prefix_lens_cpu=taken.seq_lens_cpu - num_tokens,
        extend_num_tokens=len(positions),
    )
    last = torch.arange(1, len(states) + 1, device=steps.device) * num_tokens - 1
    return Step(batch=batch, input_ids=input_ids, last_indices=last)
