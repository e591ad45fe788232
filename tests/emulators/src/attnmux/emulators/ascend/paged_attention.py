"""`_npu_paged_attention_mla` in plain torch: what an adapter can notice of it.

- Rows of the cache are [latent, rotary part]; the first `mla_vheadsize` numbers are V.
- The table has a row for each query. `context_lens` lie on the host.
- All pages that a request's keys reach are loaded, so that V after them has to be finite.
- What a request without keys gives is not documented: it is refused.
"""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import attend

SCHEMA = (
    "(Tensor query, Tensor key_cache, int num_kv_heads, int num_heads, float scale_value, "
    "Tensor block_table, Tensor context_lens, int mla_vheadsize, Tensor(a!) out) -> ()"
)
"""Schema that torch-npu's op-plugin registers in the namespace `atb`."""


def emulated(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mla_vheadsize: int,
    out: torch.Tensor,
) -> None:
    """Raises RuntimeError for what the operator's documentation excludes."""
    tensors = (query, key_cache, block_table, context_lens, out)
    _check(all(one.is_contiguous() for one in tensors), "a non-contiguous tensor")
    _check(query.dtype in (torch.bfloat16, torch.float16), "query is bfloat16 or float16")
    _check(query.dtype == key_cache.dtype == out.dtype, "dtypes differ")
    _check(num_kv_heads == 1 and num_heads == query.shape[1] <= 128, "heads")
    _check(key_cache.dim() == 4 and key_cache.shape[2] == num_kv_heads, "key_cache is 4D")
    size, width = key_cache.shape[1], key_cache.shape[3]
    _check(size % 16 == 0 and size <= 128, "block_size is a multiple of 16, at most 128")
    _check(query.shape[2] == width <= 576, "head_size of K is at most 576")
    _check(tuple(out.shape) == (*query.shape[:2], mla_vheadsize), "out's shape")
    _check(block_table.dtype == torch.int32 == context_lens.dtype, "int32")
    _check(context_lens.device.type == "cpu", "context_lens lie on the host")
    _check(len(block_table) == len(context_lens) == len(query), "one row for each query")
    for index, length in enumerate(context_lens.tolist()):
        _check(length > 0, "a query without keys")
        pages = block_table[index, : -(-length // size)].long()
        _check(len(pages) * size >= length, "block_table is too narrow")
        k = key_cache[pages].flatten(0, 1).unsqueeze(0)
        keep = (torch.arange(k.shape[1]) < length).view(1, 1, -1)
        q = query[index].view(1, 1, num_heads, width)
        result, _ = attend(q, k, k[..., :mla_vheadsize], keep, scale=scale_value)
        out[index] = result[0, 0].to(out.dtype)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(f"PagedAttentionOperation: {message}")
