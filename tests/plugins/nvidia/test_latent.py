"""Which queries of MLA are put together, and which are one row as they come."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import LatentRows

ROWS = torch.randn(5, 4, 576).bfloat16()


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_parts_of_a_row_are_not_copied(tokens):
    rows = ROWS[:tokens]
    made = LatentRows.joined(rows[..., :512], rows[..., 512:])
    assert torch.equal(made, rows)
    assert made.is_contiguous()
    assert not tokens or made.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    ("q", "q_rope"),
    [
        (ROWS[..., :512].contiguous(), ROWS[..., 512:]),
        (ROWS[..., :512], ROWS[..., 512:].contiguous()),
        (ROWS[:3, :, :512], ROWS[2:, :, 512:]),
        (ROWS[..., 64:], ROWS[..., :64]),
        (ROWS[:, :3, :512], ROWS[:, :3, 512:]),
        (ROWS[::2, :, :512], ROWS[::2, :, 512:]),
        (ROWS.flatten()[4:-2300].view(4, 4, 576)[..., :512],) * 2,
    ],
    ids=["apart", "rope apart", "other rows", "swapped", "some heads", "every other", "twice"],
)
def test_other_parts_are(q, q_rope):
    q_rope = q_rope[..., :64]
    made = LatentRows.joined(q, q_rope)
    assert torch.equal(made, torch.cat([q, q_rope], dim=-1))
    assert made.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


def test_rows_that_no_kernel_can_load_are():
    rows = torch.randn(2 * 4 * 576 + 8).bfloat16()[4:-4].view(2, 4, 576)
    made = LatentRows.joined(rows[..., :512], rows[..., 512:])
    assert torch.equal(made, rows)
    assert made.data_ptr() % 16 == 0


def test_a_missing_part():
    with pytest.raises(InvalidInput, match="q_rope"):
        LatentRows.joined(ROWS[..., :512], None)
