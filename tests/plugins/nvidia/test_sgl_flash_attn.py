"""What the emulator of sgl_kernel refuses or spoils; the adapters' tests prove its results."""

from __future__ import annotations

import math

import pytest
import torch

from attnmux.emulators.nvidia import sgl_flash_attn as emulator

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
