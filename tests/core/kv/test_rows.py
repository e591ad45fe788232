"""Rows of a KV buffer, read and written in the dtype that it stores."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import KVPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("dim", [1, 3, 6, 16])
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_written_rows_are_read_again(dtype, dim, gap) -> None:
    """With rows and buffers that are parts of wider ones."""
    wide = torch.zeros(9, 2, dim + gap).to(dtype)
    buffer = wide[..., gap:]
    rows = torch.randn(4, gap + 2 * dim).to(dtype)[:, gap:].unflatten(1, (2, dim))
    slots = torch.tensor([7, 2, 0, 5])
    KVPool.scatter_rows(buffer, slots, rows)
    found = KVPool.gather_rows(buffer, slots)
    assert torch.equal(found.float(), rows.float())
    others = KVPool.gather_rows(buffer, torch.tensor([1, 3, 4, 6, 8]))
    assert not others.float().any()
    assert not wide[..., :gap].float().any()


def test_no_rows() -> None:
    buffer = torch.ones(3, 1, 4)
    KVPool.scatter_rows(buffer, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1, 4))
    assert bool((buffer == 1).all())
