"""Which rows the libraries can load where they are."""

from __future__ import annotations

import pytest
import torch

from attnmux.core.plugin import Rows

WIDE = torch.randn(7, 6, 9, 136).bfloat16()


@pytest.mark.parametrize(
    ("rows", "where_they_are"),
    [
        (WIDE[0, :, :, :128], True),
        (WIDE[0, :, ::2, 8:], True),
        (WIDE.view(7, -1)[:, :7344].view(7, 54, 136)[..., :64], True),
        (WIDE[0, :, :, 4:132], False),
        (WIDE.flatten()[: 6 * 9 * 129].view(6, 9, 129)[..., :128], False),
        (WIDE.flatten()[: 6 * 8 * 129].view(6, 8, 129)[..., :128], False),
        (WIDE.flatten()[: 6 * 1028].view(6, 1028)[:, :1024].view(6, 8, 128), False),
    ],
    ids=[
        "heads apart",
        "every other",
        "narrow",
        "begin",
        "heads",
        "heads of whole tokens",
        "tokens",
    ],
)
def test_rows_that_do_not_begin_at_16_bytes_are_copied(rows, where_they_are):
    assert Rows.is_aligned(rows) is where_they_are
    copy = Rows.aligned(rows)
    assert (copy is rows) is where_they_are
    assert Rows.is_aligned(copy)
    assert torch.equal(copy, rows)
