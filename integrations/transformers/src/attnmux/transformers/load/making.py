"""A runner for a model whose layers are recorded and whose backend is decided."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from attnmux.core import Decision, LayerSpec
from attnmux.transformers.load.options import RunnerOptions
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.part import ModelPart
from attnmux.transformers.run.capacity import Capacity
from attnmux.transformers.run.pieces import usual_sizes
from attnmux.transformers.run.runner import ModelRunner
from attnmux.transformers.run.served_model import ServedModel


def make_runner(
    model: PreTrainedModel | PackedDecoder,
    layers: Sequence[LayerSpec],
    decision: Decision,
    options: RunnerOptions,
    parts: Sequence[ModelPart] = (),
    max_encoder_len: int = 0,
) -> ModelRunner:
    """The runner of `model`, whose recorded `layers` run on the decided backend.

    parts: those of the model, bound. max_encoder_len: 0 without an encoder. Raises as `ModelRunner`
    does.
    """
    if options.check is not None:
        options.check(decision)
    served = ServedModel(module=model, layers=layers, parts=parts)
    capacity = Capacity(
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        max_total_tokens=options.max_total_tokens,
        spare_pages=options.spare_pages,
        memory=options.memory,
        max_encoder_len=max_encoder_len,
        kept_states=options.max_batch_size if options.kept_states is None else options.kept_states,
        window_step_tokens=options.window_step_tokens,
        piece_tokens=_piece_tokens(decision, options),
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


def _piece_tokens(decision: Decision, options: RunnerOptions) -> int:
    """The most tokens of steps that are going to be captured in pieces."""
    if options.graph is False or not decision.request.graph or options.ranks.size > 1:
        return 0
    usual = usual_sizes(options.max_batch_size * options.max_context_len)
    return max(usual if options.piece_sizes is None else options.piece_sizes, default=0)
