"""The batch sizes that graphs are captured for."""

from __future__ import annotations

import pytest

from attnmux.core import GraphConfig, InvalidInput
from attnmux.core.graph.config import padded_size


def test_default_sizes() -> None:
    sizes = GraphConfig.sizes(pool_size=4096)
    assert sizes == (1, 2, 4, *range(8, 161, 8))
    assert len(sizes) == 23


def test_with_speculation_sizes_end_at_32() -> None:
    assert GraphConfig.sizes(pool_size=4096, speculation=True) == tuple(range(1, 33))


def test_a_full_pool_has_a_graph() -> None:
    assert GraphConfig.sizes(pool_size=50) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 49, 50)
    assert GraphConfig.sizes(pool_size=160) == GraphConfig.sizes(pool_size=4096)
    assert GraphConfig.sizes(pool_size=1) == (1,)
    assert GraphConfig.sizes(pool_size=2, speculation=True) == (1, 2)


def test_a_maximum_drops_what_exceeds_it() -> None:
    assert GraphConfig.sizes(pool_size=50, max_batch_size=30) == (1, 2, 4, 8, 16, 24)
    assert GraphConfig.sizes(pool_size=4096, max_batch_size=512)[-1] == 160


def test_a_users_list_wins() -> None:
    assert GraphConfig.sizes(pool_size=4096, chosen=[32, 3, 3], speculation=True) == (3, 32)
    assert GraphConfig.sizes(pool_size=4096, chosen=[200, 256]) == (200, 256)
    assert GraphConfig.sizes(pool_size=4096, chosen=[5, 200], max_batch_size=160) == (5,)
    assert GraphConfig.sizes(pool_size=10, chosen=[4, 64]) == (4, 9, 10)


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"pool_size": 0}, "pool_size"),
        ({"pool_size": 8, "chosen": []}, "chosen"),
        ({"pool_size": 8, "chosen": [0, 4]}, "chosen"),
        ({"pool_size": 8, "max_batch_size": 0}, "max_batch_size"),
        ({"pool_size": 8, "chosen": [4], "max_batch_size": 3}, "max_batch_size"),
    ],
)
def test_refuses(given: dict, argument: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        GraphConfig.sizes(**given)
    assert refused.value.argument == argument


def test_a_batch_replays_in_the_next_size() -> None:
    sizes = GraphConfig.sizes(pool_size=4096)
    assert [padded_size(count, sizes) for count in (1, 3, 5, 33, 160, 161)] == [
        1,
        4,
        8,
        40,
        160,
        None,
    ]
