"""`npu_ring_mla` for prompts of MLA with expanded heads, of 128 + 64 dims and V of 128.

V of 192 takes two calls, of 128 columns and of the others: a card cannot ask for V of 128 alone.

New tokens attend to themselves causally. The cached prefix follows in parts. The operator adds each
to the result so far by its LSE. Its keys are packed, so that keys of a pool are gathered first.
`ChunkedPrefixBackend` brings the parts of MLA's prompts with the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnmux.ascend.host_lens import HostLens
from attnmux.ascend.npu_kernels import NPUKernels
from attnmux.ascend.ring_parts import RingPart, prefix_parts
from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput, KVPool
from attnmux.core.plugin import LibraryBackend

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

NOPE, ROPE = 128, 64
"""Dims of K without rotary positions, and of its rotary part. V has as many as the first."""
V_DIMS = (NOPE, NOPE + ROPE)
DTYPE = torch.bfloat16
"""The values of its mask in float16 are not documented."""
MASK_SIZE = 512
MOST_HEADS = 128
CHUNK_BYTES = 1 << 29
"""Memory for the gathered K and V of a part of the prefix."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingLayer:
    """A layer as the operator takes it."""

    kv: tuple[torch.Tensor, torch.Tensor] | None
    """K [slots, H, 192] and V [slots, H, Dv]; None for a layer that the pool does not store."""


@dataclass(kw_only=True, slots=True, eq=False)
class RingStep:
    """A step of prompts."""

    lens: HostLens
    own: RingPart | None
    """The new tokens, which see each other causally."""
    prefix: tuple[RingPart, ...]
    encoder: RingPart | None
    """The encoder's tokens, which cross attention sees."""
    slots: dict[RingPart, torch.Tensor] = field(default_factory=dict)
    """The keys of each part in the request table, [m] int64. Set by `fill_step`."""


class AscendRingBackend(LibraryBackend[NPUKernels, RingLayer, RingStep, None]):
    """Prompts alone: in decode, MLA attends to latents."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: NPUKernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the operator does not serve."""
        super().__init__(context, options, kernels)
        ones = torch.ones((MASK_SIZE, MASK_SIZE), dtype=DTYPE, device=context.device)
        self._mask = ones.triu(1)
        heads = max(layer.tp_q_head_num for layer in context.layers)
        self._chunk_keys = CHUNK_BYTES // (heads * (NOPE + ROPE + NOPE) * DTYPE.itemsize)
        self._has_encoder = any(layer.is_cross_attention for layer in context.layers)

    def prepare_layer(self, layer: LayerSpec) -> RingLayer:
        layer.check_features("cross_attention", kind="mha")
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        dims = layer.qk_head_dim, layer.v_head_dim
        is_served = dims[0] == NOPE + ROPE and dims[1] in V_DIMS
        if not is_served or heads != kv_heads or heads > MOST_HEADS:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"dims {dims[0]} and {dims[1]}, {heads} heads on {kv_heads}",
                expected=f"K of {NOPE + ROPE} and V of {NOPE} or {NOPE + ROPE}; at most "
                f"{MOST_HEADS} heads, each with K and V of its own",
            )
        if not layer.is_causal:
            raise InvalidInput(f"layer {layer.layer_id}", got="an encoder's", expected="causal")
        pool = self.context.token_to_kv_pool
        if layer.layer_id not in pool.layer_ids:
            return RingLayer(kv=None)
        if pool.dtype != DTYPE:
            raise InvalidInput("token_to_kv_pool", got=pool.dtype, expected=str(DTYPE))
        return RingLayer(kv=pool.get_kv_buffer(layer.layer_id))

    def plan_step(self, batch: ForwardBatch, buffers: None) -> RingStep:
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            raise InvalidInput("forward_mode", got=batch.forward_mode.name, expected="EXTEND")
        lens, device = HostLens.of(batch), self.context.device
        # Encoder lengths have no mirror on the host
        encoder = (0,) * len(lens.new)
        if self._has_encoder and batch.encoder_lens is not None:
            encoder = tuple(batch.encoder_lens.tolist())
        cached = [keys - new for keys, new in zip(lens.keys, lens.new, strict=True)]
        ends = [before + more for before, more in zip(encoder, cached, strict=True)]
        return RingStep(
            lens=lens,
            own=RingPart.of(lens.new, ends, lens.new, device),
            prefix=tuple(
                prefix_parts(lens.new, encoder, cached, most=self._chunk_keys, device=device)
            ),
            encoder=RingPart.of(lens.new, (0,) * len(encoder), encoder, device),
        )

    def fill_step(self, step: RingStep, batch: ForwardBatch) -> None:
        if any(layer.kv is not None for layer in self._layers.values()):
            table = self.context.req_to_token_pool
            parts = (step.own, *step.prefix, step.encoder)
            step.slots = {part: part.slots(batch, table) for part in parts if part is not None}

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> None:
        raise GraphUnsupported(
            "eager prompts: they have lengths on the host, which graphs do not read"
        )

    def attend(
        self, call: AttentionCall, layer: RingLayer, step: RingStep, batch: ForwardBatch
    ) -> torch.Tensor:
        if call.q.dtype != DTYPE:
            raise InvalidInput("q", got=call.q.dtype, expected=str(DTYPE))
        if call.layer.is_cross_attention:
            parts = [step.encoder]
        elif call.has_own_kv:
            parts = [step.own]
        else:
            parts = [step.own, *step.prefix]
        rows, count, v_dim = call.q.shape[0], step.lens.num_queries, call.layer.v_head_dim
        out = call.q.new_zeros((count, call.q.shape[1], -(-v_dim // NOPE) * NOPE))
        lse = out.new_full((out.shape[1], count), -torch.inf, dtype=torch.float32)
        for number, part in enumerate(part for part in parts if part is not None):
            k, v = self._keys(call, layer, step, part)
            self._add(call, part, (k, v), (out, lse), is_first=number == 0)
        if call.lse is not None:
            call.lse[:count] = lse.T
            call.lse[count:] = -torch.inf
        out = out[..., :v_dim]
        return out if count == rows else pad(out, (0, 0, 0, 0, 0, rows - count))

    def _keys(
        self, call: AttentionCall, layer: RingLayer, step: RingStep, part: RingPart
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [m, H, 192] and V [m, H, Dv] of a part."""
        if call.has_own_kv:
            k, v = call.own_keys(call.v)
            if part.places is not None:
                return k[part.places], v[part.places]
            total = sum(part.lens)
            return k[:total], v[:total]
        if layer.kv is None:
            raise call.layer.not_in_pool()
        slots = self.context.token_to_kv_pool.translate(step.slots[part], call.layer.layer_id)
        return KVPool.gather_rows(layer.kv[0], slots), KVPool.gather_rows(layer.kv[1], slots)

    def _add(
        self,
        call: AttentionCall,
        part: RingPart,
        keys: tuple[torch.Tensor, torch.Tensor],
        so_far: tuple[torch.Tensor, torch.Tensor],
        *,
        is_first: bool,
    ) -> None:
        """Add attention to a part's keys to `so_far`, the result [T, H, 128 or 256] and the LSE
        [H, T]."""
        (k, v), (out, lse) = keys, so_far
        rows = slice(len(out)) if part.rows is None else part.rows
        q, is_causal = call.q[rows], is_first and not call.layer.is_cross_attention
        if v.shape[-1] < out.shape[-1]:
            v = pad(v, (0, out.shape[-1] - v.shape[-1]))
        heads, before, sums = q.shape[1], None if is_first else lse[:, rows].contiguous(), lse
        for first in range(0, out.shape[-1], NOPE):
            columns = slice(first, first + NOPE)
            out[rows, :, columns], sums = self.kernels.ring_mla(
                q_nope=q[..., :NOPE].contiguous(),
                q_rope=q[..., NOPE:].contiguous(),
                k_nope=k[..., :NOPE].contiguous(),
                k_rope=k[..., NOPE:].contiguous(),
                value=v[..., columns].contiguous(),
                mask=self._mask,
                seqlen=part.seqlen,
                head_num=heads,
                kv_head_num=heads,
                pre_out=None if is_first else out[rows, :, columns].contiguous(),
                prev_lse=before,
                qk_scale=call.layer.scaling,
                kernel_type="kernel_type_high_precision",
                mask_type="mask_type_triu" if is_causal else "no_mask",
                input_layout="type_bsnd",
                calc_type="calc_type_first_ring" if is_first else "calc_type_default",
            )
        lse[:, rows] = sums
