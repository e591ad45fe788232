"""The slots of an indexer's picks, and the rows of a step's tokens."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import token_rows, topk_slots


def test_rows_of_tokens() -> None:
    new = torch.tensor([2, 0, 3], dtype=torch.int32)
    rows = token_rows(torch.tensor([7, 5, 9]), new, 7)
    assert rows.tolist() == [7, 7, 9, 9, 9, 0, 0]
    with pytest.raises(InvalidInput, match="extend_seq_lens"):
        token_rows(torch.tensor([7, 5]), new, 7)


def test_slots_of_picks() -> None:
    table = torch.randint(1, 99, (4, 10), dtype=torch.int32)
    picks = torch.tensor([[9, -1, 0], [-1, -1, -1], [4, 5, 6]], dtype=torch.int32)
    slots = topk_slots(table, torch.tensor([3, 0, 1]), picks)
    assert slots.dtype == torch.int32
    assert slots.tolist() == [
        [int(table[3, 9]), -1, int(table[3, 0])],
        [-1, -1, -1],
        table[1, 4:7].tolist(),
    ]
    with pytest.raises(InvalidInput, match=r"topk_indices: expected torch.int32 of shape \(2, top"):
        topk_slots(table, torch.tensor([3, 0]), picks)
    with pytest.raises(InvalidInput, match="topk_indices"):
        topk_slots(table, torch.tensor([3, 0, 1]), picks.long())
