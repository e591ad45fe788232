from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput, PoolExhausted, ReqToTokenPool


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.fixture
def pool() -> ReqToTokenPool:
    return ReqToTokenPool(4, 10, "cpu")


def test_row_0_is_padding(pool):
    assert pool.req_to_token.shape == (5, 10)
    assert pool.req_to_token.dtype == torch.int32
    assert not pool.req_to_token.any()
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]


def test_exhaustion_changes_nothing(pool):
    rows = pool.alloc(3)
    with pytest.raises(PoolExhausted, match="2 wanted, 1 available"):
        pool.alloc(2)
    assert pool.available_size() == 1
    pool.free(rows)
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]


@pytest.mark.parametrize("rows", [[0], [5], [-1], [2, 2], [2, 3], [2, 0]])
def test_a_free_that_is_refused_changes_nothing(pool, rows):
    assert pool.alloc(2) == [1, 2]
    with pytest.raises(InvalidInput) as caught:
        pool.free(rows)
    assert caught.value.argument == "rows"
    assert pool.available_size() == 2
    pool.free([2, 1])
    assert pool.available_size() == 4


def test_double_free(pool):
    rows = pool.alloc(2)
    pool.free(rows)
    with pytest.raises(InvalidInput, match="rows in use"):
        pool.free(rows[:1])
    assert pool.available_size() == 4


def test_clear(pool):
    pool.alloc(4)
    pool.clear()
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]


def test_write_extend(pool):
    pool.write(ints(3, 1, 2), ints(0, 4, 5), ints(2, 0, 3), ints(11, 12, 21, 22, 23))
    expected = torch.zeros((5, 10), dtype=torch.int32)
    expected[3, :2] = ints(11, 12).int()
    expected[2, 5:8] = ints(21, 22, 23).int()
    assert torch.equal(pool.req_to_token, expected)


def test_write_decode(pool):
    pool.write(ints(4, 2), ints(9, 0).int(), None, ints(7, 8))
    assert pool.req_to_token[4, 9] == 7
    assert pool.req_to_token[2, 0] == 8
    assert pool.req_to_token.count_nonzero() == 2


def test_write_nothing(pool):
    pool.write(ints().long(), ints().long(), None, ints().long())
    assert not pool.req_to_token.any()


@pytest.mark.parametrize(
    ("argument", "rows", "starts", "lens", "slots"),
    [
        ("lens", ints(1, 2), ints(0, 0), ints(2, 2), ints(1, 2, 3)),
        ("lens", ints(1, 2), ints(0, 0), ints(-1, 2), ints(1)),
        ("lens", ints(1, 2), ints(0, 0), None, ints(1)),
        ("lens", ints(1, 2), ints(0, 0), ints(1), ints(1)),
        ("starts", ints(1, 2), ints(0), ints(1, 1), ints(1, 2)),
        ("starts", ints(1), ints(9), ints(2), ints(1, 2)),
        ("starts", ints(1), ints(-1), ints(2), ints(1, 2)),
        ("req_pool_indices", ints(0), ints(0), ints(1), ints(1)),
        ("req_pool_indices", ints(5), ints(0), ints(1), ints(1)),
        ("req_pool_indices", ints(1).int(), ints(0), ints(1), ints(1)),
        ("req_pool_indices", ints(1, 2).view(2, 1), ints(0, 0), None, ints(1, 2)),
        ("starts", ints(1, 2), ints(0, 0).view(1, 2), None, ints(1, 2)),
        ("lens", ints(1), ints(0), ints(1).bool(), ints(1)),
        ("slots", ints(1), ints(0), ints(1), ints(1).float()),
        ("slots", ints(1), ints(0), ints(2), ints(1, 2).view(1, 2)),
    ],
)
def test_a_write_that_is_refused_changes_nothing(pool, argument, rows, starts, lens, slots):
    with pytest.raises(InvalidInput) as caught:
        pool.write(rows, starts, lens, slots)
    assert caught.value.argument == argument
    assert not pool.req_to_token.any()


@pytest.mark.parametrize(("size", "context"), [(0, 10), (4, 0), (-1, 10)])
def test_impossible_sizes(size, context):
    with pytest.raises(InvalidInput):
        ReqToTokenPool(size, context, "cpu")


def test_a_negative_number_of_requests(pool):
    with pytest.raises(InvalidInput):
        pool.alloc(-1)
    assert pool.available_size() == 4


def test_no_memory():
    with pytest.raises(PoolExhausted, match="lower the number of requests or the context"):
        ReqToTokenPool(10**9, 10**6, "cpu")
