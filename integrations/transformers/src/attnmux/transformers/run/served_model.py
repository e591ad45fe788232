"""What a runner runs: a model, and what was found in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from attnmux.core import LayerSpec, LinearLayerSpec
from attnmux.transformers.draft.eagle_head import EagleHead
from attnmux.transformers.model.dual_chunks import DualChunks
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.sparse.compressors import Compressors
from attnmux.transformers.model.sparse.indexers import Indexers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ServedModel:
    """A model that calls attnmux for attention, on the device that it runs on."""

    module: PreTrainedModel | PackedDecoder
    """Loaded with attn_implementation="attnmux"; an encoder-decoder model as a `PackedDecoder`."""
    layers: Sequence[LayerSpec]
    """From `record_layers` or `record_decoder`."""
    linear: Sequence[LinearLayerSpec] = ()
    """The layers of the model's mixers."""
    indexers: Indexers | None = None
    """Those of the model, bound, where they pick."""
    compressors: Compressors | None = None
    """Those of the model, bound."""
    chunks: DualChunks | None = None
    """Those of the model, bound, where its context has several."""
    keeps_hidden: bool = False
    """Whether the hidden states of cached tokens are kept: see `HiddenStates`."""
    hidden_layers: Sequence[int] = ()
    """The layers whose outputs these are; none: the last hidden states."""
    head: EagleHead | None = None
    """The model, where it is an EAGLE head, whose tokens join hidden states."""
    images: ImageReader | None = None
    """Reads the images of prompts, on a backend of its own; None for text alone."""
