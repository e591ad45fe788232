"""Reading a mask function of transformers: which window or chunk it imposes.

Attention functions are told a layer's window at most, never its chunk; the whole truth is in the
mask that transformers would have built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from attnmux.core.errors import InvalidInput

MaskFunction = Callable[..., torch.Tensor]
"""transformers' own: (batch, head, query position, key position) to visible or not."""


LONGEST_READ = 2**20
"""Keys of a mask that are looked at: no window or chunk is longer, and a row stays small."""


class Reach(NamedTuple):
    """What a causal layer sees, in the contract's terms."""

    sliding_window_size: int = -1
    attention_chunk_size: int = 0

    def row(self, query: int, keys: torch.Tensor) -> torch.Tensor:
        """Which of the keys the token at `query` sees."""
        visible = keys <= query
        if self.sliding_window_size >= 0:
            visible &= keys >= query - self.sliding_window_size
        if self.attention_chunk_size:
            visible &= keys // self.attention_chunk_size == query // self.attention_chunk_size
        return visible

    def edges(self) -> set[int]:
        """Queries around which its rows change shape."""
        first = {self.sliding_window_size, self.attention_chunk_size - 1}
        return first | {edge + 1 for edge in first} | {2 * edge + 2 for edge in first}


def read_reach(
    mask: MaskFunction, told: Reach, *, max_context_len: int, device: torch.device
) -> Reach:
    """The reach that `mask` shows for sequences of up to `max_context_len` tokens.

    `told` is what the attention function was passed; it stands where the mask agrees with it.
    Raises InvalidInput where the mask is none that the contract can express, or where it
    contradicts a window that was passed.
    """
    length = min(max_context_len, LONGEST_READ)
    keys = torch.arange(length, device=device)
    candidates = [told]
    start = _first_visible(mask, keys, length - 1)
    if told == Reach() and start:
        candidates.append(Reach(sliding_window_size=length - 1 - start))
        chunk = start - _first_visible(mask, keys, start - 1)
        candidates.append(Reach(attention_chunk_size=chunk))
    queries = {0, start, length // 2, length - 1}
    queries = queries.union(*(reach.edges() for reach in candidates))
    rows = {query: _row(mask, keys, query) for query in queries if 0 <= query < length}
    for reach in candidates:
        if all(torch.equal(row, reach.row(query, keys)) for query, row in rows.items()):
            return reach
    raise InvalidInput(
        "mask_function",
        came=f"a mask in which token {length - 1} sees {int(rows[length - 1].sum())} keys, and "
        f"attention was told {told}",
        expected="causal attention, with the window that attention is told or chunks at most",
    )


def _first_visible(mask: MaskFunction, keys: torch.Tensor, query: int) -> int:
    return int(_row(mask, keys, query).int().argmax())


def _row(mask: MaskFunction, keys: torch.Tensor, query: int) -> torch.Tensor:
    zero = torch.zeros_like(keys[:1])
    return mask(zero, zero, zero + query, keys).expand(keys.shape)
