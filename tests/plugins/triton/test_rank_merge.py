"""Results of several ranks, packed and merged in one launch each, as the plain operations do."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.distributed import merge_packed, pack

pytest.importorskip("triton")

from attnmux.triton.functions.rank_merge import RankMerger  # where there is a Triton


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "heads", "dim"), [(2, 3, 8), (4, 1, 80), (3, 2, 128), (2, 1, 6)])
def test_both_ways_agree(size: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    tokens = 5
    whole = torch.randn(tokens, size * heads + 1, dim + 4)[:, 1:, 2 : dim + 2].to(dtype)
    out = torch.randn_like(whole)
    lse = 3 * torch.randn(tokens, size * heads)
    lse[1] = -torch.inf
    out[1] = torch.nan
    merger = RankMerger()
    packed = merger.pack(out, lse, size)
    expected = pack(out, lse, size)
    assert torch.equal(packed.view(torch.uint8), expected.view(torch.uint8))
    # What a rank receives: the results of all ranks for its own heads
    received = torch.randn(size, tokens, heads, dim).to(dtype)
    lses = torch.where(torch.rand(size, tokens, heads) < 0.3, -torch.inf, 4 * torch.randn(1))
    lses[:, 2] = -torch.inf
    parts = torch.stack([pack(each, one, 1)[0] for each, one in zip(received, lses, strict=True)])
    parts[..., :dim] = torch.where(lses.unsqueeze(-1).isneginf(), torch.nan, parts[..., :dim])
    found, expected = merger.merge_packed(parts, dim), merge_packed(parts, dim)
    tolerance = dict.fromkeys(("rtol", "atol"), 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    torch.testing.assert_close(found[1], expected[1])
    assert not found[0][2].any()


def test_no_tokens() -> None:
    merger = RankMerger()
    packed = merger.pack(torch.zeros(0, 4, 8), torch.zeros(0, 4), 2)
    assert packed.shape == (2, 0, 2, 9)
    assert merger.merge_packed(packed, 8)[0].shape == (0, 2, 8)


def test_rows_that_are_no_whole_words_are_refused() -> None:
    out = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    assert not RankMerger().fits(out)
    with pytest.raises(InvalidInput, match="rows of whole float32 words"):
        RankMerger().pack(out, torch.zeros(1, 2), 2)
