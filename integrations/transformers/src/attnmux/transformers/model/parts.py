"""The parts that a model may have, each of which is served in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from attnmux.transformers.model.dual_chunks import DualChunks
from attnmux.transformers.model.hidden_states import HiddenStates
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.mixers.mixers import Mixers
from attnmux.transformers.model.part import ModelPart
from attnmux.transformers.model.sparse.compressors import Compressors
from attnmux.transformers.model.sparse.indexers import Indexers

if TYPE_CHECKING:
    from attnmux.transformers.load.options import RunnerOptions

KINDS: tuple[type[ModelPart], ...] = (
    Mixers,
    Indexers,
    Compressors,
    HiddenStates,
    DualChunks,
    ImageReader,
)


def parts_of(model: PreTrainedModel, options: RunnerOptions) -> tuple[ModelPart, ...]:
    """The parts of a loaded model, bound. Raises InvalidInput as `ModelPart.find` does."""
    parts = tuple(part for kind in KINDS if (part := kind.find(model, options)) is not None)
    for part in parts:
        part.bind()
    return parts
