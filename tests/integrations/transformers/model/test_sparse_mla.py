"""Runs sparse MLA as an engine does: the model has its own indexer, whose keys live in a cache next
to the pool, and graphs replay both with the layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import GraphConfig, GraphRunner, ModelInput
from attnmux.testing import (
    Case,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    fake_platform,
    make_setup,
    prepare_step,
    reference,
)
from attnmux.transformers.model.sparse.ranking import best_keys, index_scores

INDEX_HEADS, INDEX_DIM, TOPK = 3, 16, 24
LATENT = {
    "kind": "nsa",
    "num_q_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "index_topk": TOPK,
    "kv_in_pool": True,
}


class Model:
    """MLA layers, each with an indexer whose keys are cached by slot."""

    def __init__(self, setup, backend) -> None:
        self.setup, self.backend = setup, backend
        slots = setup.context.token_to_kv_pool.num_slots
        self.index_keys = [torch.randn(slots, INDEX_DIM) for _ in setup.context.layers]

    def forward(self, batch, inputs):
        table = self.setup.context.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices].long()
        outputs = []
        for layer, keys in zip(self.setup.context.layers, self.index_keys, strict=True):
            scores = index_scores(
                inputs["index_q"].unsqueeze(1),
                keys[slots],
                inputs["index_weights"].unsqueeze(1),
            )
            picks = best_keys(scores, batch.positions.unsqueeze(1), TOPK)
            batch.topk_indices.copy_(picks.squeeze(1))
            outputs.append(
                self.backend.forward(inputs["q"], None, None, layer, batch, q_rope=inputs["q_rope"])
            )
        return outputs


def draw(size: int) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(size, 4, 32).bfloat16(),
        "q_rope": torch.randn(size, 4, 16).bfloat16(),
        "index_q": torch.randn(size, INDEX_HEADS, INDEX_DIM),
        "index_weights": torch.rand(size, INDEX_HEADS),
    }


@pytest.fixture
def setup():
    steps = decode(70, 9, 33), decode(40, 100)
    case = Case(name="engine", steps=steps, page_size=16, max_context_len=128, **LATENT)
    return make_setup(case, fake_platform(), "cpu")


def test_an_indexer_in_the_graph_picks_for_each_replay(setup) -> None:
    backend = GraphFakeBackend(setup.context)
    model = Model(setup, backend)
    inputs = {
        name: ModelInput(dtype=tensor.dtype, trailing=tuple(tensor.shape[1:]))
        for name, tensor in draw(1).items()
    }
    runner = GraphRunner(
        backend,
        model.forward,
        GraphConfig(batch_sizes=(2, 4), index_topk=TOPK),
        devices=RecordingGraphs(),
        inputs=inputs,
        progress=iter,
    )
    runner.capture()
    for lengths in setup.case.steps:
        step = prepare_step(setup, lengths)
        drawn = draw(step.batch.batch_size)
        replayed = [
            out.clone() for out in runner.replay(replace(step.batch, topk_indices=None), drawn)
        ]
        backend.init_forward_metadata(step.batch)
        for out, expected in zip(replayed, model.forward(step.batch, drawn), strict=True):
            torch.testing.assert_close(out, expected)


def test_an_indexer_with_room_for_every_key_changes_nothing(setup) -> None:
    """Up to topk keys, sparse attention is attention."""
    step = prepare_step(setup, decode(TOPK, 3, 11))
    drawn = draw(3)
    backend = GraphFakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    model = Model(setup, backend)
    dense = replace(step.batch, topk_indices=None)
    for layer, out in zip(setup.context.layers, model.forward(step.batch, drawn), strict=True):
        expected, _ = reference.attention(
            drawn["q"],
            layer,
            dense,
            setup.context.req_to_token_pool.req_to_token,
            setup.context.token_to_kv_pool,
            q_rope=drawn["q_rope"],
        )
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


def test_a_graph_without_an_indexer_serves_no_step_with_one(setup) -> None:
    backend = GraphFakeBackend(setup.context)
    runner = GraphRunner(
        backend,
        lambda batch, inputs: batch.positions.clone(),
        GraphConfig(batch_sizes=(4,)),
        devices=RecordingGraphs(),
        progress=iter,
    )
    runner.capture()
    step = prepare_step(setup, setup.case.steps[0])
    assert not runner.can_run(step.batch)
    assert runner.can_run(replace(step.batch, topk_indices=None))
