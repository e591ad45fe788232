"""NVFP4: the bits that a pool stores, and what they are read as."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from attnmux.core import (
    InvalidInput,
    JoinedKVPool,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    foreign_pool,
)
from attnmux.core.contract.dtypes import BLOCK, FP4_DTYPE
from attnmux.core.contract.quantise import MAGNITUDES, pack_rows
from attnmux.parts import DraftKeys
from attnmux.testing.bench.shapes import value_bytes
from attnmux.testing.reference.wide_rows import wide_rows

E4M3 = sorted({float(v) for v in torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)})


def nearest(number: Fraction, grid: list[float]) -> float:
    """Of two as near, the one at an even place: grids begin with 0 and have all codes."""
    places = range(len(grid))
    best = min(places, key=lambda at: (abs(number - Fraction(grid[at])), at % 2))
    return grid[best]


def expected(block: list[float]) -> tuple[float, list[float]]:
    """The scale and the values of a block, by fractions."""
    # The one quotient that the recipe rounds to float32
    most = torch.tensor(max(map(abs, block)), dtype=torch.float32) / 6
    scale = nearest(Fraction(float(most)), E4M3)
    if not scale:
        return scale, [0.0] * len(block)
    sizes = [nearest(Fraction(abs(x)) / Fraction(scale), list(MAGNITUDES)) for x in block]
    return scale, [-size if x < 0 else size for x, size in zip(block, sizes, strict=True)]


def pool(**changes: object) -> MHATokenToKVPool:
    given = {"size": 32, "page_size": 4, "dtype": FP4_DTYPE, "layer_ids": [5], "num_kv_heads": 2}
    given |= {"head_dim": 80, "v_head_dim": 32, "device": "cpu"}
    return MHATokenToKVPool(**(given | changes))


class Layer:
    layer_id = 5


class Wider:
    layer_id = 6


def written(made, layer, loc, width):
    """What slots loc are to be read as."""
    k, v = torch.randn(len(loc), 2, width), torch.randn(len(loc), 2, 32)
    made.set_kv_buffer(layer, loc, k, v)
    return [KVPool.unpack_rows(*pack_rows(rows)) for rows in (k, v)]


def read(made, layer, slots):
    return wide_rows(made, layer.layer_id, made.translate(slots, layer.layer_id))


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_values_are_the_nearest_to_their_scaled_numbers(spread):
    rows = torch.randn(40, 3 * BLOCK) * torch.exp(spread * torch.randn(40, 3 * BLOCK))
    rows[:8] = torch.randint(-24, 25, (8, 3 * BLOCK)) * 0.25  # halfway, often
    rows = rows.bfloat16()
    values, scales = pack_rows(rows)
    assert values.dtype == FP4_DTYPE
    assert values.shape == (40, 3 * BLOCK // 2)
    assert scales.shape == (40, 3)
    found = KVPool.unpack_rows(values, scales).unflatten(-1, (-1, BLOCK))
    for row in range(40):
        for block in range(3):
            numbers = rows[row].float().view(3, BLOCK)[block].tolist()
            scale, sizes = expected(numbers)
            assert float(scales[row, block]) == scale
            assert found[row, block].tolist() == [scale * size for size in sizes]


def test_the_first_of_two_values_is_in_the_lower_bits():
    rows = torch.zeros(1, BLOCK)
    rows[0, :4] = torch.tensor([6.0, -0.5, 1.5, -6.0])
    values, scales = pack_rows(rows)
    assert float(scales) == 1
    assert values.view(torch.uint8)[0, :2].tolist() == [0x97, 0xF3]


def test_the_layers_scale_divides_first():
    rows = torch.randn(5, 2 * BLOCK)
    found, wanted = pack_rows(rows, 0.3), pack_rows(rows / 0.3)
    for part, other in zip(found, wanted, strict=True):
        assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))


def test_nan_stays_in_its_block_and_infinities_saturate():
    rows = torch.ones(1, 3 * BLOCK)
    rows[0, 3], rows[0, BLOCK + 1] = torch.nan, -torch.inf
    found = KVPool.unpack_rows(*pack_rows(rows))[0]
    assert bool(found[:BLOCK].isnan().all())
    assert float(found[BLOCK + 1]) == -6 * 448
    assert found[2 * BLOCK :].tolist() == pytest.approx([1] * BLOCK, rel=0.07)


def test_blocks_too_small_for_a_scale_are_zero():
    values, scales = pack_rows(torch.full((1, BLOCK), -1e-9))
    assert not values.view(torch.uint8).any()
    assert not scales.view(torch.uint8).any()


def test_a_pool_stores_packed_rows_and_moves_them():
    made = pool()
    k, v = torch.randn(3, 2, 80), torch.randn(3, 2, 32)
    loc, target = torch.tensor([7, 30, 12]), torch.tensor([12, 9, 20])
    made.set_kv_buffer(Layer(), loc, k, v, 0.5, 2.0)
    assert made.read_scales(0.5, 2.0) == (0.5, 2.0)
    for slots in (loc, target):
        found = wide_rows(made, 5, slots)
        for rows, scale, wide in zip((k, v), (0.5, 2.0), found, strict=True):
            assert torch.equal(wide, KVPool.unpack_rows(*pack_rows(rows, scale)))
        made.move(loc, target)
    made.zero(target)
    assert not any(bool(each.view(torch.uint8)[target].any()) for each in made.memory(5))


@pytest.mark.parametrize("kind", [JoinedKVPool, SWAKVPool])
def test_pools_of_several_write_move_and_zero_the_scales_of_each(kind):
    both = pool(), pool(layer_ids=[6], head_dim=48)
    made = JoinedKVPool(both) if kind is JoinedKVPool else SWAKVPool(full=both[0], swa=both[1])
    if kind is SWAKVPool:
        made.pair(torch.tensor([1, 2, 3]), torch.tensor([3, 1, 2]))
    loc, target = torch.tensor([6, 9]), torch.tensor([9, 13])
    for layer, width in ((Layer(), 80), (Wider(), 48)):
        wanted = written(made, layer, loc, width)
        assert all(map(torch.equal, read(made, layer, loc), wanted))
        made.move(loc, target)
        assert all(map(torch.equal, read(made, layer, target), wanted))
    made.zero(target)
    assert not any(
        bool(rows.any()) for each in (Layer(), Wider()) for rows in read(made, each, target)
    )


def test_readers_of_whole_values_refuse_the_pool():
    made = pool()
    with pytest.raises(InvalidInput, match="trees of drafts on a backend without masks"):
        DraftKeys.of(made, Layer(), torch.tensor([4]))
    with pytest.raises(InvalidInput, match="the memory of an engine"):
        foreign_pool({5: made.get_kv_buffer(5)}, page_size=4)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 36), (80, 48), (128, 72), (256, 144)])
def test_a_token_takes_its_values_and_whole_words_of_scales(head_dim, width):
    made = pool(head_dim=head_dim, v_head_dim=head_dim)
    shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": head_dim}
    token = MHATokenToKVPool.bytes_per_token(dtype=FP4_DTYPE, **shape)
    assert token == 2 * 2 * width
    assert made.nbytes == made.num_slots * token
    scales = made.get_scale_buffers(5)
    assert scales is not None
    assert all(each.stride()[-1] == 1 and each.stride(1) % 4 == 0 for each in scales)
    assert value_bytes(FP4_DTYPE) == 0.5625


def test_heads_that_no_blocks_divide_are_refused():
    with pytest.raises(InvalidInput, match="head_dim: expected a multiple of 16"):
        pool(head_dim=72)
    with pytest.raises(InvalidInput, match="v_head_dim"):
        pool(v_head_dim=40)


def test_latents_are_refused():
    with pytest.raises(InvalidInput, match="no 4-bit floats for MLA's latents"):
        MLATokenToKVPool(
            size=32, page_size=4, dtype=FP4_DTYPE, layer_ids=[0], kv_lora_rank=64,
            qk_rope_head_dim=16, device="cpu",
        )  # fmt: skip
