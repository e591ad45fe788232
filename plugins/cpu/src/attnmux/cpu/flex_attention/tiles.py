"""A step's queries, cut into tiles: the batch dimension of the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.indices import cu_seqlens

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch


CALL_SIZES = (8, 32, 128)
"""Tiles of a kernel's call. Each is compiled apart, so that steps of any length need these few."""


def calls(num_tiles: int) -> tuple[int, ...]:
    """The tiles of each call that a step is cut into; in the last one some may be idle."""
    full, rest = divmod(num_tiles, CALL_SIZES[-1])
    last = tuple(size for size in CALL_SIZES if size >= rest)[:1] if rest else ()
    return (CALL_SIZES[-1],) * full + last


def call_sizes(num_tiles: int) -> tuple[int, ...]:
    """Every size of call in steps of up to so many tiles."""
    return CALL_SIZES[: 1 + sum(size < num_tiles for size in CALL_SIZES)]


def bucket(number: int, least: int) -> int:
    """The next power of two: what room is rounded up to, so that few sizes are compiled."""
    return max(least, 1 << max(number - 1, 0).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLens:
    """Lengths of a step's requests, [B] int64 on the device."""

    new: torch.Tensor
    """New tokens."""
    cached: torch.Tensor
    """Tokens before them; -1 for a decoding request of length 0."""
    encoder: torch.Tensor
    """Encoder tokens, which come first in the request's row; 0 without an encoder."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> StepLens:
        """Raises InvalidInput for an extend step without its lengths."""
        if batch.forward_mode.is_decode():
            cached = batch.seq_lens.long() - 1
            new = torch.ones_like(cached)
        elif batch.extend_seq_lens is None or batch.extend_prefix_lens is None:
            raise InvalidInput(
                "extend_seq_lens", came=None, expected="new and cached lengths in an extend step"
            )
        else:
            new, cached = batch.extend_seq_lens.long(), batch.extend_prefix_lens.long()
        encoder = batch.encoder_lens
        return cls(
            new=new,
            cached=cached,
            encoder=torch.zeros_like(new) if encoder is None else encoder.long(),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tiles:
    """N tiles of up to `size` queries, each of one request. Tiles past the last have none.

    N follows from T and B alone, so that nothing here waits for the device.
    """

    size: int
    request: torch.Tensor
    """[N] int64: the tile's request; of an idle tile, the last one."""
    order: torch.Tensor
    """[N, size] int64: place of a query among the new tokens of its request."""
    is_real: torch.Tensor
    """[N, size] bool: whether there is such a query."""
    tokens: torch.Tensor
    """[N, size] int64: its row in q; any row where there is none."""
    places: torch.Tensor
    """[T] int64: where each row of q is among the N * size queries."""

    @property
    def count(self) -> int:
        return self.request.shape[0]


def most_tiles(num_tokens: int, batch_size: int, size: int) -> int:
    """That a step needs: each has a token, and all but one of a request's are full."""
    return min(num_tokens, num_tokens // size + batch_size)


def tile_count(num_tokens: int, batch_size: int, size: int) -> int:
    """N of a step, or the most of any shorter one."""
    return sum(calls(most_tiles(num_tokens, batch_size, size)))


def make_tiles(lens: StepLens, num_tokens: int, size: int) -> Tiles:
    """Cut `num_tokens` > 0 rows of q. Rows of no request get any place."""
    count, device = tile_count(num_tokens, lens.new.shape[0], size), lens.new.device
    first_token = cu_seqlens(lens.new.int()).long()
    first_tile = cu_seqlens(((lens.new + size - 1) // size).int()).long()
    tile = torch.arange(count, device=device)
    request = _segment(first_tile, tile)
    order = ((tile - first_tile[request]) * size).unsqueeze(1) + torch.arange(size, device=device)
    is_real = (order < lens.new[request].unsqueeze(1)) & (tile < first_tile[-1]).unsqueeze(1)
    tokens = (first_token[request].unsqueeze(1) + order).clamp_(max=num_tokens - 1)
    token = torch.arange(num_tokens, device=device)
    owner = _segment(first_token, token)
    in_request = token - first_token[owner]
    places = (first_tile[owner] * size + in_request).clamp_(max=count * size - 1)
    return Tiles(
        size=size, request=request, order=order, is_real=is_real, tokens=tokens, places=places
    )


def rows_of(q: torch.Tensor, tokens: torch.Tensor, size: int, num_kv_heads: int) -> torch.Tensor:
    """[T, Hq, D] as [N, Hkv, G * size, D]: heads of a group are rows, one query after another.

    tokens: [N * size], see `Tiles.tokens`.
    """
    head_dim = q.shape[-1]
    tiled = (
        q.detach()
        .index_select(0, tokens)
        .view(-1, size, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
    )
    return tiled.permute(0, 2, 3, 1, 4).reshape(tiled.shape[0], num_kv_heads, -1, head_dim)


def tokens_of(of_calls: Sequence[torch.Tensor], places: torch.Tensor, size: int) -> torch.Tensor:
    """[N, Hkv, G * size, n], the tiles of each call, as [T, Hq, n]."""
    rows = of_calls[0] if len(of_calls) == 1 else torch.cat(list(of_calls))
    count, num_kv_heads, of_tile, width = rows.shape
    tiled = rows.reshape(count, num_kv_heads, of_tile // size, size, width)
    tokens = tiled.permute(0, 3, 1, 2, 4).reshape(count * size, -1, width)
    return tokens.index_select(0, places)


def _segment(starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Which segment of [B + 1] starts each place lies in; past the end, the last one."""
    found = torch.searchsorted(starts[1:], places, right=True)
    return found.clamp_(max=starts.shape[0] - 2)
