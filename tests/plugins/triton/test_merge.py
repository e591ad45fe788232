from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import InvalidInput

pytest.importorskip("triton")

from attnmux.triton.merge import merge_state  # where there is a Triton

EMPTY = -torch.inf


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D] over k [N, H, D] and v [N, H, Dv], in float64; N may be 0."""
    logits = torch.einsum("thd,nhd->thn", q.double(), k.double())
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.einsum("thn,nhd->thd", weights, v.double()), lse


def formula(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor]:
    lse_a, lse_b = lse_a.double(), lse_b.double()
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - lse).exp().nan_to_num(0.0) for part in (lse_a, lse_b))
    return share_a.unsqueeze(-1) * out_a + share_b.unsqueeze(-1) * out_b, lse


def parts(tokens: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> list:
    """out and LSE of two parts: here and there one of them or both have no keys."""
    made = []
    for _ in range(2):
        has_keys = torch.rand(tokens, heads) < 0.7
        out = torch.randn(tokens, heads, width) * has_keys.unsqueeze(-1)
        made += [out.to(dtype), torch.where(has_keys, 20 * torch.randn(tokens, heads), EMPTY)]
    return made


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
def test_is_attention_over_the_union(tokens, heads, keys_a, keys_b):
    q = 3 * torch.randn(tokens, heads, 8)
    k, v = 3 * torch.randn(keys_a + keys_b, heads, 8), torch.randn(keys_a + keys_b, heads, 5)
    out_a, lse_a = attend(q, k[:keys_a], v[:keys_a])
    out_b, lse_b = attend(q, k[keys_a:], v[keys_a:])
    out, lse = merge_state(out_a.float(), lse_a.float(), out_b.float(), lse_b.float())
    expected, expected_lse = attend(q, k, v)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "heads", "width"),
    [(1, 1, 1), (3, 96, 16), (7, 5, 80), (2, 3, 576), (5, 128, 2), (2, 2, 1100)],
)
def test_any_shape(tokens, heads, width):
    given_parts = parts(tokens, heads, width)
    out, lse = merge_state(*given_parts)
    expected, expected_lse = formula(*given_parts)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    given_parts = parts(5, 4, 48, dtype)
    out, lse = merge_state(*given_parts)
    expected, expected_lse = formula(*given_parts)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_one_side_alone_is_that_side_bit_for_bit():
    out_a, lse_a, out_b, _ = parts(4, 3, 24)
    lse_a = lse_a.nan_to_num(neginf=1.5)
    none = torch.full_like(lse_a, EMPTY)
    for out, lse in (
        merge_state(out_a, lse_a, out_b, none),
        merge_state(out_b, none, out_a, lse_a),
    ):
        assert torch.equal(out, out_a)
        assert torch.equal(lse, lse_a)


def test_no_keys_on_either_side():
    """The memory of unused parts does not matter."""
    junk, none = torch.full((3, 2, 6), torch.nan), torch.full((3, 2), EMPTY)
    out, lse = merge_state(junk, none, junk, none)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, none)


def test_a_side_without_keys_is_not_read():
    out_a, lse_a = torch.randn(3, 2, 6), torch.randn(3, 2)
    out, lse = merge_state(torch.full_like(out_a, torch.nan), lse_a - torch.inf, out_a, lse_a)
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a)


def test_what_is_no_number_stays_visible():
    out_a, lse_a, out_b, lse_b = parts(2, 2, 4)
    lse_a[0, 1] = lse_b[1, 0] = torch.nan
    lse_b[0, 1] = lse_a[1, 0] = EMPTY
    out, lse = merge_state(out_a, lse_a, out_b, lse_b)
    is_nan = torch.tensor([[False, True], [True, False]])
    assert torch.equal(lse.isnan(), is_nan)
    assert torch.equal(out.isnan(), is_nan.unsqueeze(-1).expand_as(out))


def test_far_apart_is_no_overflow():
    out_a, _, out_b, _ = parts(2, 2, 4)
    lse_a, lse_b = torch.full((2, 2), 3e4), torch.full((2, 2), -3e4)
    out, lse = merge_state(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a)


def test_any_strides():
    given_parts = parts(6, 4, 10)
    expected, expected_lse = merge_state(*given_parts)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        """The same values: heads outside of tokens, and nothing side by side."""
        tokens, heads, *rest = tensor.shape
        room = torch.full([2 * size for size in (heads, tokens, *rest)], torch.nan)
        view = room[tuple(slice(None, None, 2) for _ in tensor.shape)].transpose(0, 1)
        return view.copy_(tensor)

    out, lse = spread(torch.zeros(6, 4, 10)), spread(torch.zeros(6, 4))
    result = merge_state(*map(spread, given_parts), out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    for tensor in (out, lse):
        base = tensor._base
        assert base is not None
        assert int(base.isnan().sum()) == base.numel() - tensor.numel()


def test_in_place():
    given_parts = parts(4, 3, 700)
    expected, expected_lse = merge_state(*given_parts)
    out_a, lse_a, out_b, lse_b = given_parts
    merge_state(out_a, lse_a, out_b, lse_b, out=out_b, lse=lse_b)
    assert torch.equal(out_b, expected)
    assert torch.equal(lse_b, expected_lse)


def test_parts_in_float32_to_a_result_in_half_precision():
    given_parts = parts(4, 3, 8)
    out, _ = merge_state(*given_parts, out=torch.empty(4, 3, 8, dtype=torch.float16))
    torch.testing.assert_close(out.double(), formula(*given_parts)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_nothing_to_merge(shape):
    out, lse = merge_state(*parts(*shape))
    assert out.shape == shape
    assert lse.shape == shape[:2]


def test_without_columns_there_is_an_lse():
    given_parts = parts(3, 4, 0)
    torch.testing.assert_close(
        merge_state(*given_parts)[1].double(), formula(*given_parts)[1], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("out_a", {"out_a": torch.zeros(3, 8)}),
        ("out_a", {"out_a": torch.zeros(3, 2, 4, dtype=torch.float64)}),
        ("out_b", {"out_b": torch.zeros(2, 2, 4)}),
        ("out_b", {"out_b": torch.zeros(3, 2, 4, device="meta")}),
        ("lse_a", {"lse_a": torch.zeros(3, 2, dtype=torch.bfloat16)}),
        ("lse_b", {"lse_b": torch.zeros(2, 3)}),
        ("out", {"out": torch.zeros(3, 2, 5)}),
        ("out", {"out": torch.zeros(3, 2, 4, dtype=torch.int32)}),
        ("lse", {"lse": torch.zeros(3)}),
    ],
)
def test_refused(argument, change):
    arguments = {
        "out_a": torch.ones(3, 2, 4),
        "lse_a": torch.zeros(3, 2),
        "out_b": torch.ones(3, 2, 4),
        "lse_b": torch.zeros(3, 2),
        "out": torch.full((3, 2, 4), 9.0),
        "lse": torch.full((3, 2), 9.0),
    }
    kept = {name: arguments[name] for name in ("out", "lse") if name not in change}
    with pytest.raises(InvalidInput) as caught:
        merge_state(**{**arguments, **change})
    assert caught.value.argument == argument
    assert all(bool((tensor == 9.0).all()) for tensor in kept.values())
