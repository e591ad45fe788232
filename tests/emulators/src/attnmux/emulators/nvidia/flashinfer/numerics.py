"""The arithmetic of the kernels, in static shapes and without a host read."""

from __future__ import annotations

import math

import torch

from attnmux.emulators.nvidia.dense import finite_values
from attnmux.emulators.nvidia.flashinfer.arguments import refuse

LEAST = torch.finfo(torch.float32).min
"""What exponents are counted from in a row without keys, so that none is infinity less infinity."""

MAX_THREADS = 1024
"""Most threads of a block."""

KEY_TILE = 32
"""Keys that fa2 goes on by: of its tiles the smallest, on SM86 and SM89 where a block has 128 rows
of 128 dims; on SM90 it is 64."""


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge a state into another; all heads of a token are one block of threads."""
    refuse(mask)
    for name, tensor in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    head_dim = v.shape[2]
    vec = max(16 // v.element_size(), head_dim // 32)
    if v.shape[1] * (head_dim // vec) > MAX_THREADS:
        raise RuntimeError("MergeStateInPlace kernel launch failed: invalid configuration argument")
    top = torch.maximum(s, s_other)
    mine, others = (torch.exp2(each - top.clamp(min=LEAST)) for each in (s, s_other))
    total = mine + others
    shares = [torch.where(total > 0, each / total, 0).unsqueeze(-1) for each in (mine, others)]
    v.copy_(v.float() * shares[0] + v_other.float() * shares[1])
    s.copy_(top + total.log2())


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    loads: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [T, Hq, D]. k: [S, Hkv, D]. v: [S, Hkv, Dv]. keep: [T, S]. loads: [T, S], the keys of a
    row's request, whose V spoils the row where it is not finite. sinks: [Hq], logits that take part
    in a row's sum alone, as in `attention_sink_fa2_decl`. Returns out [T, Hq, Dv] in the dtype of
    q, and base-2 LSE [T, Hq] in float32."""
    num_rows, num_heads, head_dim = q.shape
    grouped = q.view(num_rows, k.shape[1], -1, head_dim)
    logits = torch.einsum("thgd,shd->thgs", grouped, k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = torch.where(keep[:, None, None], logits, -math.inf) / math.log(2)
    # A step may have no key, and torch has no largest value of none
    none = logits.new_full((*logits.shape[:-1], 1), LEAST)
    top = logits.amax(-1, keepdim=True).clamp(min=LEAST) if len(k) else none
    extra = torch.zeros_like(top)
    if sinks is not None:
        sink = sinks.to(q.dtype).view(1, k.shape[1], -1, 1) / math.log(2)
        top = torch.maximum(top, sink)
        extra = torch.exp2(sink - top)
    weights = torch.exp2(logits - top)
    total = weights.sum(-1, keepdim=True) + extra
    v, spoilt = finite_values(v, loads)
    out = torch.einsum("thgs,shd->thgd", weights, v) / total.clamp(min=1e-30)
    out = out.masked_fill(spoilt.view(-1, 1, 1, 1), math.nan)
    lse = torch.where(total > 0, top + total.log2(), -math.inf)
    return out.flatten(1, 2), lse.float().view(num_rows, num_heads)


def segments(indptr: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The segment of each of `length` places, B past the last, and the place in it."""
    order = torch.arange(length, device=indptr.device)
    segment = torch.searchsorted(indptr[1:].long(), order, right=True)
    return segment, order - indptr.long()[segment]


def mask_bits(
    mask: tuple[torch.Tensor, torch.Tensor],
    request: torch.Tensor,
    place: torch.Tensor,
    key_place: torch.Tensor,
    kv_lens: torch.Tensor,
) -> torch.Tensor:
    """[rows, keys] bool: bit q * kv_len + k of the request's bytes."""
    packed, indptr = mask
    bit = place.unsqueeze(1) * kv_lens[request].unsqueeze(1) + key_place
    byte = indptr[:-1].long()[request].unsqueeze(1) + bit // 8
    return (packed[byte.clamp(0, len(packed) - 1)] >> (bit % 8)) & 1 == 1


def item_keep(
    items: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    request: torch.Tensor,
    position: torch.Tensor,
    key_place: torch.Tensor,
) -> torch.Tensor:
    """[rows, keys] bool: what a token sees of a prefix and its own item. items: [B] lengths of the
    prefix, [B, width] places in an item and [B] the largest of these.

    As `logits_mask_multi_item_scoring`: after the prefix a token at place p sees p keys, of which
    its own is the last. Keys further back than the largest place are skipped, counted from a tile's
    first token, which is rounded up.
    """
    prefix_lens, places, longest = (values.long() for values in items)
    prefix = prefix_lens[request].unsqueeze(1)
    token, column = position.unsqueeze(1), position - prefix_lens[request]
    place = places[request, column.clamp(0, places.shape[1] - 1)].unsqueeze(1)
    own = (token < key_place + place) & (token + 1 <= key_place + longest[request].unsqueeze(1))
    return (key_place <= token) & ((token < prefix) | (key_place < prefix) | own)


def loaded_past_the_end(
    items: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    request: torch.Tensor,
    position: torch.Tensor,
    kv_lens: torch.Tensor,
) -> torch.Tensor:
    """[rows]: the place where the V that is loaded for a row ends, where that is after its keys;
    else 0.

    From the prefix on the paged kernel of fa2 skips to the tile that begins the largest place
    before the row. It looks for the end of the keys as though it had skipped nothing
    (`page_produce_kv` is given `(iter + 1) * CTA_TILE_KV`), so where that tile is the last one it
    loads all of it, and multiplies V after the end by 0.
    """
    prefix_lens, _, longest = (values.long() for values in items)
    first = (position + 1 - longest[request]).clamp(min=0) // KEY_TILE
    of_prefix = (torch.minimum(prefix_lens[request], position + 1) + KEY_TILE - 1) // KEY_TILE
    end = (first + 1) * KEY_TILE
    skips = (of_prefix > 0) & (first > of_prefix)
    return torch.where(skips & (end > kv_lens[request]), end, 0)


def pack_bits(mask: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`segment_packbits`, little: bytes, and where each request's begin."""
    flat, start, parts = mask.contiguous().view(-1), 0, []
    weights = 2 ** torch.arange(8, device=mask.device)
    for end in ends.tolist():
        bits = flat[start:end]
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        parts.append((bits * weights).sum(1).to(torch.uint8))
        start = end
    sizes = torch.tensor([0, *(len(part) for part in parts)], device=mask.device)
    return torch.cat(parts), sizes.cumsum(0).to(torch.int32)
