"""The keys that a layer sees, read off its mask function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import CellType
from typing import NamedTuple

import torch

from attnmux.core import InvalidInput

MaskFunction = Callable[..., torch.Tensor]
"""A mask as in transformers: whether (batch, head, query position, key position) is visible."""


LONGEST_READ = 2**20
"""The most keys of a mask that are read: no window or chunk is longer, and a row stays small."""


NO_BLOCK = -1
"""Entry of a token that is in no block, in a mask's table of blocks: it sees no later token."""


class Reach(NamedTuple):
    """The keys that a causal layer sees, in the contract's terms."""

    sliding_window_size: int = -1
    attention_chunk_size: int = 0

    def sees(
        self, queries: torch.Tensor, keys: torch.Tensor, last: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Whether tokens at `queries` see keys; last: the last key that each may see, instead of
        its own. They are broadcast."""
        visible = keys <= (queries if last is None else last)
        if self.sliding_window_size >= 0:
            visible &= keys >= queries - self.sliding_window_size
        if self.attention_chunk_size:
            visible &= keys // self.attention_chunk_size == queries // self.attention_chunk_size
        return visible

    def edges(self) -> set[int]:
        """Queries around which its rows change shape."""
        first = {self.sliding_window_size, self.attention_chunk_size - 1}
        return first | {edge + 1 for edge in first} | {2 * edge + 2 for edge in first}


def read_reach(
    mask: MaskFunction, told: Reach, *, max_context_len: int, device: torch.device
) -> Reach:
    """The reach of `mask` for sequences of up to `max_context_len` tokens.

    `told` is the window that the attention function was passed. It is the answer if the mask
    agrees. Raises InvalidInput for a mask that the contract cannot express, and for one that
    contradicts `told`.
    """
    length = min(max_context_len, LONGEST_READ)
    _lengthen_tables(mask, length)
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
        if all(torch.equal(row, reach.sees(keys[query], keys)) for query, row in rows.items()):
            return reach
    raise InvalidInput(
        "mask_function",
        got=f"a mask in which token {length - 1} sees {int(rows[length - 1].sum())} keys, and "
        f"attention got {told}",
        expected="causal attention, with the window that attention gets, or chunks, at most",
    )


def _lengthen_tables(mask: object, length: int) -> None:
    """Let a mask that looks tokens up among the blocks of images be read beyond the probe's row.

    None of the probe's tokens is in a block, nor is one of those that follow.
    """
    if isinstance(mask, tuple):  # joined masks
        for row in mask:
            _lengthen_tables(row, length)
    cells: tuple[CellType, ...] = getattr(mask, "__closure__", None) or ()
    for cell in cells:
        held = cell.cell_contents
        if not isinstance(held, torch.Tensor):
            _lengthen_tables(held, length)
        elif held.dim() == 2 and held.shape[1] < length and bool((held == NO_BLOCK).all()):
            cell.cell_contents = held.new_full((held.shape[0], length), NO_BLOCK)


def _first_visible(mask: MaskFunction, keys: torch.Tensor, query: int) -> int:
    return int(_row(mask, keys, query).int().argmax())


def _row(mask: MaskFunction, keys: torch.Tensor, query: int) -> torch.Tensor:
    zero = torch.zeros_like(keys[:1])
    try:
        return mask(zero, zero, zero + query, keys).expand(keys.shape)
    except IndexError as error:
        raise InvalidInput(
            "mask_function",
            got="a mask that reads a table of the step's tokens",
            expected="causal attention, with a sliding window or chunks at most",
        ) from error


ROWS = 512
"""Rows of a mask that are read at a time."""


def read_spans(
    masks: Sequence[MaskFunction], reaches: Collection[Reach], length: int, device: torch.device
) -> list[tuple[int, int]] | None:
    """Begin and end of each part of `length` tokens that sees itself.

    None if a mask is anything but causal with one of the layers' reaches and these parts: a
    token then sees what its window holds of the tokens before it and of its part.
    """
    spans: list[tuple[int, int]] = []
    for mask in masks:
        spans = spans or _spans_of(mask, length, device)
    is_known = (
        any(_is_mask(mask, reach, spans, length, device) for reach in reaches) for mask in masks
    )
    return spans if all(is_known) else None


def _spans_of(mask: MaskFunction, length: int, device: torch.device) -> list[tuple[int, int]]:
    """By the last key that each token sees, from the first token of each part on."""
    keys = torch.arange(length, device=device)
    last = torch.cat(
        [
            length - 1 - _rows(mask, part, keys).flip(1).int().argmax(1)
            for part in torch.split(keys, ROWS)
        ]
    ).tolist()
    spans: list[tuple[int, int]] = []
    for token, reach in enumerate(last):
        if reach > token and (not spans or token >= spans[-1][1]):
            spans.append((token, reach + 1))
    return spans


def _is_mask(
    mask: MaskFunction,
    reach: Reach,
    spans: Sequence[tuple[int, int]],
    length: int,
    device: torch.device,
) -> bool:
    keys = torch.arange(length, device=device)
    last = keys.clone()
    for begin, end in spans:
        last[begin:end] = end - 1
    for queries in torch.split(keys, ROWS):
        expected = reach.sees(queries.unsqueeze(1), keys, last[queries].unsqueeze(1))
        if not torch.equal(_rows(mask, queries, keys), expected):
            return False
    return True


def _rows(mask: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    zero = keys.new_zeros((1, 1))
    return mask(zero, zero, queries.unsqueeze(1), keys.unsqueeze(0)).expand(len(queries), len(keys))
