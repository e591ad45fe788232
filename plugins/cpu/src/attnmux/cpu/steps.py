"""What both backends of this plugin ask of a step: its lengths, and a layer's rule for its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec

    Read = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """A length as it is on the device, and its host mirror, as it is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRule:
    """Which keys a layer's queries may see, and where those keys are."""

    window: int
    """As `LayerSpec.sliding_window_size`."""
    chunk: int
    """As `LayerSpec.attention_chunk_size`."""
    is_causal: bool
    """False: every query sees all of its request's keys, or all of its chunk."""
    is_cross: bool
    """Every query sees all of the encoder's keys, and no other."""
    in_call: bool
    """The keys are the call's own k and v; there is no prefix."""

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
        """The first key that each query sees and one past the last, of any shape, int64.

        position: the query's place in its sequence. num_keys: of its request, of `position`'s
        shape. masked: a custom mask says what causality would.
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
class StepLens:
    """Lengths of a step's requests, [B] integers."""

    new: torch.Tensor
    """New tokens."""
    cached: torch.Tensor
    """Tokens before them; -1 for a decoding request of length 0."""
    encoder: torch.Tensor
    """Encoder tokens, which come first in the request's row; 0 without an encoder."""

    @classmethod
    def on_device(cls, batch: ForwardBatch) -> StepLens:
        """In int64. Raises InvalidInput for an extend step without its lengths."""
        return cls._read(batch, lambda values, mirror: values.long())

    @classmethod
    def on_host(cls, batch: ForwardBatch) -> StepLens:
        """Synchronises once for each length without a host mirror on the batch.

        Raises InvalidInput for an extend step without its lengths.
        """
        return cls._read(batch, lambda values, mirror: values.cpu() if mirror is None else mirror)

    @classmethod
    def _read(cls, batch: ForwardBatch, read: Read) -> StepLens:
        if batch.forward_mode.is_decode():
            cached = read(batch.seq_lens, batch.seq_lens_cpu) - 1
            new = torch.ones_like(cached)
        elif batch.extend_seq_lens is None or batch.extend_prefix_lens is None:
            raise InvalidInput(
                "extend_seq_lens", came=None, expected="new and cached lengths in an extend step"
            )
        else:
            new = read(batch.extend_seq_lens, batch.extend_seq_lens_cpu)
            cached = read(batch.extend_prefix_lens, batch.extend_prefix_lens_cpu)
        lens = batch.encoder_lens
        return cls(
            new=new,
            cached=cached,
            encoder=torch.zeros_like(new) if lens is None else read(lens, None),
        )
