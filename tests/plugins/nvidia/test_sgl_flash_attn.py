"""The emulator of sgl_kernel's functions has the conventions.

With Q of 0 every visible key weighs the same, so that LSE is the logarithm of their number.
"""

from __future__ import annotations

import math

import pytest
import torch

from attnmux.emulators.nvidia import sgl_flash_attn as emulator
from attnmux.testing import reference

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(*lens: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """A cache with that many keys a request, on pages in falling order; the others hold NaN."""
    counts = [-(-length // PAGE) for length in lens]
    pages = torch.arange(sum(counts), 0, -1, dtype=torch.int32).split(counts)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    cache = torch.randn(2, sum(counts) + 1, PAGE, KV_HEADS, DIM)
    cache[:, 0] = torch.nan
    for row, own, length in zip(table, pages, lens, strict=True):
        row[: len(own)] = own
        if length % PAGE:
            cache[:, own[-1], length % PAGE :] = torch.nan
    k_cache, v_cache = cache.to(dtype)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": table,
        "cache_seqlens": int32(*lens),
    }


def paged_lse(q: torch.Tensor, cache, **more):
    """Output and LSE over a paged cache."""
    out, lse, *_ = emulator.flash_attn_with_kvcache(q, **cache, return_softmax_lse=True, **more)
    return out, lse


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "rule", "seen"),
    [
        ((2, 3), (5, 3), {"causal": True}, [4, 5, 1, 2, 3]),
        ((2, 3), (5, 3), {}, [5, 5, 3, 3, 3]),
        ((4,), (2,), {"causal": True}, [0, 0, 1, 2]),
        ((3,), (9,), {"causal": True, "window_size": (4, 0)}, [5, 5, 5]),
        ((3,), (9,), {"causal": True, "window_size": (0, 0)}, [1, 1, 1]),
        ((3,), (9,), {"window_size": (1, 1)}, [3, 3, 2]),
        ((3,), (9,), {"causal": True, "window_size": (-1, -1)}, [7, 8, 9]),
        ((5,), (10,), {"causal": True, "attention_chunk": 4}, [2, 3, 4, 1, 2]),
        ((2,), (10,), {"causal": True, "attention_chunk": None}, [9, 10]),
    ],
)
def test_keys_that_each_query_sees(q_lens, kv_lens, rule, seen):
    """Causality counts from the end, a window before the token, a chunk from the first key."""
    q = torch.zeros(sum(q_lens), HEADS, DIM, dtype=torch.bfloat16)
    bounds = int32(*torch.tensor((0, *q_lens)).cumsum(0).tolist())
    packed = {"cu_seqlens_q": bounds, "max_seqlen_q": max(q_lens)}
    _, lse = paged_lse(q, paged(*kv_lens), **packed, **rule)
    assert lse.dtype == torch.float32
    assert lse.exp().round().tolist() == [seen] * HEADS


def test_batched_queries_have_batched_lse():
    q = torch.zeros(2, 1, HEADS, DIM, dtype=torch.bfloat16)
    out, lse = paged_lse(q, paged(3, 6), causal=True)
    assert (out.shape, lse.shape) == (q.shape, (2, HEADS, 1))
    torch.testing.assert_close(lse[:, 0, 0].exp(), torch.tensor([3.0, 6.0]))


@pytest.mark.parametrize("sinks", [None, torch.ones(HEADS, dtype=torch.bfloat16)])
def test_a_request_without_keys(sinks):
    cache = paged(3, 2) | {"cache_seqlens": int32(0, 2)}
    out, lse = paged_lse(torch.randn(2, 1, HEADS, DIM).bfloat16(), cache, causal=True, sinks=sinks)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


def test_a_row_without_keys_in_a_request_with_keys():
    q, sinks = torch.randn(1, 4, HEADS, DIM).bfloat16(), torch.arange(HEADS).bfloat16()
    out, lse = paged_lse(q, paged(2), causal=True, sinks=sinks)
    assert not out[0, :2].any()
    assert torch.equal(lse[0, :, :2], sinks.float().unsqueeze(1).expand(-1, 2))


def packed(q, k, v, q_bounds, k_bounds, **more):
    longest = (int(bounds.diff().max()) for bounds in (q_bounds, k_bounds))
    arguments = (q, k, v, q_bounds, k_bounds, *longest)
    out, lse, *_ = emulator.flash_attn_varlen_func(*arguments, return_softmax_lse=True, **more)
    return out, lse


def test_no_keys_at_all():
    q, nothing = torch.randn(2, HEADS, DIM).half(), torch.zeros(0, KV_HEADS, DIM).half()
    out, lse = packed(q, nothing, nothing, int32(0, 2), int32(0, 0))
    assert not out.any()
    assert lse.isposinf().all()


def test_v_of_the_next_request_is_multiplied_by_0():
    q, v = torch.randn(3, HEADS, DIM).half(), torch.randn(3, KV_HEADS, DIM).half()
    k, bounds = v.clone(), int32(0, 1, 3)
    k[1:], v[1:] = torch.nan, torch.inf
    out, lse = packed(q, k, v, bounds, bounds, causal=True)
    assert out[0].isnan().all()
    assert lse[:, 0].isfinite().all()


@pytest.mark.parametrize(("page_size", "is_read"), [(32, False), (64, True), (128, True)])
def test_v_behind_the_end_of_a_large_page_is_multiplied_by_0(page_size, is_read):
    cache = torch.randn(2, 2, page_size, KV_HEADS, DIM).half()
    cache[:, :, 9:] = torch.nan
    q = torch.randn(2, 1, HEADS, DIM).half()
    table = int32(1, 0).view(2, 1)
    out = emulator.flash_attn_with_kvcache(q, *cache, cache_seqlens=int32(9, 0), page_table=table)
    assert bool(out[0].isnan().all()) is is_read
    assert not out[1].any()


def test_sinks_cap_and_scale():
    q, sinks = torch.randn(3, HEADS, DIM).half(), torch.randn(HEADS).bfloat16()
    (k, v), bounds = torch.randn(2, 3, KV_HEADS, DIM).half(), int32(0, 3)
    rule = {"softmax_scale": 0.3, "softcap": 1.5, "sinks": sinks, "causal": True}
    out, lse = packed(q, k, v, bounds, bounds, **rule)
    keep = reference.visibility(torch.arange(3), 3)
    expected, expected_lse = reference.dense_attention(
        q, k, v, keep, scaling=0.3, logit_cap=1.5, sinks=sinks
    )
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=2e-3)
    torch.testing.assert_close(lse.t().double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_varlen_ignores_a_page_table():
    q, (k, v) = torch.randn(3, HEADS, DIM).half(), torch.randn(2, 3, KV_HEADS, DIM).half()
    bounds = int32(0, 3)
    with_table, _ = packed(q, k, v, bounds, bounds, page_table=int32(7).view(1, 1))
    assert torch.equal(with_table, packed(q, k, v, bounds, bounds)[0])


def test_rows_of_no_request_are_left_alone():
    q = torch.randn(5, HEADS, DIM).half()
    out = torch.full_like(q, 7)
    bounds = {"cu_seqlens_q": int32(0, 2, 3), "max_seqlen_q": 5}
    emulator.flash_attn_with_kvcache(q, **paged(4, 4, dtype=torch.float16), **bounds, out=out)
    assert (out[3:] == 7).all()
    assert not (out[:3] == 7).any()


def test_fp8_gives_bfloat16_and_multiplies_by_the_descales():
    cache = paged(6, 6)
    for name in ("k_cache", "v_cache"):
        cache[name] = cache[name].to(torch.float8_e4m3fn)
    q = torch.randn(2, 1, HEADS, DIM).to(torch.float8_e4m3fn)
    factors = {name: torch.rand(2, KV_HEADS) + 0.5 for name in ("q_descale", "k_descale")}
    v_descale = torch.rand(2, KV_HEADS) + 0.5

    def run(**descales):
        return emulator.flash_attn_with_kvcache(q, **cache, softmax_scale=0.2, **descales)

    plain, scaled = run(), run(v_descale=v_descale)
    assert plain.dtype == torch.bfloat16
    per_head = v_descale.repeat_interleave(HEADS // KV_HEADS, 1)[:, None, :, None]
    torch.testing.assert_close(scaled.float(), plain * per_head, atol=1e-2, rtol=2e-2)
    assert not torch.allclose(run(**factors), plain)


Q = torch.zeros(2, 1, HEADS, DIM).half()


def odd(*shape: int) -> torch.Tensor:
    """Rows that begin where a load of 16 bytes faults."""
    return torch.zeros(math.prod(shape) + 1).half()[1:].view(shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q.float()}, "only supports fp16, bf16, and fp8_e4m3"),
        ({"q": Q.bfloat16()}, "key must have the same dtype"),
        ({"page_table": torch.zeros(2, 2, dtype=torch.int64)}, "page_table must have dtype"),
        ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, "seqused_k must have dtype"),
        ({"page_table": torch.zeros(3, 2, dtype=torch.int32)}, "batch_size must be equal"),
        ({"cu_seqlens_q": int32(0, 1, 2), "q": Q.squeeze(1)}, "max_seqlen_q"),
        ({"sinks": torch.zeros(HEADS)}, "sinks must have dtype bfloat16"),
        ({"out": Q.float()}, "output must have the dtype"),
        ({"q": torch.cat([Q, Q], -1)[..., ::2]}, "contiguous last dimension"),
        ({"q": odd(2, 1, HEADS, DIM)}, "misaligned"),
        ({"q": Q[:, :, :3].clone()}, "must divide"),
        ({"cache_seqlens": int32(3)}, "seqused_k must have shape"),
        ({"num_splits": 257}, "num_splits > 256"),
        (
            {"q": torch.zeros(2, 1, 66, DIM).half(), "sinks": torch.zeros(66).bfloat16()},
            "an array of 64",
        ),
        ({"qv": Q}, "hdim_v >= 256"),
    ],
)
def test_what_the_library_refuses(changes, message):
    cache = paged(3, 6, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=message):
        emulator.flash_attn_with_kvcache(**{"q": Q, **cache, **changes})


def test_varlen_wants_both_longest_lengths():
    q = torch.zeros(3, HEADS, DIM).half()
    with pytest.raises(ValueError, match="max_seqlen_k"):
        emulator.flash_attn_varlen_func(q, q, q, int32(0, 3), int32(0, 3), max_seqlen_q=3)


RANK, ROPE = 512, 64


def latent(*lens: int) -> dict[str, torch.Tensor]:
    """A cache of latents and rotary keys, both views of one buffer; other pages hold NaN."""
    pages = -(-max(lens) // PAGE)
    rows = torch.randn(len(lens) * pages + 1, PAGE, 1, RANK + ROPE).half()
    rows[0] = torch.nan
    return {
        "k_cache": rows[..., RANK:],
        "v_cache": rows[..., :RANK],
        "page_table": torch.arange(1, len(rows), dtype=torch.int32).view(len(lens), pages),
        "cache_seqlens": int32(*lens),
    }


@pytest.mark.parametrize("scale", [None, 0.1])
def test_qv_is_multiplied_with_v(scale):
    """The default scale counts both parts."""
    cache = latent(6, 3)
    q, qv = torch.randn(2, 2, HEADS, ROPE).half(), torch.randn(2, 2, HEADS, RANK).half()
    out, lse = paged_lse(q, cache, qv=qv, causal=True, softmax_scale=scale)
    assert (out.shape, lse.shape) == ((2, 2, HEADS, RANK), (2, HEADS, 2))
    for request, length in enumerate((6, 3)):
        pages = cache["page_table"][request].long()
        k, v = (cache[name][pages].flatten(0, 1)[:length] for name in ("k_cache", "v_cache"))
        expected, expected_lse = reference.dense_attention(
            torch.cat([qv[request], q[request]], -1),
            torch.cat([v, k], -1),
            v,
            reference.visibility(torch.arange(length - 2, length), length),
            scaling=scale or (RANK + ROPE) ** -0.5,
        )
        torch.testing.assert_close(out[request].double(), expected, atol=1e-3, rtol=2e-3)
        torch.testing.assert_close(lse[request].t().double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_packed_qv_has_packed_lse():
    q, qv = torch.zeros(3, HEADS, ROPE).half(), torch.zeros(3, HEADS, RANK).half()
    k, v, bounds = torch.randn(3, 1, ROPE).half(), torch.randn(3, 1, RANK).half(), int32(0, 2, 3)
    _, lse = packed(q, k, v, bounds, bounds, causal=True, qv=qv)
    torch.testing.assert_close(lse.exp(), torch.tensor([1.0, 2.0, 1.0]).expand(HEADS, 3))


QV = torch.zeros(2, 1, HEADS, RANK).half()


def test_a_request_without_latents():
    cache = latent(4, 4) | {"cache_seqlens": int32(0, 4)}
    out, lse = paged_lse(torch.zeros(2, 1, HEADS, ROPE).half(), cache, qv=QV)
    assert not out[0].any()
    assert lse[0].isneginf().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qv": QV.float()}, "q_v must have the same dtype"),
        ({"qv": QV[..., :256]}, "q_v must have the shape"),
        ({"qv": odd(2, 1, HEADS, RANK)}, "misaligned"),
        ({"v_cache": torch.zeros(5, PAGE, 1, RANK + 1).half()[..., 1:]}, "misaligned"),
    ],
)
def test_what_the_library_refuses_of_latents(changes, message):
    q = torch.zeros(2, 1, HEADS, ROPE).half()
    with pytest.raises(RuntimeError, match=message):
        emulator.flash_attn_with_kvcache(**{"q": q, "qv": QV, **latent(3, 6), **changes})


def test_a_merge_is_attention_over_both():
    out = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(4, 1, 1).expand(4, HEADS, DIM)
    other = torch.full_like(out, 9.0)
    lse = torch.tensor([1.0, 3.0, 0.0, 0.0]).log().view(4, 1).expand(4, HEADS).contiguous()
    lse_other = torch.tensor([3.0, 1.0, 1.0, 0.0]).log().view(4, 1).expand(4, HEADS).contiguous()
    lse[2] = torch.inf  # counts as -inf
    into = out.contiguous()
    merged, merged_lse = emulator.merge_state_v2(into, lse, other, lse_other, v_merged=into)
    assert merged is into
    assert merged[:3, 0, 0].tolist() == pytest.approx([7.0, 4.5, 9.0])
    assert merged_lse[:3, 0].exp().tolist() == pytest.approx([4.0, 4.0, 1.0])
    assert merged[3].isnan().all()


def test_a_merge_reads_rows_end_to_end():
    out, lse = torch.zeros(3, HEADS, DIM), torch.zeros(HEADS, 3)
    with pytest.raises(RuntimeError, match="contiguous"):
        emulator.merge_state_v2(out, lse.t(), out, lse.t())


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.bfloat16, torch.float16)],
)
def test_merges_that_the_library_refuses_or_reads_wrongly(dtype, other):
    lse = torch.zeros(3, HEADS)
    states = (torch.zeros(3, HEADS, DIM, dtype=dtype), torch.zeros(3, HEADS, DIM, dtype=other))
    with pytest.raises(RuntimeError, match=r"data type|read as"):
        emulator.merge_state_v2(states[0], lse, states[1], lse)


def scheduled(*lens: int, **rule) -> torch.Tensor:
    arguments = {"causal": True, "qkv_dtype": torch.float16, **rule}
    return emulator.get_scheduler_metadata(
        len(lens), 1, 2 * PAGE, HEADS, KV_HEADS, DIM, int32(*lens), page_size=PAGE, **arguments
    )


def test_a_schedule_of_no_requests_is_no_launch():
    with pytest.raises(RuntimeError, match="invalid configuration"):
        scheduled()


@pytest.mark.parametrize(
    ("max_seqlen_q", "rule", "vectors"),
    [
        (1, {"causal": True}, 3),  # One query sees all keys, causal or not.
        (1, {"causal": True, "headdim": 128}, 4),
        (2, {"causal": True}, 4),
        (2, {}, 3),
        (2, {"causal": True, "window_size": (3, 0)}, 3),
        (2, {"causal": True, "window_size": (15, 0)}, 4),  # As wide as the table.
        (2, {"causal": True, "attention_chunk": 4}, 3),
    ],
)
def test_the_size_of_a_schedule(max_seqlen_q, rule, vectors):
    arguments = {"headdim": DIM, "cache_seqlens": int32(*[9] * 5), "page_size": 4, **rule}
    made = emulator.get_scheduler_metadata(5, max_seqlen_q, 16, HEADS, KV_HEADS, **arguments)
    assert made.shape == (8 * vectors + 1,)
    assert not made[-1]


@pytest.mark.parametrize(
    ("metadata", "good"),
    [
        (scheduled(3, 6), True),
        (scheduled(3, 5), False),
        (scheduled(3, 6, num_splits=2), False),
        (scheduled(3, 6, qkv_dtype=torch.bfloat16), False),
        (scheduled(3, 6, has_softcap=True), False),
    ],
)
def test_a_schedule_of_other_calls_gives_garbage(metadata, good):
    q = torch.randn(2, 1, HEADS, DIM).half()
    cache = paged(3, 6, dtype=torch.float16)
    plain = emulator.flash_attn_with_kvcache(q, **cache, causal=True)
    out = emulator.flash_attn_with_kvcache(q, **cache, causal=True, scheduler_metadata=metadata)
    assert torch.equal(out, plain) if good else out.isnan().all()


@pytest.mark.parametrize("metadata", [scheduled(3, 6)[:-1], scheduled(3, 6).long()])
def test_schedules_that_the_library_refuses(metadata):
    cache = paged(3, 6, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="scheduler_metadata must have"):
        emulator.flash_attn_with_kvcache(Q, **cache, scheduler_metadata=metadata)
