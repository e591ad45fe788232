"""Several pools as one, where layers differ in heads or dims."""

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


@pytest.mark.parametrize(
    ("other", "argument"),
    [
        (lambda: pool([1], page_size=2), "pools[1].page_size"),
        (lambda: pool([1], dtype=torch.float16), "pools[1].dtype"),
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
