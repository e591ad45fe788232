"""One rank's tokens of an extend step whose prompts are split over several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput

SPLIT_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED)
"""Modes of steps that can be split."""

REFUSED = {
    "spec_info": "drafts, which are few: every rank verifies them whole",
    "multi_item": "items, whose masks are not causal",
    "encoder_lens": "an encoder, whose keys are not the step's own",
    "topk_indices": "picked keys, which an indexer finds among those of all ranks",
}
"""Fields of a step that cannot be split, and why."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ZigzagStep(ForwardBatch):
    """The tokens of an extend step that one of `size` ranks computes, as a batch of their own.

    Each request's new tokens are cut into 2 * size chunks, and rank r has chunks r and
    2 * size - 1 - r. The later a chunk, the more keys it sees, so that all ranks have the same
    work. The rank's tokens are its first chunk of every request, and then its second of every
    request.

    It is an ordinary batch of 2 * B pieces: each has the row of its request, and the request's
    tokens before the piece count as cached. Any backend may run it over a pool that holds K and V
    of these.
    """

    rank: int
    size: int
    chunk_lens: tuple[tuple[int, ...], ...]
    """[2 * size][B]: tokens of each chunk, by request."""
    cached_lens: tuple[int, ...]
    """[B]: tokens of each request that were in the cache before the step."""
    rows: torch.Tensor
    """[T of this rank] int64: the whole step's rows that this rank computes."""
    order: torch.Tensor
    """[T] int64: rows of the whole step chunk by chunk, and in a chunk request by request."""
    whole_cache_loc: torch.Tensor
    """[T] int64: slots of all tokens on this rank, in that order."""
    last_tokens: torch.Tensor
    """[B] int64 on rank 0, which has the last chunks: the row, among its own, of each request's
    last token. Without requests on other ranks. Of a request without new tokens it means
    nothing."""

    @property
    def num_requests(self) -> int:
        """B: requests of the whole step."""
        return len(self.cached_lens)

    @property
    def own_chunks(self) -> tuple[int, int]:
        """The two chunks of this rank."""
        return self.rank, 2 * self.size - 1 - self.rank

    def owner(self, chunk: int) -> int:
        """The rank that has a chunk."""
        return min(chunk, 2 * self.size - 1 - chunk)


def can_be_split(batch: ForwardBatch) -> bool:
    """Whether `zigzag_step` takes a step."""
    refused = any(getattr(batch, field) is not None for field in REFUSED)
    return batch.forward_mode in SPLIT_MODES and not refused


def zigzag_step(batch: ForwardBatch, *, rank: int, size: int) -> ZigzagStep:
    """The part of `rank` in a step that is split over `size` ranks.

    batch: the whole step, the same on each rank except slots, which are those of this rank's pool.
    Chunks end at i * new // (2 * size): lengths need not be multiples, and a prompt may have fewer
    tokens than there are chunks. Rows after the last request's are dropped. Lengths without a
    mirror on the host are read from the device.

    Raises InvalidInput for steps that cannot be split: other modes than EXTEND and MIXED, drafts,
    many items, encoders and picked keys.
    """
    _check(batch, rank, size)
    new = _on_host("extend_seq_lens", batch.extend_seq_lens, batch.extend_seq_lens_cpu)
    cached = _on_host("extend_prefix_lens", batch.extend_prefix_lens, batch.extend_prefix_lens_cpu)
    ends = torch.arange(2 * size + 1).unsqueeze(1) * new // (2 * size)
    lens, starts = ends.diff(dim=0), ends[:-1] + (new.cumsum(0) - new)
    mine = [rank, 2 * size - 1 - rank]
    own_lens, before = lens[mine].flatten(), (cached + ends[mine]).flatten()
    device = batch.out_cache_loc.device
    rows = spans(starts[mine].flatten(), own_lens).to(device)
    order = spans(starts.flatten(), lens.flatten()).to(device)
    last = own_lens.cumsum(0)[len(new) :] - 1 if rank == 0 else own_lens[:0]

    own_lens, before = own_lens.int(), before.int()
    ends_of_pieces = before + own_lens
    return ZigzagStep(
        forward_mode=batch.forward_mode,
        batch_size=2 * batch.batch_size,
        req_pool_indices=batch.req_pool_indices.repeat(2),
        seq_lens=ends_of_pieces.to(device),
        out_cache_loc=batch.out_cache_loc[rows],
        positions=batch.positions[rows],
        seq_lens_cpu=ends_of_pieces,
        seq_lens_sum=int(ends_of_pieces.sum()),
        extend_seq_lens=own_lens.to(device),
        extend_seq_lens_cpu=own_lens,
        extend_prefix_lens=before.to(device),
        extend_prefix_lens_cpu=before,
        extend_num_tokens=len(rows),
        actual_forward_mode=batch.actual_forward_mode,
        rank=rank,
        size=size,
        chunk_lens=tuple(map(tuple, lens.tolist())),
        cached_lens=tuple(cached.tolist()),
        rows=rows,
        order=order,
        whole_cache_loc=batch.out_cache_loc[order],
        last_tokens=last.to(device),
    )


def spans(starts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """int64: starts[0], starts[0] + 1, …, lens[0] of them, then the same from starts[1] on."""
    shift = starts - (lens.cumsum(0) - lens)
    return torch.repeat_interleave(shift, lens) + torch.arange(int(lens.sum()))


def _check(batch: ForwardBatch, rank: int, size: int) -> None:
    InvalidInput.check_at_least(1, "size", size)
    if not 0 <= rank < size:
        raise InvalidInput("rank", got=rank, expected=f"0 to {size - 1}")
    if batch.forward_mode not in SPLIT_MODES:
        expected = "EXTEND or MIXED: give steps of other modes to the backend whole"
        raise InvalidInput("forward_mode", got=batch.forward_mode.name, expected=expected)
    for field, reason in REFUSED.items():
        if getattr(batch, field) is not None:
            expected = f"None, since the step has {reason}: give it to the backend whole"
            raise InvalidInput(field, got="a value", expected=expected)


def _on_host(field: str, lens: torch.Tensor | None, mirror: torch.Tensor | None) -> torch.Tensor:
    if lens is None:
        raise InvalidInput(field, got=None, expected="lengths in an extend step")
    return (lens.cpu() if mirror is None else mirror).long()
