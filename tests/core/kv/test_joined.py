"""Several pools as one, where layers differ in heads, dims or KV dtype."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attnmux.core import InvalidInput, JoinedKVPool, MHATokenToKVPool


def pool(ids, heads=2, dim=8, v_dim=None, **changes):
    given = {"size": 16, "page_size": 4, "dtype": torch.float32, "device": "cpu", **changes}
    dims = {"num_kv_heads": heads, "head_dim": dim, "v_head_dim": v_dim}
    return MHATokenToKVPool(layer_ids=ids, **dims, **given)


def layer(number):
    return SimpleNamespace(layer_id=number)


def test_each_layer_is_written_and_read_in_its_own_shape():
    joined = JoinedKVPool([pool([0, 4]), pool([2], heads=1, dim=6, v_dim=3)])
    assert joined.layer_ids == (0, 2, 4)
    assert (joined.size, joined.page_size, joined.num_slots) == (16, 4, 20)
    loc = torch.tensor([5, 9])
    k, v = torch.randn(2, 1, 6), torch.randn(2, 1, 3)
    joined.set_kv_buffer(layer(2), loc, k, v)
    torch.testing.assert_close(joined.get_key_buffer(2)[loc], k)
    torch.testing.assert_close(joined.get_value_buffer(2)[loc], v)
    assert joined.get_key_buffer(4).shape == (20, 2, 8)
    assert joined.nbytes == 20 * 4 * (2 * 2 * 16 + 9)
    with pytest.raises(InvalidInput, match="shape"):
        joined.set_kv_buffer(layer(0), loc, k, v)
    with pytest.raises(InvalidInput, match="layer_id"):
        joined.get_key_buffer(1)


def test_slots_are_zeroed_and_moved_in_all_pools():
    joined = JoinedKVPool([pool([0]), pool([1], heads=1)])
    for number in joined.layer_ids:
        joined.get_key_buffer(number).fill_(number + 1.0)
    joined.zero(torch.tensor([6]))
    joined.move(torch.tensor([6]), torch.tensor([7]))
    for number in joined.layer_ids:
        held = joined.get_key_buffer(number)[:, 0, 0].tolist()
        assert held == [0.0 if slot in (6, 7) else number + 1.0 for slot in range(20)]


def test_layers_of_another_dtype_are_a_pool_of_their_own():
    """Each part reads, writes and scales as its own dtype does, in the same memory."""
    low = torch.float8_e4m3fn
    joined = JoinedKVPool([pool([0, 3], dtype=low), JoinedKVPool([pool([1]), pool([2], heads=1)])])
    assert joined.dtypes == {torch.float32, low}
    assert joined.nbytes == 20 * 16 * (2 * 2 + 2 * 4 + 4)
    loc, rows = torch.tensor([5]), torch.full((1, 2, 8), 0.3)
    for ids, dtype, scales in (([3], low, (0.5, 2.0)), ([1, 2], torch.float32, (1.0, 1.0))):
        part = joined.of_layers(ids)
        assert (part.dtype, part.dtypes, part.layer_ids) == (dtype, {dtype}, tuple(ids))
        assert part.read_scales(0.5, 2.0) == scales
        part.set_kv_buffer(layer(ids[0]), loc, rows, rows, 0.5, 2.0)
        for whole, own in zip(joined.memory(ids[0]), part.memory(ids[0]), strict=True):
            assert whole.data_ptr() == own.data_ptr()
        with pytest.raises(InvalidInput, match="layer_id"):
            part.get_key_buffer(0)
    stored = joined.get_key_buffer(3)[loc].float(), joined.get_key_buffer(1)[loc]
    torch.testing.assert_close(stored[0], torch.full_like(rows, 0.6).to(low).float())
    assert torch.equal(stored[1], rows)
    joined.zero()
    assert not joined.get_key_buffer(3).float().any()


def test_readers_of_several_dtypes_are_sent_to_the_parts():
    joined = JoinedKVPool([pool([0]), pool([1], dtype=torch.float8_e5m2)])
    with pytest.raises(InvalidInput, match="`of_layers` of one, got float32, float8_e5m2"):
        joined.read_scales(None, None)
    alike = JoinedKVPool([pool([0]), pool([1], heads=1)])
    assert alike.of_layers([1]) is alike
    single = pool([0, 1])
    assert single.of_layers([1]) is single


@pytest.mark.parametrize(
    ("other", "argument"),
    [
        (lambda: pool([1], page_size=2), "pools[1].page_size"),
        (lambda: pool([1], device="meta"), "pools[1].device"),
        (lambda: pool([1], size=8), "pools[1].size"),
        (lambda: pool([0]), "layer_ids"),
    ],
)
def test_pools_that_do_not_go_together(other, argument):
    with pytest.raises(InvalidInput) as caught:
        JoinedKVPool([pool([0]), other()])
    assert caught.value.argument == argument


def test_no_pools():
    with pytest.raises(InvalidInput, match="pools"):
        JoinedKVPool([])
