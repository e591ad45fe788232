"""Sinks of a model whose weights change in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import LayerSpec
from attnmux.core.contract.sinks import refresh_sinks
from attnmux.core.plugin import GraphStep
from attnmux.testing import RecordingGraphs

WEIGHTS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]


@pytest.fixture
def weights() -> list[torch.Tensor]:
    return [each.bfloat16() for each in WEIGHTS]


def layer(layer_id: int, sinks: torch.Tensor | None) -> LayerSpec:
    return LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=2,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=64,
        v_head_dim=64,
        scaling=0.125,
        sinks=None if sinks is None else sinks.float(),
    )


def doubled(sinks: torch.Tensor) -> torch.Tensor:
    return sinks.repeat(2)


def test_every_form_follows_the_weights(weights) -> None:
    layers = [layer(0, weights[0]), layer(1, None), layer(2, weights[1])]
    kept = [layers[0].sinks_in(torch.bfloat16), layers[2].sinks_in(torch.float16)]
    assert layers[0].sinks_in(torch.float32) is layers[0].sinks
    assert layers[1].sinks_in(torch.bfloat16) is None
    # Also of a layer that a composite made from another, with other heads
    wide = layers[0].sink_copies.in_form(layers[0].sinks, doubled)
    whole = replace(layers[0], tp_q_head_num=4, sinks=wide)
    kept += [whole.sinks_in(torch.bfloat16)]
    assert replace(layers[0]).sinks_in(torch.bfloat16) is kept[0]
    for each in weights:
        each.mul_(10)
    refresh_sinks(layers, weights)
    assert layers[0].sinks.tolist() == [10, 20]
    assert whole.sinks.tolist() == [10, 20, 10, 20]
    assert [each.tolist() for each in kept] == [[10, 20], [30, 40], [10, 20, 10, 20]]
    assert [each.dtype for each in kept] == [torch.bfloat16, torch.float16, torch.bfloat16]


def test_a_form_of_weights_in_float32_follows_them() -> None:
    weights = torch.tensor([1.0, 2.0])
    spec = replace(layer(0, None), sinks=weights)
    kept = spec.sinks_in(torch.bfloat16)
    weights.fill_(7)
    refresh_sinks([spec], [weights])
    assert kept.tolist() == [7, 7]


def test_a_graph_follows_the_weights(weights) -> None:
    spec = layer(0, weights[0])
    kept, out = spec.sinks_in(torch.bfloat16), torch.zeros(2)
    step = GraphStep(
        prepare=lambda: refresh_sinks([spec], weights[:1]), forward=lambda: out.copy_(kept)
    )
    graph = RecordingGraphs().capture(step)
    weights[0].fill_(5)
    graph.replay()
    assert out.tolist() == [5, 5]
