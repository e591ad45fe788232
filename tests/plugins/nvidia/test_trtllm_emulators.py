"""The emulators of TensorRT-LLM's kernels: conventions counted out.

With Q of 0 every visible key weighs the same, so that the output is the mean of their values. Value
j of a request is j + 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.emulators.nvidia.flashinfer import trtllm_decode, trtllm_mla, trtllm_prefill
from attnmux.nvidia.trtllm_mha.decode import chain_mask

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
E4M3 = torch.float8_e4m3fn
XQA_MLA = trtllm_mla.xqa_batch_decode_with_kv_cache_mla
COUNTERS = 8 << 20


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace() -> torch.Tensor:
    return torch.zeros(COUNTERS + 1024, dtype=torch.uint8)


def cache_of(*lens: int, dtype=torch.float16, unused: float = 7.0) -> tuple[Any, torch.Tensor]:
    """K and V with that many keys a request, pages in falling order, and their table.

    unused: what lies in unused pages and after a request's last token.
    """
    counts = [-(-length // PAGE) for length in lens]
    pages = torch.arange(sum(counts), 0, -1, dtype=torch.int32).split(counts)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    cache = torch.full((2, sum(counts) + 1, PAGE, KV_HEADS, DIM), unused)
    for row, own, length in zip(table, pages, lens, strict=True):
        row[: len(own)] = own
        values = torch.full((len(own) * PAGE,), unused)
        values[:length] = torch.arange(1, length + 1)
        cache[:, own.long()] = values.view(-1, PAGE)[..., None, None]
    return tuple(cache.to(dtype)), table


def queries(num_rows: int, dtype=torch.float16) -> torch.Tensor:
    return torch.zeros(num_rows, HEADS, DIM, dtype=dtype)


def means(out: torch.Tensor) -> list[float]:
    """Of the visible values, for each row. All heads say the same."""
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    return out[:, 0, 0].tolist()


DECODES = {
    "xqa": (trtllm_decode.xqa_batch_decode_with_kv_cache, {}),
    "gen": (trtllm_decode.trtllm_batch_decode_with_kv_cache, {}),
}


def decode(which: str, *lens: int, each: int = 1, **rule: Any) -> torch.Tensor:
    function, more = DECODES[which]
    kv, table = cache_of(*lens)
    if which == "xqa" and each > 1:
        rule.setdefault("mask", chain_mask(len(lens), each, torch.device("cpu")))
    rule.setdefault("workspace_buffer", workspace())
    rule.setdefault("query", queries(len(lens) * each))
    return function(
        kv_cache=kv,
        block_tables=table,
        seq_lens=int32(*lens),
        max_seq_len=max(lens),
        q_len_per_req=each,
        kv_layout="NHD",
        **more,
        **rule,
    )


@pytest.mark.parametrize("which", DECODES)
class TestDecode:
    def test_a_row_without_keys_is_anything(self, which):
        assert decode(which, 3, 0)[1].isnan().all()

    def test_counters_that_are_not_zero(self, which):
        used = workspace()
        used[0] = 1
        assert decode(which, 3, workspace_buffer=used).isnan().all()

    def test_a_workspace_of_counters_alone(self, which):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            decode(which, 3, workspace_buffer=torch.zeros(COUNTERS, dtype=torch.uint8))


def test_xqa_takes_strided_queries_for_packed_ones():
    wide = torch.randn(2, 2 * HEADS, DIM).half()
    assert not torch.equal(
        decode("xqa", 9, 9, query=wide[:, :HEADS]),
        decode("xqa", 9, 9, query=wide[:, :HEADS].clone()),
    )
    assert torch.equal(
        decode("gen", 9, 9, query=wide[:, :HEADS]),
        decode("gen", 9, 9, query=wide[:, :HEADS].clone()),
    )


def test_xqa_skips_only_whole_tiles_before_the_window_of_drafts():
    assert means(decode("xqa", 9, each=2, window_left=1)) == [4.5, 5]
    assert means(decode("gen", 9, each=2, window_left=1)) == [7.5, 8.5]


@pytest.mark.parametrize("sinks", [None, torch.zeros(HEADS)])
def test_xqa_and_a_request_without_keys(sinks):
    """By its sink, 0 is divided; in 8 bits nothing is written."""
    out = decode("xqa", 3, 0, sinks=sinks)
    assert bool(out[1].isnan().all()) == (sinks is None)
    assert sinks is None or not out[1].any()
    kv, table = cache_of(3, 0, dtype=E4M3)
    out = trtllm_decode.xqa_batch_decode_with_kv_cache(
        queries(2), kv, workspace(), table, int32(3, 0), 16, sinks=sinks
    )
    assert out[1].isnan().all()


@pytest.mark.parametrize(("group", "each"), [(3, 10), (3, 11), (8, 5), (32, 2)])
def test_xqa_gives_a_row_the_sink_of_its_place_in_a_block(group, each):
    """Which is its own where blocks of 32 rows begin with a group, or where there is one block."""
    kv = tuple(torch.ones(2, PAGE, 1, DIM).half() for _ in range(2))
    sinks = torch.linspace(0, 4, group)
    out = trtllm_decode.xqa_batch_decode_with_kv_cache(
        torch.zeros(each, group, DIM).half(), kv, workspace(), int32(1).view(1, 1), int32(each),
        16, sinks=sinks, q_len_per_req=each, mask=chain_mask(1, each, torch.device("cpu")),
    )  # fmt: skip
    seen = torch.arange(1, each + 1).unsqueeze(1)
    expected = (seen / (seen + sinks.exp())).half()
    assert torch.allclose(out[..., 0], expected, rtol=2e-3) == (
        each * group <= 32 or 32 % group == 0
    )


@pytest.mark.parametrize(
    ("group", "dtype", "is_compiled"),
    [(16, torch.float16, True), (17, torch.float16, False), (24, torch.float16, False),
     (24, E4M3, True), (25, torch.float16, True), (33, E4M3, False)],
)  # fmt: skip
def test_heads_of_a_group_that_xqa_compiles_for(group, dtype, is_compiled):
    kv = tuple(torch.ones(2, PAGE, 1, DIM).to(dtype) for _ in range(2))

    def attend():
        q = torch.zeros(1, group, DIM).half()
        return trtllm_decode.xqa_batch_decode_with_kv_cache(
            q, kv, workspace(), int32(1).view(1, 1), int32(1), 16
        )

    if is_compiled:
        assert attend().isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="static assertion"):
            attend()


def test_xqa_loads_whole_pages_of_8_bits_alone():
    for dtype, is_spoiled in ((torch.float16, False), (E4M3, True)):
        kv, table = cache_of(3, dtype=dtype, unused=torch.nan)
        out = trtllm_decode.xqa_batch_decode_with_kv_cache(
            queries(1), kv, workspace(), table, int32(3), 16
        )
        assert bool(out.isnan().all()) == is_spoiled


def test_xqa_wants_a_mask_for_drafts():
    with pytest.raises(AssertionError, match="Mask is required"):
        decode("xqa", 9, each=2, mask=None)


def test_trtllm_gen_has_kernels_for_one_dtype():
    kv, table = cache_of(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="Missing TRTLLM-GEN kernel"):
        trtllm_decode.trtllm_batch_decode_with_kv_cache(
            queries(1), kv, workspace(), table, int32(3), 3, kv_layout="NHD"
        )


def prefill(which: str, *requests: tuple[int, int], trailing: int = 0, **rule: Any) -> torch.Tensor:
    """requests: (keys, queries)."""
    lens = [keys for keys, _ in requests]
    dtype = rule.pop("dtype", torch.bfloat16)
    kv, table = cache_of(*lens, dtype=dtype)
    q_bounds = int32(0, *torch.tensor([new for _, new in requests]).cumsum(0).tolist())
    kv_bounds = int32(0, *torch.tensor(lens).cumsum(0).tolist())
    num_rows = int(q_bounds[-1]) + trailing
    out = torch.full((num_rows, HEADS, DIM), 99, dtype=dtype)
    common: dict[str, Any] = {
        "seq_lens": int32(*lens),
        "max_q_len": max(new for _, new in requests),
        "max_kv_len": max(lens),
        "bmm1_scale": 1.0,
        "bmm2_scale": 1.0,
        "batch_size": len(requests),
        "cum_seq_lens_q": q_bounds,
        "cum_seq_lens_kv": kv_bounds,
        "block_tables": table,
        "out": out,
        **rule,
    }
    common.setdefault("workspace_buffer", workspace())
    if which == "fmha_v2":
        together = torch.stack(kv, dim=1)
        return trtllm_prefill.trtllm_fmha_v2_prefill(
            (queries(num_rows, dtype), together), "Q_PAGED_KV_NHD", **common
        )
    return trtllm_prefill.trtllm_batch_context_with_kv_cache(
        queries(num_rows, dtype), kv, kv_layout="NHD", **common
    )


@pytest.mark.parametrize("which", ["fmha_v2", "gen"])
def test_rows_of_no_request_stay(which):
    assert means(prefill(which, (2, 1), trailing=2)) == [1.5, 99, 99]


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ({"window_left": 1}, 8.5),
        ({"window_left": 0}, 5.0),
        ({"window_left": 0, "mask_mode": "sliding_window"}, 9.0),
        ({"window_left": 20, "mask_mode": "sliding_window"}, 5.0),
    ],
)
def test_a_window_of_fmha_v2(rule, seen):
    assert means(prefill("fmha_v2", (9, 1), **rule)) == [seen]


def test_fmha_v2_sums_up_halves_in_halves():
    """512 values, of 257 in the middle: 131328 before they are divided."""
    assert means(prefill("fmha_v2", (512, 1), dtype=torch.float16)) == [torch.inf]
    assert means(prefill("gen", (512, 1), dtype=torch.float16)) == [256.5]
    assert means(prefill("fmha_v2", (3, 3), dtype=torch.float16)) == pytest.approx(
        [1, 1.5, 2], 2e-3
    )


def test_fmha_v2_loads_whole_pages():
    kv, table = cache_of(3, 17, dtype=torch.bfloat16, unused=torch.nan)
    out = trtllm_prefill.trtllm_fmha_v2_prefill(
        (queries(2, torch.bfloat16), torch.stack(kv, dim=1)), "Q_PAGED_KV_NHD", workspace(),
        int32(3, 17), 1, 17, 1.0, 1.0, 2, int32(0, 1, 2), int32(0, 3, 20), block_tables=table,
    )  # fmt: skip
    assert out.isnan().all()


def test_fmha_v2_leaves_its_count_at_the_front():
    used = workspace()
    prefill("fmha_v2", (2, 1), workspace_buffer=used)
    assert decode("xqa", 3, workspace_buffer=used).isnan().all()


def test_fmha_v2_has_no_kernel_for_8_bits():
    kv, table = cache_of(2, dtype=torch.float8_e4m3fn)
    together = torch.stack([cache.view(torch.uint8) for cache in kv], 1).view(torch.float8_e4m3fn)
    q = queries(1).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="hang"):
        trtllm_prefill.trtllm_fmha_v2_prefill(
            (q, together), "Q_PAGED_KV_NHD", workspace(), int32(2), 1, 2, 1.0, 1.0, 1,
            int32(0, 1), int32(0, 2), block_tables=table,
        )  # fmt: skip


def latent(heads: int, each: int = 1, width: int = 4, page: int = 32, **rule: Any) -> torch.Tensor:
    """One request with 5 keys, of values 1 to 5, over pages of 32."""
    rows = torch.zeros(width + 1, page, 576, dtype=torch.bfloat16)
    rows[1, :5] = torch.arange(1.0, 6)[:, None].bfloat16()
    table = torch.zeros(1, width, dtype=torch.int32)
    table[0, 0] = 1
    which = rule.pop("which", trtllm_mla.trtllm_batch_decode_with_kv_cache_mla)
    rule.setdefault("query", torch.zeros(1, each, heads, 576, dtype=torch.bfloat16))
    return which(
        kv_cache=rows,
        workspace_buffer=workspace(),
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=table,
        seq_lens=int32(5),
        max_seq_len=5,
        **rule,
    )


def test_mla_clears_its_counters():
    used = workspace().fill_(1)
    rows = torch.ones(2, 64, 576, dtype=torch.bfloat16)
    out = trtllm_mla.trtllm_batch_decode_with_kv_cache_mla(
        torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16),
        rows, used, 128, 512, 64, int32(1, 0).view(1, 2), int32(3), 3,
    )  # fmt: skip
    assert (out == 1).all()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"heads": 96}, RuntimeError, "Missing"),
        ({"heads": 16, "width": 3}, ValueError, "block_num"),
        ({"heads": 16, "query": torch.zeros(1, 16, 576)}, ValueError, "ndim == 4"),
        ({"heads": 96, "which": XQA_MLA}, ValueError, "128 query heads"),
        ({"heads": 128, "each": 2, "which": XQA_MLA}, ValueError, "q_len_per_request"),
    ],
)
def test_refused_over_latents(settings, error, words):
    with pytest.raises(error, match=words):
        latent(**settings)
