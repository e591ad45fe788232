"""How the steps of a case are run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch
from attnmux.testing.builders import LayerInput, PreparedStep
from attnmux.testing.comparison import Disagreement
from attnmux.testing.world import World


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerOutput:
    """What one layer's call produced."""

    out: torch.Tensor
    lse: torch.Tensor | None
    num_defined_rows: int
    """Rows that have to be finite."""


class Execution(ABC):
    """Runs the steps of one case on one backend."""

    def __init__(self, world: World, backend: AttentionBackend, *, host_lens: bool) -> None:
        """Made before the first step is prepared. host_lens: batches carry host mirrors."""
        self.world = world
        self.backend = backend

    @property
    def pads(self) -> bool:
        """Whether rows of no request may be added to a step."""
        return False

    @abstractmethod
    def run(self, step: PreparedStep) -> list[LayerOutput]:
        """Prepare the step's metadata and call every layer."""


class EagerExecution(Execution):
    """Calls the backend as it stands."""

    def run(self, step: PreparedStep) -> list[LayerOutput]:
        self.backend.init_forward_metadata(step.batch)
        outputs = []
        for index, given in enumerate(step.inputs):
            outputs.append(
                call_layer(
                    self.world, self.backend, given, step.batch, step.num_request_tokens, index
                )
            )
            _check_picks(given, step.batch)
        return outputs


def _check_picks(given: LayerInput, batch: ForwardBatch) -> None:
    wrote, picks = given.topk_indices, batch.topk_indices
    if wrote is not None and picks is not None and not torch.equal(wrote, picks):
        raise Disagreement(
            f"layer {given.layer.layer_id}: topk_indices was written, and a backend only reads it"
        )


def call_layer(
    world: World,
    backend: AttentionBackend,
    given: LayerInput,
    batch: ForwardBatch,
    num_request_tokens: int,
    index: int,
) -> LayerOutput:
    """Let the layer's indexer write, then call the layer, every other one with an `out` of the
    caller's.

    num_request_tokens: rows that belong to requests; a kernel need not reach those behind.
    """
    layer, with_lse = given.layer, world.case.lse
    if given.topk_indices is not None and batch.topk_indices is not None:
        batch.topk_indices.copy_(given.topk_indices)
    shape = (*given.q.shape[:2], layer.v_head_dim)
    out, lse, num_defined_rows = None, None, num_request_tokens
    if index % 2 == 0:
        out = given.q.new_full(shape, torch.nan)
        out[num_request_tokens:] = 0
        num_defined_rows = len(out)
    if with_lse:
        lse = torch.full(shape[:2], torch.nan, dtype=torch.float32, device=given.q.device)
    result = backend.forward(
        given.q,
        given.k,
        given.v,
        layer,
        batch,
        world.case.save_kv_cache,
        q_rope=given.q_rope,
        k_rope=given.k_rope,
        out=out,
        lse=lse,
    )
    if out is not None and result.data_ptr() != out.data_ptr():
        raise Disagreement(f"layer {layer.layer_id}: out was given and another tensor came back")
    return LayerOutput(out=result, lse=lse, num_defined_rows=num_defined_rows)
