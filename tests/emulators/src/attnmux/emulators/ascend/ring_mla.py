"""`npu_ring_mla` in plain torch: what an adapter can notice of it.

Packed queries of 128 + 64 dims attend to packed keys, causally or to all of them. A further call
adds other keys: it takes the result and the LSE so far, and returns those of both.

What the operator's documentation in torch-npu 2.14.0 excludes is refused, and so is what it leaves
open: a request without keys, and causality over more keys than queries.
"""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import attend

SCHEMA = (
    "(Tensor q_nope, Tensor q_rope, Tensor k_nope, Tensor k_rope, Tensor value, Tensor mask, "
    "Tensor seqlen, int head_num, int kv_head_num, *, Tensor? pre_out=None, "
    "Tensor? prev_lse=None, float qk_scale=1, str? kernel_type=None, str? mask_type=None, "
    "str? input_layout=None, str? calc_type=None) -> (Tensor, Tensor)"
)
"""Schema that `libop_plugin_atb.so` of torch-npu 2.13.0 and 2.14.0 registers in the namespace
`atb`."""

NOPE, ROPE, MASK_SIZE = 128, 64, 512


def emulated(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seqlen: torch.Tensor,
    head_num: int,
    kv_head_num: int,
    *,
    pre_out: torch.Tensor | None = None,
    prev_lse: torch.Tensor | None = None,
    qk_scale: float = 1,
    kernel_type: str | None = None,
    mask_type: str | None = None,
    input_layout: str | None = None,
    calc_type: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises RuntimeError for what the operator's documentation excludes or leaves open."""
    tensors = [q_nope, q_rope, k_nope, k_rope, value, mask, seqlen, pre_out, prev_lse]
    _check(all(one is None or one.is_contiguous() for one in tensors), "a non-contiguous tensor")
    _check(input_layout == "type_bsnd", f"input_layout {input_layout}")
    _check(kernel_type == "kernel_type_high_precision", f"not emulated: kernel_type {kernel_type}")
    _check(mask_type in ("no_mask", "mask_type_triu"), f"mask_type {mask_type}")
    _check_rows(q_nope, q_rope, head_num, "q")
    _check_rows(k_nope, k_rope, kv_head_num, "k")
    _check(value.shape == k_nope.shape, "value is [kvNTokens, kvHeadNum, 128]")
    _check(value.dtype == k_nope.dtype == q_nope.dtype, "key and value are of query's dtype")
    _check(head_num % kv_head_num == 0, "heads")
    new, keys = _lengths(seqlen)
    _check(sum(new) == len(q_nope) and sum(keys) == len(k_nope), "seqlen and the tokens differ")
    is_causal = mask_type == "mask_type_triu"
    if is_causal:
        _check(new == keys, "not documented: causality over more keys than queries")
        upper = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bfloat16).triu(1)
        _check(mask.dtype == torch.bfloat16, f"not emulated: mask of {mask.dtype}")
        _check(torch.equal(mask, upper), "mask is the upper triangle of (512, 512)")
    out, lse = _results(q_nope, q_rope, k_nope, k_rope, value, new, keys, is_causal, qk_scale)
    if calc_type == "calc_type_first_ring":
        _check(pre_out is None and prev_lse is None, "calc_type_first_ring takes no result so far")
        return out.to(q_nope.dtype), lse.T.contiguous()
    _check(calc_type == "calc_type_default", f"not emulated: calc_type {calc_type}")
    if pre_out is None or prev_lse is None:
        raise RuntimeError("RingMLA: calc_type_default takes pre_out and prev_lse")
    _check(pre_out.shape == out.shape and pre_out.dtype == q_nope.dtype, "pre_out")
    _check(prev_lse.shape == lse.T.shape and prev_lse.dtype == torch.float32, "prev_lse")
    before = prev_lse.T
    merged = torch.logaddexp(before, lse)
    shares = [(each - merged).exp().unsqueeze(-1) for each in (before, lse)]
    both = shares[0] * pre_out.float() + shares[1] * out
    return both.to(q_nope.dtype), merged.T.contiguous()


def _results(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    value: torch.Tensor,
    new: list[int],
    keys: list[int],
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [T, H, 128] and its LSE [T, H] of each request's keys, float32."""
    q, k = torch.cat([q_nope, q_rope], dim=-1), torch.cat([k_nope, k_rope], dim=-1)
    out, lse = [], []
    pieces = (torch.split(q, new), torch.split(k, keys), torch.split(value, keys))
    for rows, k_rows, v_rows in zip(*pieces, strict=True):
        keep = torch.ones(len(rows), len(k_rows), dtype=torch.bool)
        result, sums = attend(
            rows.unsqueeze(0),
            k_rows.unsqueeze(0),
            v_rows.unsqueeze(0),
            (keep.tril() if is_causal else keep).unsqueeze(0),
            scale=scale,
        )
        out.append(result[0])
        lse.append(sums[0])
    return torch.cat(out), torch.cat(lse)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(f"RingMLA: {message}")


def _check_rows(nope: torch.Tensor, rope: torch.Tensor, heads: int, name: str) -> None:
    _check(nope.dtype in (torch.bfloat16, torch.float16), f"{name}_nope is bfloat16 or float16")
    _check(nope.dim() == 3 and nope.shape[1:] == (heads, NOPE), f"{name}_nope is [T, heads, 128]")
    _check(rope.dtype == nope.dtype, f"{name}_rope is of the dtype of {name}_nope")
    _check(rope.shape == (*nope.shape[:2], ROPE), f"{name}_rope is [T, heads, 64]")


def _lengths(seqlen: torch.Tensor) -> tuple[list[int], list[int]]:
    """Each request's queries and keys."""
    _check(seqlen.dtype == torch.int32 and seqlen.device.type == "cpu", "seqlen is int32, on host")
    _check(seqlen.dim() == 1 or seqlen.shape[0] == 2, "seqlen is [batch] or [2, batch]")
    new, keys = (seqlen.expand(2, -1) if seqlen.dim() == 1 else seqlen).tolist()
    _check(len(new) > 0 and min(new) > 0, "a request's queries should not be 0")
    _check(min(keys) > 0, "not documented: the result of a request without keys")
    fewer = any(k < q for q, k in zip(new, keys, strict=True))
    _check(not fewer, "a request's keys should not be fewer than its queries")
    return new, keys
