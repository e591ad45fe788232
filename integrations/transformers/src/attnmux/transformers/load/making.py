"""A runner for a model whose layers are recorded and whose backend is decided."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from attnmux.core import Decision, LayerSpec, LinearLayerSpec
from attnmux.transformers.draft.eagle_head import EagleHead
from attnmux.transformers.load.options import RunnerOptions
from attnmux.transformers.model.dual_chunks import DualChunks
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.sparse.compressors import Compressors
from attnmux.transformers.model.sparse.indexers import Indexers
from attnmux.transformers.run.capacity import Capacity
from attnmux.transformers.run.runner import ModelRunner
from attnmux.transformers.run.served_model import ServedModel


def make_runner(
    model: PreTrainedModel | PackedDecoder,
    layers: Sequence[LayerSpec],
    decision: Decision,
    options: RunnerOptions,
    max_encoder_len: int = 0,
    linear: Sequence[LinearLayerSpec] = (),
    indexers: Indexers | None = None,
    compressors: Compressors | None = None,
    chunks: DualChunks | None = None,
    images: ImageReader | None = None,
    head: EagleHead | None = None,
) -> ModelRunner:
    """The runner of `model`, whose recorded `layers` run on the decided backend.

    max_encoder_len: 0 without an encoder. linear, indexers, compressors, chunks, images: those of
    the model, bound. head: `model` itself, where it is an EAGLE head. Raises as `ModelRunner` does.
    """
    window_step_tokens = options.window_step_tokens
    if images is not None and images.has_spans:
        # A window pool might have too little room for tokens that run in one step
        window_step_tokens = None
    if options.check is not None:
        options.check(decision)
    served = ServedModel(
        module=model,
        layers=layers,
        linear=linear,
        indexers=indexers,
        compressors=compressors,
        chunks=chunks,
        keeps_hidden=options.hidden_states,
        hidden_layers=options.hidden_layers,
        head=head,
        images=images,
    )
    capacity = Capacity(
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        max_total_tokens=options.max_total_tokens,
        spare_pages=options.spare_pages,
        memory=options.memory,
        max_encoder_len=max_encoder_len,
        kept_states=options.max_batch_size if options.kept_states is None else options.kept_states,
        window_step_tokens=window_step_tokens,
    )
    return ModelRunner(
        served,
        decision,
        capacity,
        launches=options.launches,
        debug=options.debug,
        wrap=options.wrap,
        ranks=options.ranks,
    )
