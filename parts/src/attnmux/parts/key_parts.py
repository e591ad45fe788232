"""The parts of a step of prompts: its new tokens, and chunks of the cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from attnmux.core import ForwardBatch, ForwardMode, RequestTable
from attnmux.core.plugin import extend_positions, token_rows
from attnmux.parts.crossing import expansion_pays

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyPart(Generic[K]):
    """Keys of a step that are attended to at once, and new tokens that see them."""

    batch: ForwardBatch
    """Step of the requests that have such keys, which each of its tokens sees as an encoder's. The
    own keys of a step's new tokens make the first part, and are seen causally."""
    tokens: slice
    """Their new tokens' rows in the step, after which rows of no request may come."""
    keys: K
    """Where the keys are, in the order of the requests."""

    @staticmethod
    def of_step(
        batch: ForwardBatch,
        table: RequestTable,
        *,
        page_size: int,
        crossing: float | None,
        chunk_tokens: int,
    ) -> Iterator[KeyPart[torch.Tensor]]:
        """The parts of a step of prompts, the new tokens' own first; none of another step.

        Their keys are slots [n] int64. page_size: of the pool. crossing: of `expansion_pays`,
        below which a step has no parts; None cuts every step. chunk_tokens: cached tokens of a
        part at most. Lengths without a host mirror are read from the device.
        """
        new, cached = batch.extend_seq_lens, batch.extend_prefix_lens
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return
        if new is None or cached is None or batch.encoder_lens is not None:
            return
        if batch.spec_info is not None or batch.multi_item is not None:
            return
        new_lens = _host_lens(new, batch.extend_seq_lens_cpu)
        cached_lens = _host_lens(cached, batch.extend_prefix_lens_cpu)
        if crossing is not None and not expansion_pays(new_lens, cached_lens, crossing):
            return
        new_part = replace(
            batch,
            seq_lens=new,
            seq_lens_cpu=torch.tensor(new_lens, dtype=torch.int32),
            seq_lens_sum=sum(new_lens),
            extend_prefix_lens=torch.zeros_like(new),
            extend_prefix_lens_cpu=torch.zeros(len(new_lens), dtype=torch.int32),
            encoder_lens=torch.zeros_like(new),
            encoder_out_cache_loc=batch.out_cache_loc[:0],
            tbo_children=(),
        )
        tokens = slice(0, sum(new_lens))
        yield KeyPart(batch=new_part, tokens=tokens, keys=batch.out_cache_loc)
        columns = table.columns_for(page_size)
        for first, starts, lens in KeyPart.chunks(cached_lens, chunk_tokens):
            yield _chunk(new_part, columns, new_lens, first, starts, lens)

    @staticmethod
    def chunks(
        cached: Sequence[int], most: int
    ) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Cut all requests' prefixes, one after another, into chunks of up to `most` tokens.

        Yields the first request of a chunk, and for it and those after it the first place and the
        number of their tokens in the chunk.
        """
        first, starts, lens = 0, list[int](), list[int]()
        for request, total in enumerate(cached):
            place = 0
            while place < total:
                if not lens:
                    first = request
                taken = min(total - place, most - sum(lens))
                starts.append(place)
                lens.append(taken)
                place += taken
                if sum(lens) == most:
                    yield first, tuple(starts), tuple(lens)
                    starts, lens = [], []
            if lens and not total:
                starts.append(0)
                lens.append(0)
        if lens:
            yield first, tuple(starts), tuple(lens)


def _chunk(
    own: ForwardBatch,
    columns: tuple[torch.Tensor, int],
    new: Sequence[int],
    first: int,
    starts: Sequence[int],
    lens: Sequence[int],
) -> KeyPart[torch.Tensor]:
    last, before = first + len(lens), sum(new[:first])
    tokens = slice(before, before + sum(new[first:last]))
    batch = own.slice(first, last, first_token=tokens.start, last_token=tokens.stop)
    of_chunk = torch.tensor([starts, lens], dtype=torch.int32, device=own.seq_lens.device)
    table, tokens_each = columns
    rows = token_rows(batch.req_pool_indices, of_chunk[1], sum(lens))
    places = extend_positions(of_chunk[0], of_chunk[1], total=sum(lens))
    slots = table[rows, places // tokens_each].long() * tokens_each + places % tokens_each
    batch = replace(batch, encoder_lens=of_chunk[1], encoder_out_cache_loc=slots)
    return KeyPart(batch=batch, tokens=tokens, keys=slots)


def _host_lens(lens: torch.Tensor, mirror: torch.Tensor | None) -> list[int]:
    counts: list[int] = (lens if mirror is None else mirror).tolist()
    return counts
