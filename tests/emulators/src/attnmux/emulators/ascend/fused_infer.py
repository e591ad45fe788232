"""`npu_fused_infer_attention_score_v2` in plain torch: what an adapter can notice of it.

Layout TND alone. What the real operator's checks refuse is refused; what they let pass and its
documentation excludes is refused too. Sources: the documentation in torch-npu 2.14.0, and for TND
that of `aclnnFusedInferAttentionScoreV4`, which the operator calls.

- Ends of queries are cumulative. Lengths of keys are cumulative too, without a table; with one they
  are each request's own.
- A cache of pages is [pages, page, Hkv * D]. All pages that a request's keys reach are loaded; what
  lies after its keys gets weight 0, so that V has to be finite there.
- Without a mask, `sparse_mode` counts as 0: every query sees every key.
- What a request with queries and without keys gives is not documented: it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.emulators.nvidia.dense import attend

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, Tensor? "
    "key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? "
    "actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? "
    "dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? "
    "dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? "
    "dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? "
    "quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? "
    "learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, float "
    "softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str "
    'input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0, int '
    "key_quant_mode=0, int value_quant_mode=0, int inner_precise=0, bool "
    "return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? "
    "value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, int? "
    "key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? "
    "dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None, int? "
    "dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, int? "
    "out_dtype=None) -> (Tensor, Tensor)"
)
"""Schema that `libtorch_npu.so` of torch-npu 2.13.0 and 2.14.0 registers."""

UNUSED = (
    *("pse_shift", "dequant_scale_query", "dequant_scale_key", "dequant_offset_key"),
    *("dequant_scale_value", "dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out"),
    *("quant_offset_out", "quant_scale_p", "query_quant_mode", "key_quant_mode"),
    *("value_quant_mode", "inner_precise", "query_dtype", "key_dtype", "value_dtype"),
    *("query_rope_dtype", "key_rope_dtype", "key_shared_prefix_dtype"),
    *("value_shared_prefix_dtype", "dequant_scale_query_dtype", "dequant_scale_key_dtype"),
    *("dequant_scale_value_dtype", "dequant_scale_key_rope_dtype", "out_dtype"),
)
LATENT, ROPE = 512, 64
DIMS = ((64, 64), (128, 128), (192, 128))
MOST_REQUESTS, MOST_QUERIES_OF_LATENTS = 4096, 16


def emulated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    return_softmax_lse: bool = False,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises RuntimeError for what the operator refuses or its documentation excludes."""
    set_ones = [name for name in UNUSED if others.get(name)]
    check(not set_ones and (pre_tokens, next_tokens) == (2147483647,) * 2, "not emulated")
    check(input_layout == "TND", f"not emulated: layout {input_layout}")
    tensors = [query, key, value, query_rope, key_rope, atten_mask, block_table, learnable_sink]
    check(all(one is None or one.is_contiguous() for one in tensors), "a non-contiguous tensor")
    if actual_seq_qlen is None or actual_seq_kvlen is None:
        raise RuntimeError("actual_seq_qlen and actual_seq_kvlen should not be null")
    new = lengths_of(actual_seq_qlen)
    heads, kv_heads = num_query_heads, num_key_value_heads or num_query_heads
    check(query.dim() == 3 and query.shape[1] == heads, "query is (T, N, D)")
    check(len(query) == actual_seq_qlen[-1], "T should be equal to the last of actual_seq_qlen")
    check(heads % kv_heads == 0 and heads <= 256, "heads")
    if block_table is None:
        keys = lengths_of(actual_seq_kvlen)
        check(key.dim() == 3 and key.shape[1] == kv_heads == value.shape[1], "key is (T, N, D)")
        check(len(key) == len(value) == actual_seq_kvlen[-1], "T of key")
    else:
        keys = list(actual_seq_kvlen)
        check_pages(key, value, block_table, keys, block_size)
        key, value = (each.unflatten(2, (kv_heads, -1)) for each in (key, value))  # type: ignore[no-untyped-call]  # torch's
    check(len(keys) == len(new) <= MOST_REQUESTS, "lengths of as many requests")
    check(query.dtype == key.dtype == value.dtype, "key and value should be of query's dtype")
    check(query.shape[2] == key.shape[-1], "D of query and key")
    check(all(n or not q for q, n in zip(new, keys, strict=True)), "queries without keys")
    check_mask(atten_mask, sparse_mode, new, keys)
    if query_rope is None or key_rope is None:
        check(query_rope is None and key_rope is None, "query_rope and key_rope go together")
        check_heads(query, key, value, learnable_sink, block_size, return_softmax_lse)
    else:
        check(not return_softmax_lse and learnable_sink is None, "not with rope in TND")
        check(block_table is not None, "with rope, page attention must be enabled")
        check(max(new) <= MOST_QUERIES_OF_LATENTS, "Q_S should be 1 to 16")
        check_latents(query, key, value, query_rope, key_rope)
        query = torch.cat([query, query_rope], dim=-1)
        key = torch.cat([key, key_rope.unsqueeze(2)], dim=-1)

    if block_table is None:
        own = [(slice(end - n, end)) for n, end in zip(keys, actual_seq_kvlen, strict=True)]
        read = [(key[rows], value[rows]) for rows in own]
    else:
        pages = [
            row[: -(-n // block_size)].long() for row, n in zip(block_table, keys, strict=True)
        ]
        read = [(key[each].flatten(0, 1), value[each].flatten(0, 1)) for each in pages]
    out, lse = results(
        query, read, new, keys, atten_mask is not None, softmax_scale, learnable_sink
    )
    return out, lse if return_softmax_lse else lse.new_zeros(1)


def results(
    query: torch.Tensor,
    read: list[tuple[torch.Tensor, torch.Tensor]],
    new: list[int],
    keys: list[int],
    is_causal: bool,
    scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """read: K and V that the kernel loads for each request, of which the first `keys` count."""
    shape = query.shape[:2]
    out = query.new_full((*shape, read[0][1].shape[-1]), torch.nan)
    lse = query.new_full((*shape, 1), torch.nan, dtype=torch.float32)
    first = 0
    for (k, v), queries, length in zip(read, new, keys, strict=True):
        rows = slice(first, first := first + queries)
        if not queries:
            continue
        ends = torch.full((queries,), length)
        if is_causal:
            ends = torch.arange(length - queries, length) + 1
        # Loads beyond a request's keys have weight 0.
        result, sums = attend(
            query[rows].unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            (torch.arange(len(k)) < ends.unsqueeze(1)).unsqueeze(0),
            scale=scale,
            sinks=sinks,
        )
        out[rows], lse[rows] = result[0].to(out.dtype), sums[0].unsqueeze(-1)
    return out, lse


def check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(f"FusedInferAttentionScore: {message}")


def lengths_of(ends: Sequence[int]) -> list[int]:
    """Each request's length, from cumulative ends."""
    check(len(ends) > 0, "actual sequence lengths should not be empty")
    found = [end - before for before, end in zip((0, *ends), ends, strict=False)]
    check(min(found) >= 0, "an end should not be less than the one before")
    return found


def check_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: torch.Tensor,
    keys: list[int],
    block_size: int,
) -> None:
    check(block_table.dtype == torch.int32 and block_table.dim() == 2, "block_table is int32, 2D")
    check(block_table.shape[0] == len(keys), "block_table has a row for each batch")
    for cache in (key, value):
        check(cache.dim() == 3 and cache.shape[1] == block_size, "(blocknum, blocksize, H)")
        check(cache.shape[2] <= 65535, "KV_N * D is greater than 65535")
        check(cache.numel() < 2**31, "the cache's numbers are beyond int32")
    check(block_table.shape[1] * block_size >= max(keys), "block_table is too narrow")


def check_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    learnable_sink: torch.Tensor | None,
    block_size: int,
    return_softmax_lse: bool,
) -> None:
    """What is asked of heads without a rotary part of their own."""
    heads, kv_heads, dims = query.shape[1], key.shape[-2], (key.shape[-1], value.shape[-1])
    check(dims in DIMS, f"headDim {dims[0]} and {dims[1]} in TND")
    check(query.dtype == torch.bfloat16, "TND supports bfloat16 alone")
    check(heads // kv_heads <= 64, "the ratio of heads is greater than 64")
    check(key.dim() == 3 or block_size in (128, 256, 384, 512), "block_size")
    if learnable_sink is not None:
        check(dims[0] == dims[1], "learnable_sink's D is 64 or 128")
        check(learnable_sink.dtype == torch.bfloat16, "learnable_sink is bfloat16")
        check(tuple(learnable_sink.shape) == (heads,), "learnable_sink is (N,)")
        check(not return_softmax_lse, "whether its LSE has sinks is not documented")


def check_latents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_rope: torch.Tensor,
    key_rope: torch.Tensor,
) -> None:
    (_, block_size, kv_heads, dim), heads = key.shape, query.shape[1]
    check(dim == LATENT and key.data_ptr() == value.data_ptr(), "K and V are latents of 512")
    check(heads in (1, 2, 4, 8, 16, 32, 64, 128) and kv_heads == 1, f"Q_N {heads}, KV_N {kv_heads}")
    check(query.dtype in (torch.bfloat16, torch.float16), "query is bfloat16 or float16")
    check(query_rope.dtype == key_rope.dtype == query.dtype, "rope is of query's dtype")
    check(query_rope.shape == (*query.shape[:2], ROPE) and key_rope.shape[2] == ROPE, "rope's d")
    check(block_size in (16, 128), "block_size is 16 or 128")


def check_mask(
    atten_mask: torch.Tensor | None, sparse_mode: int, new: list[int], keys: list[int]
) -> None:
    if atten_mask is None:
        check(sparse_mode == 0, "atten_mask should not be null where sparse_mode is not 0")
        return
    check(sparse_mode == 3, f"not emulated: sparse_mode {sparse_mode} with a mask")
    check(max(new) > 1, "with Q_S of 1 only sparse_mode 0 without a mask")
    check(tuple(atten_mask.shape) == (2048, 2048), "atten_mask should be (2048, 2048)")
    check(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), "atten_mask's dtype")
    upper = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    check(torch.equal(atten_mask.bool(), upper), "atten_mask should be the upper triangle")
    check(all(q <= k for q, k in zip(new, keys, strict=True)), "more queries than keys")
