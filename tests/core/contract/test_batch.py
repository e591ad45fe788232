"""`ForwardBatch`: its modes, its number of tokens, and its slices."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from attnmux.core import ForwardBatch, ForwardMode, MultiItem, SpecInput


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def extend_batch(**changes: object) -> ForwardBatch:
    """Three requests with 2, 0 and 3 new tokens."""
    given = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 3,
        "req_pool_indices": torch.tensor([4, 2, 7]),
        "seq_lens": lens(6, 1, 3),
        "out_cache_loc": torch.arange(10, 15),
        "positions": torch.tensor([4, 5, 0, 1, 2]),
        "seq_lens_cpu": lens(6, 1, 3),
        "seq_lens_sum": 10,
        "extend_seq_lens": lens(2, 0, 3),
        "extend_seq_lens_cpu": lens(2, 0, 3),
        "extend_prefix_lens": lens(4, 1, 0),
        "extend_prefix_lens_cpu": lens(4, 1, 0),
        "extend_num_tokens": 5,
        "encoder_lens": lens(9, 8, 7),
        "encoder_out_cache_loc": torch.arange(3),
        "topk_indices": torch.arange(10, dtype=torch.int32).view(5, 2),
        "actual_forward_mode": ForwardMode.MIXED,
    }
    return ForwardBatch(**{**given, **changes})


def test_a_slice_has_the_requests_and_their_tokens() -> None:
    part = extend_batch().slice(1, 3, first_token=2, last_token=5)
    assert (part.batch_size, part.num_tokens, part.seq_lens_sum) == (2, 3, 4)
    assert part.req_pool_indices.tolist() == [2, 7]
    for field in ("seq_lens", "seq_lens_cpu"):
        assert getattr(part, field).tolist() == [1, 3]
    for field in ("extend_seq_lens", "extend_seq_lens_cpu"):
        assert getattr(part, field).tolist() == [0, 3]
    for field in ("extend_prefix_lens", "extend_prefix_lens_cpu"):
        assert getattr(part, field).tolist() == [1, 0]
    assert part.encoder_lens is not None
    assert part.encoder_lens.tolist() == [8, 7]
    assert part.out_cache_loc.tolist() == [12, 13, 14]
    assert part.positions.tolist() == [0, 1, 2]
    assert part.topk_indices is not None
    assert part.topk_indices.tolist() == [[4, 5], [6, 7], [8, 9]]


def test_a_slice_is_made_of_views() -> None:
    whole = extend_batch()
    part = whole.slice(0, 2, first_token=0, last_token=2)
    for field in fields(ForwardBatch):
        value, of_whole = getattr(part, field.name), getattr(whole, field.name)
        if isinstance(value, torch.Tensor):
            assert value.data_ptr() == of_whole.data_ptr(), field.name


def test_a_slice_keeps_what_belongs_to_the_whole_step() -> None:
    spec = SpecInput(draft_token_num=2)
    items = MultiItem(prefix_lens=lens(1, 1, 1), token_pos_in_items=lens(0, 1, 0, 1, 2))
    half = extend_batch()
    whole = extend_batch(spec_info=spec, multi_item=items, tbo_children=(half, half))
    part = whole.slice(0, 1, first_token=0, last_token=2)
    assert part.spec_info is spec
    assert part.multi_item is items
    assert part.encoder_out_cache_loc is whole.encoder_out_cache_loc
    assert part.forward_mode is ForwardMode.EXTEND
    assert part.actual_forward_mode is ForwardMode.MIXED
    assert part.tbo_children == ()


def test_a_slice_without_optional_fields() -> None:
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=2,
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=lens(5, 6),
        out_cache_loc=torch.tensor([3, 4]),
        positions=torch.tensor([4, 5]),
        seq_lens_sum=11,
    )
    part = batch.slice(1, 2, first_token=1, last_token=2)
    assert (part.batch_size, part.num_tokens) == (1, 1)
    assert part.seq_lens.tolist() == [6]
    # The sum is unknown without a synchronisation
    assert part.seq_lens_sum is None
    assert (part.extend_seq_lens, part.extend_num_tokens, part.topk_indices) == (None, None, None)


def test_an_empty_slice() -> None:
    part = extend_batch().slice(1, 1, first_token=2, last_token=2)
    assert (part.batch_size, part.num_tokens, part.seq_lens_sum) == (0, 0, 0)
    assert part.out_cache_loc.shape == (0,)


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_mode_is_an_extend_mode_or_decode_or_idle(mode: ForwardMode) -> None:
    assert mode.is_extend() != mode.is_decode_or_idle()
    assert mode.is_decode() == (mode is ForwardMode.DECODE)
