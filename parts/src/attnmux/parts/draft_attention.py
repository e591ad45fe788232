"""Verify steps in two parts: the call of each part, its shapes, and the attention among drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad

from attnmux.core import KVPool, LayerSpec
from attnmux.parts.part_attention import merge_into


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trees:
    """A step that verifies trees, as its two parts see it, apart from the pool."""

    lens: torch.Tensor
    """[B] int32: tokens of the prefix, but at least 1."""
    positions: torch.Tensor
    """[B] int64: of the prefix's last token."""
    sees_prefix: torch.Tensor
    """[B] bool: whether the prefix has a token."""
    visible: torch.Tensor
    """[B, d, d] bool: the drafts that each draft sees."""

    @classmethod
    def blank(cls, batch_size: int, width: int, device: torch.device) -> Trees:
        """Trees of requests with a prefix of one token. Each of `width` drafts sees the others."""
        return cls(
            lens=torch.ones(batch_size, dtype=torch.int32, device=device),
            positions=torch.zeros(batch_size, dtype=torch.int64, device=device),
            sees_prefix=torch.ones(batch_size, dtype=torch.bool, device=device),
            visible=torch.ones(batch_size, width, width, dtype=torch.bool, device=device),
        )


def sinks_as_heads(sinks: torch.Tensor, groups: int, drafts: int) -> torch.Tensor:
    """The sinks [Hq] of each of `drafts` tokens, [drafts * Hq] in the order of `as_heads`."""
    by_group = sinks.view(groups, 1, -1)
    return by_group.expand(-1, drafts, -1).reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftKeys:
    """Where a pool has K and V of a step's drafts, which it may have rounded."""

    k: torch.Tensor
    """[slots, Hkv, D] in the pool's dtype: the layer's buffer."""
    v: torch.Tensor
    """[slots, Hkv, Dv]; over latents, the first columns of `k`."""
    slots: torch.Tensor
    """[B * d] int64, of the buffers' rows."""
    k_scale: float
    v_scale: float

    @classmethod
    def of(cls, pool: KVPool, layer: LayerSpec, slots: torch.Tensor) -> DraftKeys:
        """slots: [B * d] int64, as the request table has them.

        Raises InvalidInput for a pool of 4-bit floats.
        """
        pool.check_whole_bytes("trees of drafts on a backend without masks")
        k = pool.get_key_buffer(layer.layer_id)
        is_latent = layer.kind == "mla"
        v = k[..., : layer.v_head_dim] if is_latent else pool.get_value_buffer(layer.layer_id)
        k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
        slots = pool.translate(slots, layer.layer_id)
        return cls(k=k, v=v, slots=slots, k_scale=k_scale, v_scale=v_scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SeenPrefixes:
    """Attention of a step's drafts to their prefixes, sinks included, as `as_heads` orders them.
    Rows of requests without a prefix hold anything."""

    out: torch.Tensor
    """[B, n * Hq, Dv] in the dtype of Q, for n drafts; a step may have fewer."""
    lse: torch.Tensor
    """[B, n * Hq] float32."""

    @staticmethod
    def as_heads(q: torch.Tensor, groups: int, width: int, drafts: int) -> torch.Tensor:
        """[B * width, Hq, D] to [B, drafts * Hq, D], the heads of one KV head together; absent
        drafts have zeros."""
        q = q.reshape(-1, width, groups, q.shape[1] // groups, q.shape[2])
        if width < drafts:
            q = pad(q, (0, 0, 0, 0, 0, 0, 0, drafts - width))
        return q.transpose(1, 2).reshape(q.shape[0], -1, q.shape[-1])

    @staticmethod
    def as_tokens(values: torch.Tensor, groups: int, width: int, drafts: int) -> torch.Tensor:
        """The inverse of `as_heads`, of [B, drafts * Hq] or [B, drafts * Hq, Dv]."""
        size, heads = values.shape[:2]
        by_draft = values.view(size, groups, drafts, heads // groups // drafts, *values.shape[2:])
        by_draft = by_draft[:, :, :width].transpose(1, 2)
        return by_draft.reshape(size * width, heads // drafts, *values.shape[2:])


class DraftAttention(Protocol):
    """A plugin's shared kernel `draft_attention`. Nothing synchronises, so that graphs can hold
    it."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: DraftKeys,
        seen: SeenPrefixes,
        trees: Trees,
        layer: LayerSpec,
        *,
        q_rope: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `attend_to_drafts`."""


def attend_to_drafts(
    q: torch.Tensor,
    keys: DraftKeys,
    seen: SeenPrefixes,
    trees: Trees,
    layer: LayerSpec,
    *,
    q_rope: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B * d, Hq, Dv] of each draft to its prefix and the drafts that it sees, in the
    dtype of Q.

    q: [B * d, Hq, D], over latents [B * d, Hq, Dv] with q_rope [B * d, Hq, Dr]. layer: the step's,
    whose sinks are in `seen`; they alone are the prefix of a request without one. lse: [B * d, Hq]
    float32, written if given.
    """
    groups, width = layer.tp_k_head_num, trees.visible.shape[1]
    has_prefix = trees.sees_prefix.unsqueeze(1)
    drafts = seen.lse.shape[1] // layer.tp_q_head_num
    absent: torch.Tensor | float = -torch.inf
    if layer.sinks is not None:
        absent = sinks_as_heads(layer.sinks, groups, drafts)
    seen_lse = torch.where(has_prefix, seen.lse, absent)
    seen_out = torch.where(has_prefix.unsqueeze(2), seen.out, 0)
    if q_rope is not None:
        q = torch.cat((q, q_rope), -1)
    k = KVPool.gather_rows(keys.k, keys.slots).float() * keys.k_scale
    v = KVPool.gather_rows(keys.v, keys.slots).float() * keys.v_scale
    prefixes, prefixes_lse = (
        SeenPrefixes.as_tokens(tensor, groups, width, drafts) for tensor in (seen_out, seen_lse)
    )
    return among_drafts(q, k, v, layer, trees.visible, prefixes, prefixes_lse, lse=lse)


def among_drafts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerSpec,
    visible: torch.Tensor,
    prefixes: torch.Tensor,
    prefixes_lse: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B * d, Hq, Dv] of each request's drafts to their prefixes, which was computed
    before, and to each other, in the dtype of Q.

    q: [B * d, Hq, D]. k: [B * d, Hkv, D], v: [B * d, Hkv, Dv], float32 and without a pool's scales.
    visible: [B, d, d] bool, the drafts that each draft sees. prefixes: [B * d, Hq, Dv] and its LSE
    [B * d, Hq] float32, sinks included. lse: [B * d, Hq] float32, written if given.
    """
    size, width, _ = visible.shape
    shape, heads = q.shape[:2], k.shape[1]
    queries = q.float().reshape(size, width, heads, q.shape[1] // heads, q.shape[2])
    k, v = (tensor.reshape(size, width, *tensor.shape[1:]) for tensor in (k, v))
    logits = torch.einsum("bihgc,bjhc->bhgij", queries, k) * layer.scaling
    if layer.logit_cap > 0:
        logits = torch.tanh(logits / layer.logit_cap) * layer.logit_cap
    logits = torch.where(visible.view(size, 1, 1, width, width), logits, -torch.inf)
    own_lse = logits.logsumexp(-1, keepdim=True)
    out = torch.einsum("bhgij,bjhc->bihgc", torch.exp(logits - own_lse), v)
    out = out.reshape(*shape, layer.v_head_dim)
    own_lse = own_lse.squeeze(-1).permute(0, 3, 1, 2).reshape(shape)
    merge_into(out, own_lse, prefixes, prefixes_lse)
    if lse is not None:
        lse.copy_(own_lse)
    return out.to(q.dtype)
