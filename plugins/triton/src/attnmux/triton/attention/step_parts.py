"""Mixed steps as two: their prompts take tiles, and their decoding requests take shares.

A decoding request has a few rows, and a tile multiplies its keys by 128 or 192. So a step whose
decoding requests have many keys ends earlier if their keys are shared as in decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attnmux.core import AttentionCall, ForwardBatch
from attnmux.triton.attention.step import TritonStep
from attnmux.triton.attention.tile_heights import FIXED_KEYS
from attnmux.triton.launches.operands import Results, Slots

LEAST_VALUES = 4_000_000
"""Values of K and V that decoding requests need for an estimate to be worth its time."""
SECOND_LAUNCH_US = 8.0
"""The cost of shares in addition to reading their keys."""
BYTES_A_US = 4.2e6
"""Bytes of K and V that shares read in a microsecond on an H200, and that widening moves there."""
WIDENED_BYTES = 5
"""Bytes that widening a value of 8 bits reads and writes, with the tiles' own reading."""


class TilesOfRequest(NamedTuple):
    """The keys of a request that tiles of one KV head read."""

    total: float
    """By all tiles, with the fixed costs of each."""
    longest: int
    """By the last tile."""
    lens: int
    """Keys that the request has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Estimates of how long a step's requests take in tiles and in shares, for one layer.

    In 13 of 13 mixed steps on H200s the way with the lower estimate was the faster one
    (benchmarks/results/grid-h200.md). The estimates were from 13 % too high to 37 % too low, and
    less than half if a step waits for the host.
    """

    group: int
    kv_heads: int
    columns: int
    """Columns of K and V together in a KV head."""
    bits: int
    """Bits of a value in the pool."""
    height: int
    """Rows of a tile."""
    units: int
    """Programs of tiles that the device runs at a time."""
    most_keys: int
    """The most keys that a token sees."""
    widens: bool = False
    """Whether tiles read 8-bit keys that are widened first."""

    @property
    def values(self) -> int:
        """Values of a key in all KV heads."""
        return self.kv_heads * self.columns

    def tiles_of(self, new: torch.Tensor, lens: torch.Tensor) -> list[TilesOfRequest]:
        """new, lens: [B] int32 on the host, the new tokens and all keys of each request."""
        tokens = self.height // self.group
        last = lens.clamp(max=self.most_keys + tokens)
        first = (lens - new + tokens).minimum(last)
        count = (new * self.group + self.height - 1) // self.height
        total = count * ((first + last) / 2 + FIXED_KEYS)
        each = zip(total.tolist(), last.tolist(), lens.tolist(), strict=True)
        return [TilesOfRequest(*numbers) for numbers in each]

    def tiles_us(self, requests: Sequence[TilesOfRequest]) -> float:
        total = sum(request.total for request in requests) * self.kv_heads / self.units
        longest = max(request.longest for request in requests) + FIXED_KEYS
        # A turn of 64 keys took 0.91 us with heads of 64 columns, 1.34 with 128, 1.82 with 256
        us = max(longest, total) * (0.011 + 36e-6 * self.columns)
        widened = (
            sum(request.lens for request in requests) * self.values * WIDENED_BYTES * self.widens
        )
        return us + widened / BYTES_A_US

    def shares_us(self, lens: torch.Tensor) -> float:
        """lens: [B] int32 on the host, the keys of decoding requests."""
        keys = int(lens.clamp(max=self.most_keys).sum())
        return SECOND_LAUNCH_US + keys * self.values * self.bits / 8 / BYTES_A_US


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


def parts_of(step: TritonStep, costs: StepCosts) -> tuple[StepPart, ...]:
    """The prompts and the decoding requests of a step; none for a step that stays whole.

    That is one without lengths on the host, one that hides keys, is captured in a graph or has an
    encoder, and one that ends no earlier in two parts. Decoding requests are those that lie side by
    side at one end of the step.
    """
    batch = step.batch
    new, lens = batch.extend_seq_lens_cpu, batch.seq_lens_cpu
    if step.queries is not None or step.in_capture or step.hides or batch.encoder_lens is not None:
        return ()
    if new is None or lens is None or int(new.sum()) != batch.num_tokens:
        return ()
    decodes = ((new == 1) & (lens > 1)).tolist()
    if sum(decodes) == batch.num_tokens:  # besides, requests without new tokens
        return ()
    first, last = decodes.index(False), batch.batch_size - decodes[::-1].index(False)
    keys = lens.clamp(max=costs.most_keys)
    before, after = int(keys[:first].sum()), int(keys[last:].sum())
    if max(before, after) * costs.values < LEAST_VALUES:
        return ()
    decoding, others = slice(first), slice(first, None)
    if after > before:
        decoding, others = slice(last, None), slice(last)
    tiles = costs.tiles_of(new, lens)
    if costs.tiles_us(tiles[others]) + costs.shares_us(lens[decoding]) >= costs.tiles_us(tiles):
        return ()
    if after > before:
        tokens = batch.num_tokens - (batch.batch_size - last)
        prompts, part = _parts_at(batch, last, tokens=tokens)
    else:
        part, prompts = _parts_at(batch, first, tokens=first)
    # As a decode step has them, so that the same compiled kernels serve both.
    decode = replace(part.step, queries=1, lens=part.step.batch.seq_lens, lens_shift=-1)
    return prompts, replace(part, step=decode)


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
