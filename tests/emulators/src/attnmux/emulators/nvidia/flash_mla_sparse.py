"""FlashMLA's sparse prefill kernel, in plain torch, as two packages offer it.

`sgl_kernel.flash_mla` of sglang-kernel 0.4.5 and `flash_mla` of sgl-flash-mla 1.0.0 have a
`flash_mla_sparse_fwd` each: `SglKernel` and `FlashMLA` here, by the name of the package. The LSE of
the first is said to have base 2, that of the second is natural. Both are +inf for a query without
keys, whose output is 0. A key that is named twice counts twice.
"""

from __future__ import annotations

import math

import torch

from attnmux.emulators.nvidia.dense import attend

Answer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Statistics = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class SglKernel:
    """`sgl_kernel.flash_mla`."""

    @staticmethod
    def flash_mla_sparse_fwd(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
    ) -> Answer:
        """Raises RuntimeError for what the library refuses."""
        out, top, lse = sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
        return out, top / math.log(2), lse / math.log(2)


class FlashMLA:
    """`flash_mla`."""

    @staticmethod
    def flash_mla_sparse_fwd(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        use_legacy: bool = False,
        return_log2_lse: bool | None = None,
    ) -> Statistics:
        """Raises RuntimeError and AssertionError for what the library refuses: without
        `use_legacy`, rows that are not 512 wide."""
        if not use_legacy:
            assert return_log2_lse is not True, "return_log2_lse=True is of the legacy kernels"
            _require(q.shape[-1] == 512, f"d_qk must be 512, not {q.shape[-1]}")
        out, top, lse = sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
        if return_log2_lse is False:
            return out, None, None
        base = math.log(2) if return_log2_lse else 1.0
        return out, top / base, lse / base


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
) -> Answer:
    """Attention of each query over the rows of kv that its indices name.

    q: [Sq, 64 or 128, 512 or 576] bfloat16. kv: [Skv, 1, as q] bfloat16. indices: [Sq, 1, topk]
    int32, topk a multiple of 128; below 0 or from Skv on it is no key, and none is loaded.
    attn_sink: [Hq] float32, in the output alone. topk_length: [Sq] int32, how many of the indices
    count. Returns out [Sq, Hq, 512] bfloat16, the largest logit (-inf without keys) and LSE (+inf)
    [Sq, Hq] float32, natural.
    Raises RuntimeError for what the kernel's host code refuses.
    """
    _check(q, kv, indices, d_v)
    num_queries, topk = indices.shape[0], indices.shape[-1]
    rows = indices[:, 0].long()
    keep = (rows >= 0) & (rows < kv.shape[0])
    if topk_length is not None:
        keep = keep & (torch.arange(topk, device=rows.device) < topk_length.unsqueeze(1))
    keys = kv[rows.clamp(min=0, max=kv.shape[0] - 1)].masked_fill(~keep[..., None, None], 0)
    out, lse = attend(
        q.unsqueeze(1),
        keys,
        keys[..., :d_v],
        keep.unsqueeze(1),
        scale=sm_scale,
        rounded_weights=(torch.bfloat16, 1.0),
    )
    logits = torch.einsum("qhd,qsd->qhs", q.double(), keys[:, :, 0].double()) * sm_scale
    top = logits.masked_fill(~keep.unsqueeze(1), -torch.inf).amax(-1).float()
    out, lse = out.view(num_queries, q.shape[1], d_v), lse.view(num_queries, q.shape[1])
    if attn_sink is not None:
        out = out * torch.sigmoid(lse - attn_sink).unsqueeze(-1)
    return out.bfloat16(), top, lse.masked_fill(lse.isneginf(), torch.inf)


def _check(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, d_v: int) -> None:
    _require(q.dim() == kv.dim() == indices.dim() == 3, "q, kv and indices have three dims")
    _require(q.dtype == kv.dtype == torch.bfloat16, f"q and kv are bf16, not {q.dtype}, {kv.dtype}")
    _require(indices.dtype == torch.int32, f"indices are int32, not {indices.dtype}")
    _require(q.shape[0] > 0, "an empty grid")
    _require(q.shape[1] in (64, 128), f"Unsupported h_q: {q.shape[1]}")
    _require(q.shape[2] in (512, 576), f"Invalid d_qk: {q.shape[2]}")
    _require(d_v == 512, f"Invalid d_v {d_v}")
    _require(kv.shape[1:] == (1, q.shape[2]), f"kv has shape {tuple(kv.shape)}")
    _require(indices.shape[:2] == (q.shape[0], 1), f"indices have shape {tuple(indices.shape)}")
    topk = indices.shape[2]
    _require(topk > 0 and topk % 128 == 0, f"topk is a multiple of 128, not {topk}")
    last = (q.stride(-1), kv.stride(-1), indices.stride(-1))
    _require(last == (1, 1, 1), "the last dims are contiguous")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)
