"""Prompts in pieces: which models run so, and when a number of tokens is captured."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnmux.core import (
    AttentionBackend,
    DeviceGraphs,
    ForwardBatch,
    GraphUnsupported,
    PieceRunner,
)
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.repeated import has_numbered_calls
from attnmux.transformers.options import usual_pieces
from attnmux.transformers.run.memory import ServedModel

LOG = logging.getLogger(__name__)

CAPTURED_AT = 16
"""The step of a size that captures it. A capture takes as long as 13 to 29 eager steps of a model
of 3 B gain (benchmarks/results/prompts-h200.md)."""

INPUT = "input_ids"


class PromptPieces:
    """Steps over prompts, whose sizes are captured once enough steps had them.

    A size takes longer to capture than an eager step, which a few prompts would not gain back. The
    largest is captured at the start: it takes nearly all the memory, and shows whether the model
    can be captured.
    """

    def __init__(self, pieces: PieceRunner) -> None:
        self.runner = pieces
        self._steps: Counter[int] = Counter()
        """Eager steps, by size."""

    def serves(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], num_rows: int
    ) -> bool:
        """Whether a step runs in pieces. Step `CAPTURED_AT` of a size captures them."""
        size = self.runner.size_for(batch, num_rows)
        if size is None or inputs.keys() != {INPUT}:
            return False
        if self.runner.is_captured(size):
            return True
        self._steps[size] += 1
        if self._steps[size] != CAPTURED_AT:
            return False
        try:
            self.runner.capture(size)
        except GraphUnsupported as error:  # memory may be short now; it is not tried again
            LOG.warning("steps of up to %s prompt tokens run eagerly: %s", size, error)
            return False
        return True

    def replay(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor
    ) -> Any:  # noqa: ANN401  # as the model's call returns it
        """The logits after the tokens at `keep`: see `PieceRunner.replay`."""
        return self.runner.replay(batch, inputs[INPUT], keep)


def make_pieces(
    model: ServedModel,
    backend: AttentionBackend,
    forward: PieceRunner.Forward,
    *,
    sizes: Sequence[int] | None,
    devices: DeviceGraphs | None,
    num_ranks: int,
) -> PromptPieces:
    """See `ModelRunner.capture_pieces`. forward: as `PieceRunner` takes it."""
    check_pieces(model, num_ranks)
    context = backend.context
    usual = usual_pieces(context.max_batch_size * context.max_context_len)
    runner = PieceRunner(
        backend,
        forward,
        sizes=sizes or usual,
        max_rows=context.max_batch_size,
        devices=devices or DeviceGraphs.of(context.device),
    )
    runner.capture(None if sizes else usual[-1])
    return PromptPieces(runner)


def check_pieces(model: ServedModel, num_ranks: int) -> None:
    """Raise GraphUnsupported for a model whose steps over prompts cannot run in pieces."""
    reasons = [part.unpieced for part in model.parts if part.unpieced is not None]
    if isinstance(model.module, PackedDecoder):
        reasons.append("an encoder, whose states each step has another number of")
    if model.head is not None:
        reasons.append("hidden states of another model among its inputs")
    if has_numbered_calls(model.module):
        reasons.append("layers that attend again, whose calls are counted in each step")
    if num_ranks > 1:
        reasons.append(f"{num_ranks} ranks, which would have to capture together")
    if reasons:
        raise GraphUnsupported(f"no pieces of a model with {' and '.join(reasons)}")
