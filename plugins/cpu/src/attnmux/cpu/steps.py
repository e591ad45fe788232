"""A step as both backends of this plugin read it: lengths, keys, and the keys each query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import limited_drafts

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnmux.core import AttentionCall, ForwardBatch, KVPool, LayerSpec

    Read = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """Converts a length, given on the device and, if the batch has it, on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """Which keys a layer's queries may see, and where those keys are."""

    window: int
    """See `LayerSpec.sliding_window_size`."""
    chunk: int
    """See `LayerSpec.attention_chunk_size`."""
    is_causal: bool
    """False: a query sees all keys of its request, or of its chunk."""
    is_cross: bool
    """A query sees all of the encoder's keys and no others."""
    in_call: bool
    """The keys are the call's own k and v, without a prefix."""

    @classmethod
    def of(cls, layer: LayerSpec, *, in_call: bool) -> KeyRule:
        return cls(
            window=layer.sliding_window_size,
            chunk=layer.attention_chunk_size,
            is_causal=layer.is_causal,
            is_cross=layer.is_cross_attention,
            in_call=in_call,
        )

    def bounds(
        self, position: torch.Tensor, num_keys: torch.Tensor, *, masked: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first key that each query sees and one past the last, int64, in any shape.

        position: the query's position in its sequence. num_keys: keys of the query's request, in
        the shape of `position`. masked: a custom mask replaces causality.
        """
        first, end = torch.zeros_like(position), num_keys
        if self.is_cross:
            return first, end
        if self.is_causal and not masked:
            end = torch.minimum(end, position + 1)
        if self.window >= 0:
            first = (position - self.window).clamp_(min=0)
        if self.chunk > 0:
            chunk_start = position // self.chunk * self.chunk
            first = torch.maximum(first, chunk_start)
            end = torch.minimum(end, chunk_start + self.chunk)
        return first, end


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftKeys:
    """The keys that the drafts of trees see. Windows and chunks count positions, and a draft's is
    the prefix's length plus its depth."""

    visible: torch.Tensor
    """[B, d, d] bool: the drafts that each draft sees."""
    first: torch.Tensor
    """[B, d] int64: the first key of the prefix that it sees."""

    @classmethod
    def of(cls, rule: KeyRule, batch: ForwardBatch) -> DraftKeys:
        """The keys of a step with `SpecInput.visible` or its bits, on the device."""
        prefix = batch.seq_lens.long()
        visible, first = limited_drafts(
            batch.visible_drafts(),
            torch.zeros_like(prefix) if rule.in_call else prefix,
            window=rule.window,
            chunk=rule.chunk,
        )
        return cls(visible=visible, first=first)


def draft_keys(rule: KeyRule, batch: ForwardBatch) -> DraftKeys | None:
    """None for other steps, cross attention and whole masks."""
    is_tree = batch.masks_drafts and not rule.is_cross
    return DraftKeys.of(rule, batch) if is_tree else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLens:
    """Lengths of a step's requests, [B] integers."""

    new: torch.Tensor
    """New tokens."""
    cached: torch.Tensor
    """Tokens before the new ones; -1 for a decoding request of length 0."""
    encoder: torch.Tensor
    """Encoder tokens, whose slots come first in the request's row; 0 without an encoder."""

    @classmethod
    def on_device(cls, batch: ForwardBatch) -> StepLens:
        """The lengths as int64. Raises InvalidInput for an extend step without its lengths."""
        return cls._read(batch, lambda values, mirror: values.long())

    @classmethod
    def on_host(cls, batch: ForwardBatch) -> StepLens:
        """The lengths on the host: one synchronisation for each that the batch has no mirror of.

        Raises InvalidInput for an extend step without its lengths.
        """
        return cls._read(batch, lambda values, mirror: values.cpu() if mirror is None else mirror)

    @classmethod
    def _read(cls, batch: ForwardBatch, read: Read) -> StepLens:
        if batch.forward_mode.is_decode():
            cached = read(batch.seq_lens, batch.seq_lens_cpu) - 1
            new = torch.ones_like(cached)
        else:
            new, cached = batch.extend_lens()
            new = read(new, batch.extend_seq_lens_cpu)
            cached = read(cached, batch.extend_prefix_lens_cpu)
        lens = batch.encoder_lens
        encoder = torch.zeros_like(new) if lens is None else read(lens, None)
        return cls(new=new, cached=cached, encoder=encoder)


def keys_and_values(
    call: AttentionCall, pool: KVPool, *, in_call: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """K [n, Hkv, D] and V [n, Hkv, Dv]: the call's own, or the layer's buffers in the pool.

    V is None for MLA, where it is the front of K.
    """
    layer = call.layer
    if not in_call or call.k is None:
        values = None if layer.kind == "mla" else pool.get_value_buffer(layer.layer_id)
        return pool.get_key_buffer(layer.layer_id), values
    if call.k_rope is not None:
        return torch.cat([call.k, call.k_rope], dim=-1), None
    return call.k, call.v


def mask_starts(keep: torch.Tensor, new: torch.Tensor, num_keys: torch.Tensor) -> torch.Tensor:
    """[B] int64: where each request's part of the flat custom mask begins, maybe past 2**31.

    new, num_keys: [B]. Raises InvalidInput for a mask whose size is not that of the step.
    """
    sizes = new.long() * num_keys
    ends = sizes.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    if keep.dtype != torch.bool or keep.shape != (total,):
        raise InvalidInput(
            "custom_mask",
            got=f"{keep.dtype} of shape {tuple(keep.shape)}",
            expected=f"bool of shape ({total},): new tokens * keys, summed over the requests",
        )
    return ends - sizes
