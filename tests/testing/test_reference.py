"""The oracle against other formulations and against numbers worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput, LayerSpec, MultiItem, SpecInput
from attnmux.testing.reference import attention, dense_attention
from attnmux.testing.reference.dense import visibility

NUM_SLOTS = 64


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(**changes: object) -> LayerSpec:
    fields = {
        "layer_id": 0,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "qk_head_dim": 8,
        "v_head_dim": 6,
        "scaling": 0.4,
    }
    return LayerSpec(**{**fields, **changes})


def pool_of(k: torch.Tensor, v: torch.Tensor | None = None) -> SimpleNamespace:
    """A pool that stores values as they are."""
    return SimpleNamespace(
        get_kv_buffer=lambda _: (k, k if v is None else v),
        get_scale_buffers=lambda _: None,
        read_scales=lambda k_scale, v_scale: (1.0, 1.0),
        translate=lambda slots, layer_id: slots,
    )


def batch(mode: ForwardMode, lens: list[int], new: list[int], **fields: object) -> ForwardBatch:
    """Requests in rows 1, 2, … of the request table; `lens` counts the new tokens."""
    new_lens = torch.tensor(new, dtype=torch.int32)
    cached = torch.tensor(lens, dtype=torch.int32) - new_lens
    is_extend = mode.is_extend()
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(lens),
        req_pool_indices=torch.arange(1, len(lens) + 1),
        seq_lens=cached if mode.is_target_verify() else cached + new_lens,
        out_cache_loc=torch.zeros(sum(new), dtype=torch.int64),
        positions=torch.zeros(sum(new), dtype=torch.int64),
        extend_seq_lens=new_lens if is_extend else None,
        extend_prefix_lens=cached if is_extend else None,
        extend_num_tokens=sum(new) if is_extend else None,
        **fields,
    )


def scattered_table(num_requests: int, seed: int = 0) -> torch.Tensor:
    slots = torch.randperm(NUM_SLOTS - 1, generator=torch.Generator().manual_seed(seed)) + 1
    width = (NUM_SLOTS - 1) // num_requests
    rows = slots[: num_requests * width].view(num_requests, width).int()
    return torch.cat([torch.zeros(1, width, dtype=torch.int32), rows])


@settings(max_examples=40, deadline=None)
@given(
    num_new=st.integers(0, 7),
    num_cached=st.integers(0, 9),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.integers(1, 4),
    window=st.sampled_from([-1, 0, 1, 5]),
    chunk=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 1000),
)
def test_agrees_with_sdpa(num_new, num_cached, kv_heads, group, window, chunk, seed) -> None:
    q = random(num_new, kv_heads * group, 8, seed=seed)
    k = random(num_cached + num_new, kv_heads, 8, seed=seed + 1)
    v = random(num_cached + num_new, kv_heads, 6, seed=seed + 2)
    keep = torch.zeros(num_new, len(k), dtype=torch.bool)
    for row in range(num_new):
        i = num_cached + row
        for j in range(len(k)):
            in_window = window < 0 or i - j <= window
            in_chunk = not chunk or i // chunk == j // chunk
            keep[row, j] = j <= i and in_window and in_chunk
    positions = torch.arange(num_cached, num_cached + num_new)
    assert torch.equal(visibility(positions, len(k), window=window, chunk=chunk), keep)

    out, lse = dense_attention(q, k, v, keep, scaling=0.3)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=keep, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
    assert lse.shape == (num_new, kv_heads * group)


@settings(max_examples=30, deadline=None)
@given(
    split=st.integers(0, 12),
    cap=st.sampled_from([0.0, 1.5]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_parts_merge_to_the_union(split, cap, with_sinks, seed) -> None:
    """The identity that LSE exists for; sinks belong to one of the parts."""
    q, k = random(3, 4, 8, seed=seed), random(12, 2, 8, seed=seed + 1)
    v = random(12, 2, 6, seed=seed + 2)
    sinks = random(4, seed=seed + 3) if with_sinks else None
    keep = torch.rand(3, 12, generator=torch.Generator().manual_seed(seed)) < 0.6
    whole, whole_lse = dense_attention(q, k, v, keep, scaling=0.5, logit_cap=cap, sinks=sinks)
    first, a = dense_attention(
        q, k[:split], v[:split], keep[:, :split], scaling=0.5, logit_cap=cap, sinks=sinks
    )
    second, b = dense_attention(
        q, k[split:], v[split:], keep[:, split:], scaling=0.5, logit_cap=cap
    )
    lse = torch.logaddexp(a, b)
    torch.testing.assert_close(whole_lse, lse)
    weight_a = torch.where(a == -torch.inf, 0, torch.exp(a - lse)).unsqueeze(-1)
    weight_b = torch.where(b == -torch.inf, 0, torch.exp(b - lse)).unsqueeze(-1)
    torch.testing.assert_close(whole, weight_a * first + weight_b * second)


def one_head(logits: list[float], values: list[float], **given: object):
    """Attention of one row and one head whose logits are given; scaling 1."""
    q = torch.ones(1, 1, 1)
    k = torch.tensor(logits).view(-1, 1, 1)
    v = torch.tensor(values).view(-1, 1, 1)
    keep = given.pop("keep", torch.ones(1, len(logits), dtype=torch.bool))
    out, lse = dense_attention(q, k, v, keep, scaling=1.0, **given)
    return float(out), float(lse)


def test_softmax_by_hand() -> None:
    out, lse = one_head([0.0, math.log(3)], [8.0, 4.0])
    assert out == pytest.approx((1 * 8 + 3 * 4) / 4)
    assert lse == pytest.approx(math.log(4))


def test_sink_takes_weight_and_has_no_value() -> None:
    out, lse = one_head([0.0, math.log(3)], [8.0, 4.0], sinks=torch.tensor([math.log(4)]))
    assert out == pytest.approx((1 * 8 + 3 * 4) / 8)
    assert lse == pytest.approx(math.log(8))


def test_cap_bounds_logits_after_scaling() -> None:
    first = 2 * math.tanh(5 / 2)
    second = 2 * math.tanh(-1 / 2)
    out, lse = one_head([5.0, -1.0], [1.0, 0.0], logit_cap=2.0)
    assert lse == pytest.approx(math.log(math.exp(first) + math.exp(second)))
    assert out == pytest.approx(math.exp(first - lse))


@pytest.mark.parametrize("num_keys", [0, 2])
def test_a_row_without_keys(num_keys: int) -> None:
    nothing = torch.zeros(1, num_keys, dtype=torch.bool)
    logits, values = [1.0] * num_keys, [1.0] * num_keys
    assert one_head(logits, values, keep=nothing) == (0.0, -math.inf)
    sinks = torch.tensor([0.25])
    assert one_head(logits, values, keep=nothing, sinks=sinks) == (0.0, 0.25)


def visible(position: int, num_keys: int, **given: object) -> list[int]:
    keep = visibility(torch.tensor([position]), num_keys, **given)
    return keep[0].nonzero().flatten().tolist()


def test_visibility_by_hand() -> None:
    assert visible(5, 8) == [0, 1, 2, 3, 4, 5]
    assert visible(5, 8, window=2) == [3, 4, 5]
    assert visible(5, 8, window=0) == [5]
    assert visible(5, 8, chunk=4) == [4, 5]
    assert visible(7, 8, chunk=4, window=2) == [5, 6, 7]


def test_a_custom_mask_replaces_causality_only() -> None:
    mask = torch.tensor([True, True, False, True, True, False, True, True])
    assert visible(5, 8, custom_mask=mask) == [0, 1, 3, 4, 6, 7]
    assert visible(5, 8, custom_mask=mask, window=2) == [3, 4, 6, 7]
    assert visible(5, 8, custom_mask=mask, chunk=4) == [4, 6, 7]


def test_items_see_the_prefix_and_themselves() -> None:
    """A prefix of 3, then items of 2 and 3 tokens: p p p a a b b b."""
    starts = torch.tensor([3, 3, 5, 5, 5])
    keep = visibility(torch.arange(3, 8), 8, item_starts=starts, shared_prefix=3)
    seen = [row.nonzero().flatten().tolist() for row in keep]
    assert seen == [
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5],
        [0, 1, 2, 5, 6],
        [0, 1, 2, 5, 6, 7],
    ]


def sdpa(q, k, v, keep, scale=0.4) -> torch.Tensor:
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, attn_mask=keep, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_extend_reads_the_pool_through_the_table(requests, seed) -> None:
    lens = [cached + new for cached, new in requests]
    new = [new for _, new in requests]
    k, v = random(NUM_SLOTS, 2, 8, seed=seed), random(NUM_SLOTS, 2, 6, seed=seed + 1)
    q = random(sum(new), 4, 8, seed=seed + 2)
    table = scattered_table(len(requests), seed)
    step = batch(ForwardMode.EXTEND, lens, new)
    out, _ = attention(q, layer(), step, table, pool_of(k, v))
    first = 0
    for row, (cached, count) in enumerate(requests, start=1):
        slots = table[row, : cached + count].long()
        keep = torch.ones(count, cached + count, dtype=torch.bool).tril(cached)
        expected = sdpa(q[first : first + count], k[slots], v[slots], keep)
        torch.testing.assert_close(out[first : first + count], expected)
        first += count


def test_decode_counts_the_new_token_and_allows_no_keys() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(3, 4, 8, seed=2), scattered_table(3)
    out, lse = attention(
        q, layer(), batch(ForwardMode.DECODE, [4, 0, 9], [1, 1, 1]), table, pool_of(k, v)
    )
    for row, length in ((0, 4), (2, 9)):
        slots = table[row + 1, :length].long()
        keep = torch.ones(1, length, dtype=torch.bool)
        expected = sdpa(q[row : row + 1], k[slots], v[slots], keep)
        torch.testing.assert_close(out[row : row + 1], expected)
    assert not out[1].any()
    assert bool((lse[1] == -torch.inf).all())


def test_verify_keys_are_prefix_and_drafts() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(4, 4, 8, seed=2), scattered_table(2)
    masks = [torch.rand(2, length) < 0.7 for length in (5, 2)]
    for mask in masks:
        mask[:, 0] = True
    flat = torch.cat([mask.flatten() for mask in masks])
    step = batch(
        ForwardMode.TARGET_VERIFY,
        [5, 2],
        [2, 2],
        spec_info=SpecInput(draft_token_num=2, topk=2, custom_mask=flat),
    )
    out, _ = attention(q, layer(), step, table, pool_of(k, v))
    for request, (length, mask) in enumerate(zip((5, 2), masks, strict=True)):
        rows = slice(2 * request, 2 * request + 2)
        slots = table[request + 1, :length].long()
        torch.testing.assert_close(out[rows], sdpa(q[rows], k[slots], v[slots], mask))


def test_encoder_tokens_come_first_in_a_row() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(2, 4, 8, seed=2), scattered_table(1)
    step = batch(ForwardMode.EXTEND, [3], [2], encoder_lens=torch.tensor([4], dtype=torch.int32))
    crossed, _ = attention(q, layer(is_cross_attention=True), step, table, pool_of(k, v))
    encoder, own = table[1, :4].long(), table[1, 4:7].long()
    keep = torch.ones(2, 4, dtype=torch.bool)
    torch.testing.assert_close(crossed, sdpa(q, k[encoder], v[encoder], keep))
    out, _ = attention(q, layer(), step, table, pool_of(k, v))
    torch.testing.assert_close(
        out, sdpa(q, k[own], v[own], torch.ones(2, 3, dtype=torch.bool).tril(1))
    )


def test_mla_values_are_the_latent_columns_of_the_keys() -> None:
    latent = random(NUM_SLOTS, 1, 12, seed=0)
    q, q_rope = random(2, 4, 8, seed=1), random(2, 4, 4, seed=2)
    table = scattered_table(1)
    spec = layer(kind="mla", tp_k_head_num=1, tp_v_head_num=1, qk_head_dim=12, v_head_dim=8)
    step = batch(ForwardMode.EXTEND, [5], [2])
    out, _ = attention(q, spec, step, table, pool_of(latent, latent[..., :8]), q_rope=q_rope)
    keys = latent[table[1, :5].long()]
    keep = torch.ones(2, 5, dtype=torch.bool).tril(3)
    expected = sdpa(torch.cat([q, q_rope], dim=-1), keys, keys[..., :8], keep)
    torch.testing.assert_close(out, expected)


def test_picked_keys_are_the_only_ones() -> None:
    """Each token of two requests attends to rows that were gathered for it by hand."""
    latent = random(NUM_SLOTS, 1, 12, seed=0)
    q, q_rope = random(3, 4, 8, seed=1), random(3, 4, 4, seed=2)
    table = scattered_table(2)
    spec = layer(kind="mla", tp_k_head_num=1, tp_v_head_num=1, qk_head_dim=12, v_head_dim=8)
    picks = torch.tensor([[-1, 2, 0, -1], [3, 1, 2, 4], [-1, -1, -1, -1]], dtype=torch.int32)
    step = batch(ForwardMode.EXTEND, [5, 1], [2, 1], topk_indices=picks)
    out, lse = attention(q, spec, step, table, pool_of(latent, latent[..., :8]), q_rope=q_rope)
    whole = torch.cat([q, q_rope], dim=-1)
    for token, places in ((0, [0, 2]), (1, [1, 2, 3, 4])):
        keys = latent[table[1, places].long()]
        keep = torch.ones(1, len(places), dtype=torch.bool)
        expected = sdpa(whole[token : token + 1], keys, keys[..., :8], keep)
        torch.testing.assert_close(out[token : token + 1], expected)
    assert not out[2].any()
    assert bool(lse[2].isneginf().all())


def test_expanded_layers_have_no_indexer() -> None:
    k, v, q = (
        random(NUM_SLOTS, 2, 8, seed=0),
        random(NUM_SLOTS, 2, 6, seed=1),
        random(1, 4, 8, seed=2),
    )
    table = scattered_table(1)
    step = batch(ForwardMode.DECODE, [4], [1])
    picks = torch.zeros(1, 2, dtype=torch.int32)
    sparse = batch(ForwardMode.DECODE, [4], [1], topk_indices=picks)
    out, _ = attention(q, layer(), sparse, table, pool_of(k, v))
    torch.testing.assert_close(out, attention(q, layer(), step, table, pool_of(k, v))[0])


def test_unsaved_keys_are_those_of_the_call() -> None:
    k, v, q = random(5, 2, 8, seed=0), random(5, 2, 6, seed=1), random(5, 4, 8, seed=2)
    step = batch(ForwardMode.EXTEND, [3, 2], [3, 2])
    unread = pool_of(torch.full((NUM_SLOTS, 2, 8), torch.nan))
    out, _ = attention(q, layer(), step, scattered_table(2), unread, k=k, v=v)
    for rows in (slice(0, 3), slice(3, 5)):
        keep = torch.ones(len(q[rows]), len(q[rows]), dtype=torch.bool).tril()
        torch.testing.assert_close(out[rows], sdpa(q[rows], k[rows], v[rows], keep))


def test_scales_multiply_what_is_read() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(2, 4, 8, seed=2), scattered_table(1)
    step = batch(ForwardMode.EXTEND, [4], [2])
    quantised = pool_of(k, v)
    quantised.read_scales = lambda k_scale, v_scale: (k_scale, v_scale)
    scaled, lse = attention(q, layer(k_scale=0.5, v_scale=3.0), step, table, quantised)
    plain, plain_lse = attention(q, layer(), step, table, pool_of(k * 0.5, v * 3.0))
    torch.testing.assert_close(scaled, plain)
    torch.testing.assert_close(lse, plain_lse)


def test_what_was_never_quantised_has_no_scale() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(2, 4, 8, seed=2), scattered_table(1)
    spec, step = layer(k_scale=0.5, v_scale=3.0), batch(ForwardMode.EXTEND, [2], [2])
    stored, _ = attention(q, spec, step, table, pool_of(k, v))
    torch.testing.assert_close(stored, attention(q, layer(), step, table, pool_of(k, v))[0])
    slots = table[1, :2].long()
    unsaved, _ = attention(q, spec, step, table, pool_of(k, v), k=k[slots], v=v[slots])
    torch.testing.assert_close(unsaved, stored)


def test_slots_are_those_of_the_layers_buffer() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(2, 4, 8, seed=2), scattered_table(1)
    step, elsewhere = batch(ForwardMode.EXTEND, [4], [2]), torch.randperm(NUM_SLOTS)
    moved = pool_of(torch.empty_like(k), torch.empty_like(v))
    for buffer, rows in zip(moved.get_kv_buffer(0), (k, v), strict=True):
        buffer[elsewhere] = rows
    moved.translate = lambda slots, layer_id: elsewhere[slots]
    expected, _ = attention(q, layer(), step, table, pool_of(k, v))
    torch.testing.assert_close(attention(q, layer(), step, table, moved)[0], expected)


def test_unsaved_keys_of_an_encoder_are_cut_by_its_lengths() -> None:
    k, v, q = random(5, 2, 8, seed=0), random(5, 2, 6, seed=1), random(4, 4, 8, seed=2)
    encoder = torch.tensor([4, 1], dtype=torch.int32)
    step = batch(ForwardMode.EXTEND, [1, 3], [1, 3], encoder_lens=encoder)
    crossing, unread = layer(is_cross_attention=True), pool_of(torch.zeros(0, 2, 8))
    out, _ = attention(q, crossing, step, scattered_table(2), unread, k=k, v=v)
    for rows, keys in ((slice(0, 1), slice(0, 4)), (slice(1, 4), slice(4, 5))):
        keep = torch.ones(len(q[rows]), len(k[keys]), dtype=torch.bool)
        torch.testing.assert_close(out[rows], sdpa(q[rows], k[keys], v[keys], keep))


def test_multi_item_reads_positions_of_new_tokens() -> None:
    """A cached prefix of 2, then items of 2 and 1 tokens."""
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(3, 4, 8, seed=2), scattered_table(1)
    items = MultiItem(
        prefix_lens=torch.tensor([2], dtype=torch.int32),
        token_pos_in_items=torch.tensor([0, 1, 0], dtype=torch.int32),
    )
    step = batch(ForwardMode.EXTEND, [5], [3], multi_item=items)
    out, _ = attention(q, layer(), step, table, pool_of(k, v))
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]], dtype=torch.bool)
    slots = table[1, :5].long()
    torch.testing.assert_close(out, sdpa(q, k[slots], v[slots], keep))


def test_rows_of_no_request_stay_empty() -> None:
    k, v = random(NUM_SLOTS, 2, 8, seed=0), random(NUM_SLOTS, 2, 6, seed=1)
    q, table = random(5, 4, 8, seed=2), scattered_table(1)
    out, lse = attention(q, layer(), batch(ForwardMode.EXTEND, [3], [2]), table, pool_of(k, v))
    assert not out[2:].any()
    assert bool((lse[2:] == -torch.inf).all())
    idle, _ = attention(q[:0], layer(), batch(ForwardMode.IDLE, [], []), table, pool_of(k, v))
    assert idle.shape == (0, 4, 6)


def test_an_extend_step_without_lengths_is_refused() -> None:
    step = batch(ForwardMode.DECODE, [3], [1])
    step = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        req_pool_indices=step.req_pool_indices,
        seq_lens=step.seq_lens,
        out_cache_loc=step.out_cache_loc,
        positions=step.positions,
    )
    k = random(NUM_SLOTS, 2, 8, seed=0)
    with pytest.raises(InvalidInput, match="extend_seq_lens"):
        attention(k[:1, :1].repeat(1, 4, 1), layer(), step, scattered_table(1), pool_of(k, k))
