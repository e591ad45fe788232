"""A step's queries, cut into tiles: the batch dimension of the compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.indices import cu_seqlens

if TYPE_CHECKING:
    from attnmux.cpu.steps import StepLens


def least_tiles(size: int) -> int:
    """The smallest bucket of tiles: a step below it is so short that idle ones cost little."""
    return 8 if size == 1 else 16


def bucket(number: int, least: int) -> int:
    """The next power of two: what sizes are rounded up to, so that few are compiled."""
    return max(least, 1 << max(number - 1, 0).bit_length())


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


def tile_count(num_tokens: int, batch_size: int, size: int) -> int:
    """N of a step, or the most of any shorter one."""
    # A tile has a token at least, and each request may have one tile that is not full.
    return bucket(min(num_tokens, num_tokens // size + batch_size), least_tiles(size))


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


def _segment(starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Which segment of [B + 1] starts each place lies in; past the end, the last one."""
    found = torch.searchsorted(starts[1:], places, right=True)
    return found.clamp_(max=starts.shape[0] - 2)
