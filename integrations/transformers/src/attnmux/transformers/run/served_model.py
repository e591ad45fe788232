"""A model for a runner, with the parts that were found in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from attnmux.core import LayerSpec, LinearLayerSpec
from attnmux.transformers.draft.eagle_head import EagleHead
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.part import ModelPart


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedModel:
    """A model that calls attnmux for attention, on the device that it runs on."""

    module: PreTrainedModel | PackedDecoder
    """Loaded with attn_implementation="attnmux"; an encoder-decoder model as a `PackedDecoder`."""
    layers: Sequence[LayerSpec]
    """From `record_layers` or `record_decoder`, as its parts mark them."""
    parts: Sequence[ModelPart] = ()
    """Features beyond attention over all keys, bound."""

    @property
    def linear(self) -> tuple[LinearLayerSpec, ...]:
        """Layers without softmax attention."""
        return tuple(layer for part in self.parts for layer in part.linear)

    @property
    def head(self) -> EagleHead | None:
        """The model, if it is an EAGLE head, whose tokens join hidden states."""
        return self.module if isinstance(self.module, EagleHead) else None
