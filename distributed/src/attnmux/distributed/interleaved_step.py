"""A decode or verify step over interleaved KV, as one rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput
from attnmux.distributed.interleaving import Interleaving


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankStep:
    """A step of one new token for each request, or of a chain of drafts."""

    batch: ForwardBatch
    """The decode step of this rank's backend; for drafts over their prefixes."""
    writes: ForwardBatch
    """The engine's step, with this rank's slots."""
    has_keys: torch.Tensor
    """[B, 1] bool: whether this rank holds a key of the request."""
    drafts: int
    """Drafts of a request that are verified; 0 for a decode step."""

    @classmethod
    def of(
        cls, batch: ForwardBatch, interleaving: Interleaving, buffers: Sequence[StepBuffers]
    ) -> RankStep:
        """buffers: of captured graphs; the first with room holds the tensors.

        Raises InvalidInput for drafts that are no chains.
        """
        verifies, drafts = batch.forward_mode.is_target_verify(), 0
        if verifies:
            drafts = _drafts_of(batch)
        held = interleaving.lens(batch.seq_lens)
        mine = interleaving.mine(batch.out_cache_loc)
        has_keys = (held > 0).unsqueeze(1)
        # No decode step has a request without keys; what it finds then has no weight
        lens = held.clamp(min=1)
        positions = lens.long() - 1 if verifies else batch.positions
        lens_cpu = batch.seq_lens_cpu
        if lens_cpu is not None:
            lens_cpu = interleaving.lens(lens_cpu).clamp(min=1)
        room = next((buffer for buffer in buffers if buffer.holds(batch)), None)
        if room is not None:
            lens, mine, has_keys, positions = room.copy(lens, mine, has_keys, positions)
        writes = replace(batch, out_cache_loc=mine)
        local = replace(
            writes,
            forward_mode=ForwardMode.DECODE,
            seq_lens=lens,
            positions=positions,
            out_cache_loc=mine[: batch.batch_size],
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
        )
        local = _without_drafts(local) if verifies else local
        return cls(batch=local, writes=writes, has_keys=has_keys, drafts=drafts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBuffers:
    """The fixed memory of captured steps for each step's tensors."""

    lens: torch.Tensor
    slots: torch.Tensor
    has_keys: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, max_bs: int, max_num_tokens: int, device: torch.device) -> StepBuffers:
        return cls(
            lens=torch.ones(max_bs, dtype=torch.int32, device=device),
            slots=torch.zeros(max_num_tokens, dtype=torch.int64, device=device),
            has_keys=torch.ones(max_bs, 1, dtype=torch.bool, device=device),
            positions=torch.zeros(max_bs, dtype=torch.int64, device=device),
        )

    def has_room(self, max_bs: int, max_num_tokens: int) -> bool:
        return max_bs <= len(self.lens) and max_num_tokens <= len(self.slots)

    def holds(self, batch: ForwardBatch) -> bool:
        return self.has_room(batch.batch_size, batch.num_tokens)

    def copy(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Lengths, slots, `has_keys` and positions, in the buffers."""
        buffers = (self.lens, self.slots, self.has_keys, self.positions)
        return tuple(
            buffer[: len(value)].copy_(value) for buffer, value in zip(buffers, values, strict=True)
        )


def _without_drafts(batch: ForwardBatch) -> ForwardBatch:
    """The step as a decode step has it."""
    return replace(
        batch,
        extend_seq_lens=None,
        extend_seq_lens_cpu=None,
        extend_prefix_lens=None,
        extend_prefix_lens_cpu=None,
        extend_num_tokens=None,
        spec_info=None,
    )


def _drafts_of(batch: ForwardBatch) -> int:
    """Drafts of each request."""
    spec = batch.spec_info
    if spec is None or spec.tree_mask is not None:
        got = "no drafts" if spec is None else "a custom mask"
        expected = "chains of drafts: KV is interleaved over ranks"
        raise InvalidInput("spec_info", got=got, expected=expected)
    return spec.draft_token_num
