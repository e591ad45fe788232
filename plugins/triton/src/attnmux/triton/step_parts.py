"""Mixed steps as two: their prompts take tiles, and their decoding requests take shares.

A decoding request has a few rows, and a tile multiplies its keys by 128 or 192. So a step whose
decoding requests have many keys ends earlier if their keys are shared as in decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnmux.core import AttentionCall, ForwardBatch
from attnmux.triton.operands import Results
from attnmux.triton.slots import Slots
from attnmux.triton.step import TritonStep

LEAST_VALUES = 50_000_000
"""Values of K and V that the decoding requests have in a layer. With fewer, one launch is faster:
on an H200, 46 million took 98 us in one launch and 108 in two, and 66 million 330 and 316."""
WIDENED = 3
"""What a value of 8 bits counts that tiles widen first: 31 million took 319 us, and 294 in two."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPart:
    """Some of a step's requests, which lie side by side, as a step of their own."""

    step: TritonStep
    requests: slice
    tokens: slice

    def call(self, whole: AttentionCall) -> AttentionCall:
        """The part's queries; their K and V are in the pool."""
        rope = None if whole.q_rope is None else whole.q_rope[self.tokens]
        return AttentionCall(q=whole.q[self.tokens], k=None, v=None, layer=whole.layer, q_rope=rope)

    def results(self, whole: Results) -> Results:
        lse = None if whole.lse is None else whole.lse[self.tokens]
        return Results(whole.out[self.tokens], lse)

    def slots(self, whole: Slots) -> Slots:
        if whole.rows is None:
            return whole._replace(table=whole.table[self.requests])
        return whole._replace(rows=whole.rows[self.requests])


def parts_of(step: TritonStep, values: int, most_keys: int) -> tuple[StepPart, ...]:
    """The prompts and the decoding requests of a step; none for a step that stays whole.

    That is one without lengths on the host, one that hides keys, is captured in a graph or has an
    encoder, and one without many keys in the decoding requests that lie side by side at one of its
    ends. values: of a key, in a layer. most_keys: those that a token sees at most.
    """
    batch = step.batch
    new, lens = batch.extend_seq_lens_cpu, batch.seq_lens_cpu
    if step.queries is not None or step.in_capture or step.hides or batch.encoder_lens is not None:
        return ()
    if new is None or lens is None or int(new.sum()) != batch.num_tokens:
        return ()
    decodes = ((new == 1) & (lens > 1)).tolist()
    if all(decodes):
        return ()
    first, last = decodes.index(False), batch.batch_size - decodes[::-1].index(False)
    keys = lens.clamp(max=most_keys)
    before, after = int(keys[:first].sum()), int(keys[last:].sum())
    if max(before, after) * values < LEAST_VALUES:
        return ()
    if before >= after:
        decoding, prompts = _parts_at(batch, first, tokens=first)
    else:
        tokens = batch.num_tokens - (batch.batch_size - last)
        prompts, decoding = _parts_at(batch, last, tokens=tokens)
    # As a decode step has them, so that the same compiled kernels serve both.
    decode = replace(decoding.step, queries=1, lens=decoding.step.batch.seq_lens, lens_shift=-1)
    return prompts, replace(decoding, step=decode)


def _parts_at(batch: ForwardBatch, requests: int, *, tokens: int) -> tuple[StepPart, StepPart]:
    """The first requests of a step, which have so many tokens, and the others."""

    def part(first: int, last: int, first_token: int, last_token: int) -> StepPart:
        its = batch.slice(first, last, first_token=first_token, last_token=last_token)
        return StepPart(
            step=TritonStep.of(its),
            requests=slice(first, last),
            tokens=slice(first_token, last_token),
        )

    return (
        part(0, requests, 0, tokens),
        part(requests, batch.batch_size, tokens, batch.num_tokens),
    )
