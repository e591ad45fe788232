"""FlashAttention 4 of `flash_attn.cute`, in plain torch.

What an adapter can notice of the real function:

- Q is packed, [total, Hq, D]; K and V are packed too, or [pages, page, Hkv, D] with `page_table`.
  It allocates its output and returns (output, LSE); LSE is None unless `return_lse`.
- LSE is the natural logarithm, float32, [Hq, total], with `qv` [total, Hq]; sinks are included.
- Causality and windows count from the end of a request's keys. A window's side is off where it is
  None; -1 is a number, but two sides whose sum is negative are both off.
- A row without keys has output 0 and LSE -inf; with a sink, LSE is NaN on SM90 and the sink on
  SM100. A request with queries and without keys gives garbage, here NaN: its first block has number
  -1, which no mask hides.
- Rows of Q that no request owns are not computed: here NaN.
- A page of 128 keys is loaded whole, and packed keys in blocks of as many: V after a request's end
  is multiplied by weights of 0, and spoils the result where it is not finite. Keys on other pages
  are loaded one by one.
- With `qv`, of V's dims, a logit is q · k + qv · v, and the default scale counts both dims.
- Each architecture refuses other arguments, most of them by an assertion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attnmux.emulators.nvidia.dense import attend, padded, unpadded

_BLOCK = 128
"""Keys that a kernel loads at once. Where SM90 loads fewer, it takes no pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttnCute:
    """The library on one architecture."""

    arch: int
    """90 or 100."""

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        gather_kv_indices: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: torch.Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., object] | None = None,
        score_mod_bwd: Callable[..., object] | None = None,
        mask_mod: Callable[..., object] | None = None,
        block_sparse_tensors: list[torch.Tensor] | None = None,
        aux_tensors: list[torch.Tensor] | None = None,
        aux_scalars: tuple[object, ...] | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Raises AssertionError for what the library refuses, RuntimeError for what does not
        compile or faults, NotImplementedError for what only the real library serves."""
        others = (seqused_q, gather_kv_indices, score_mod, mask_mod, block_sparse_tensors)
        if any(given is not None for given in others) or cu_seqlens_q is None:
            raise NotImplementedError("the emulator knows packed queries, and no modifications")
        left, right = _resolved(causal, *window_size)
        _check_operands(q, k, v, qv, learnable_sink)
        _check_lengths(cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)
        paged_by = None if page_table is None else v.shape[1]
        is_local = left is not None or right not in (None, 0)
        self._check_dims(q.shape[-1], v.shape[-1])
        self._check_splits(num_splits)
        if qv is not None:
            plain = learnable_sink is None and softcap == 0 and not is_local
            self._check_latent(q, v, plain=plain, pack_gqa=pack_gqa)
        else:
            self._check_packing(q, v, pack_gqa)
            if paged_by is not None:
                self._check_pages(paged_by, q.shape[-1], v.shape[-1], is_local=is_local)
        for rows in (q, k, v, qv):
            _check_aligned(rows)
        if not q.shape[0] or not v.numel():
            empty = q.new_zeros((*q.shape[:2], v.shape[-1]))
            return empty, _lse_of(q, -torch.inf, qv) if return_lse else None
        longest = q.shape[0] if max_seqlen_q is None else min(max_seqlen_q, q.shape[0])
        keys, values, lens = _by_request(k, v, cu_seqlens_k, seqused_k, page_table)
        q_lens = cu_seqlens_q.diff()
        keep = _visible(longest, q_lens, lens, keys.shape[1], left, right)
        queries = padded(q, cu_seqlens_q, longest)
        if qv is not None:
            queries = torch.cat([queries, padded(qv, cu_seqlens_q, longest)], dim=-1)
            keys = torch.cat([keys, values], dim=-1)
        out, lse = attend(
            queries,
            keys,
            values,
            keep,
            scale=queries.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap,
            sinks=learnable_sink,
        )
        if self.arch == 90 and learnable_sink is not None:
            lse = lse.masked_fill(~keep.any(-1, keepdim=True), torch.nan)
        no_keys = (lens == 0).view(-1, 1, 1)
        out = out.masked_fill(no_keys.unsqueeze(-1), torch.nan)
        lse = lse.masked_fill(no_keys, torch.nan)
        unowned = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan)
        result = unpadded(out, cu_seqlens_q, unowned)
        if not return_lse:
            return result, None
        lse = unpadded(lse, cu_seqlens_q, torch.full(q.shape[:2], torch.nan, device=q.device))
        return result, lse if qv is not None else lse.t().contiguous()

    def _check_dims(self, dim: int, v_dim: int) -> None:
        if self.arch == 90:
            served = all(8 <= each <= 256 for each in (dim, v_dim))
        else:
            served = (
                all(8 <= each <= 128 for each in (dim, v_dim))
                or (dim, v_dim) in ((192, 128), (256, 256))
                or (v_dim == 512 and dim in (64, 512))
            )
        check(served and not dim % 8 and not v_dim % 8, f"({dim}, {v_dim}) is not supported")

    def _check_splits(self, num_splits: int) -> None:
        check(self.arch != 90 or num_splits == 1, "SplitKV not supported on SM 9.0")

    def _check_latent(
        self, q: torch.Tensor, v: torch.Tensor, *, plain: bool, pack_gqa: bool | None
    ) -> None:
        check((q.shape[-1], v.shape[-1]) == (64, 512), "qv: dims are 64 and 512")
        check(plain, "qv: no window, no sink, no softcap")
        heads = q.shape[-2] // v.shape[-2]
        check(pack_gqa is False or not _BLOCK % heads or not heads % _BLOCK, "whole packed tiles")

    def _check_packing(self, q: torch.Tensor, v: torch.Tensor, pack_gqa: bool | None) -> None:
        """On SM90, TMA does not load heads that do not fill the rows of a tile."""
        rows = 192 if q.shape[-1] <= 96 else 128
        by_itself = pack_gqa is False or not rows % (q.shape[-2] // v.shape[-2])
        if self.arch == 90 and not by_itself and (q.shape[-1] % 16 or v.shape[-1] % 16):
            raise RuntimeError("'cute.copy' op expects pred to have compatible shape")

    def _check_pages(self, page_size: int, dim: int, v_dim: int, *, is_local: bool) -> None:
        block = _keys_at_once(dim, v_dim, is_local=is_local) if self.arch == 90 else _BLOCK
        if page_size == block:
            return
        check(not dim % 16 and not v_dim % 16, "Paged KV does not support irregular head dim")
        if block < _BLOCK:
            raise RuntimeError("one of the 128 threads that look pages up has no page")


def _resolved(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """How many keys before and after itself a query sees; None for all."""
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return None, 0 if causal else None
    return left, right


def _keys_at_once(dim: int, v_dim: int, *, is_local: bool) -> int:
    """The library's tiles of keys on SM90, for causal calls."""
    if dim <= 128:
        return 128
    if dim <= 192:
        return 96 if is_local else 128 if v_dim <= 128 else 112
    return 64 if is_local else 80


def _by_request(
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [B, S, Hkv, …] and lengths [B]; V is 0 after the loaded part."""
    if page_table is not None and seqused_k is not None:
        keys, values = (cache[page_table.long()].flatten(1, 2) for cache in (k, v))
        lens, loaded_at_once = seqused_k, _BLOCK if v.shape[1] == _BLOCK else 1
    elif cu_seqlens_k is not None:
        keys, values = (padded(packed, cu_seqlens_k, v.shape[0]) for packed in (k, v))
        lens, loaded_at_once = cu_seqlens_k.diff(), _BLOCK
    else:
        raise NotImplementedError("the emulator knows packed keys, and pages with seqused_k")
    loaded = (lens + loaded_at_once - 1) // loaded_at_once * loaded_at_once
    unread = torch.arange(keys.shape[1], device=v.device) >= loaded.unsqueeze(1)
    return keys, values.masked_fill(unread[..., None, None], 0), lens


def _visible(
    longest: int,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    width: int,
    left: int | None,
    right: int | None,
) -> torch.Tensor:
    """[B, longest, width] bool."""
    key = torch.arange(width, device=q_lens.device)
    query = torch.arange(longest, device=q_lens.device)
    position = (query + (kv_lens - q_lens).unsqueeze(1)).unsqueeze(2)
    keep = (key < kv_lens.unsqueeze(1)).unsqueeze(1)
    keep = keep & (query < q_lens.unsqueeze(1)).unsqueeze(2)
    if left is not None:
        keep = keep & (key >= position - left)
    if right is not None:
        keep = keep & (key <= position + right)
    return keep


def _lse_of(q: torch.Tensor, value: float, qv: torch.Tensor | None) -> torch.Tensor:
    total, heads = q.shape[:2]
    shape = (heads, total) if qv is None else (total, heads)
    return torch.full(shape, value, device=q.device)


def _check_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
) -> None:
    given = [each for each in (q, k, v, qv) if each is not None]
    check(v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16 or bfloat16")
    for each in given:
        check(each.dtype == v.dtype, f"{each.dtype} != {v.dtype}")
    check(k.shape[:-1] == v.shape[:-1], "k and v must have the same rows")
    check(k.shape[-1] == q.shape[-1], "k must have the head_dim of q")
    check(q.shape[-2] % v.shape[-2] == 0, "num_head must be divisible by num_head_kv")
    if qv is not None:
        check(qv.shape == (*q.shape[:-1], v.shape[-1]), "qv must have the shape of the output")
    if learnable_sink is not None:
        check(learnable_sink.shape == (q.shape[-2],), "learnable_sink must be of [num_head]")
        check(learnable_sink.dtype == torch.bfloat16, "learnable_sink must be bfloat16")


def _check_lengths(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> None:
    for lens in (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table):
        check(lens is None or lens.dtype == torch.int32, "lengths and tables must be int32")
        check(lens is None or lens.stride(-1) == 1, "lengths and tables must be contiguous")
    batch_size = len(cu_seqlens_q) - 1
    if page_table is not None:
        check(cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k")
        check(page_table.shape[0] == batch_size, "page_table must be of [batch_size, pages]")
    if cu_seqlens_k is not None:
        check(cu_seqlens_k.shape == cu_seqlens_q.shape, "cu_seqlens_k must be of [batch_size + 1]")
    if seqused_k is not None:
        check(seqused_k.shape == (batch_size,), "seqused_k must have shape (batch_size,)")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _check_aligned(rows: torch.Tensor | None) -> None:
    """The library does not check; its loads of 16 bytes fault."""
    if rows is None:
        return
    steps = [rows.stride(dim) for dim in range(rows.dim() - 1) if rows.shape[dim] > 1]
    if rows.data_ptr() % 16 or any(step * rows.itemsize % 16 for step in steps):
        raise RuntimeError("misaligned address")
