"""Parts of a prompt whose tokens see each other, read off transformers' mask functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from attnmux.transformers.model.reach import MaskFunction, Reach

ROWS = 512
"""Rows of a mask that are read at a time."""


def read_spans(
    masks: Sequence[MaskFunction], reaches: Collection[Reach], length: int, device: torch.device
) -> list[tuple[int, int]] | None:
    """Begin and end of each part of `length` tokens that sees itself.

    None where a mask is anything but causal with one of the layers' reaches and these parts: a
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
        token = queries.unsqueeze(1)
        expected = keys <= last[queries].unsqueeze(1)
        if reach.sliding_window_size >= 0:
            expected &= keys >= token - reach.sliding_window_size
        if reach.attention_chunk_size:
            size = reach.attention_chunk_size
            expected &= keys // size == token // size
        if not torch.equal(_rows(mask, queries, keys), expected):
            return False
    return True


def _rows(mask: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    zero = keys.new_zeros((1, 1))
    return mask(zero, zero, queries.unsqueeze(1), keys.unsqueeze(0)).expand(len(queries), len(keys))
