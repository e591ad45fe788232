"""The suite in graphs: it passes a backend that keeps the rules and notices each breach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import AttentionBackend, ForwardBatch, GraphUnsupported, LayerSpec
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.core.plugin import one_of
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    Disagreement,
    FakeBackend,
    GraphFakeBackend,
    decode,
    fake_card,
    fake_platform,
    graph_card,
    in_graphs,
    run_case,
    standard_cases,
)
from attnmux.testing.fakes.graphs import GraphState
from attnmux.testing.graphs.tape import GraphViolation

CASES = {case.name: case for case in in_graphs(standard_cases((16,)))}


class StaleHostLens(GraphFakeBackend):
    """Passes a number of the host to its kernels: a graph keeps that of the capture."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.longest = int(batch.seq_lens_cpu.max())

    def _keys(
        self, layer: LayerSpec, state: GraphState, request: int, new: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, exists = super()._keys(layer, state, request, new)
        return slots, exists & (torch.arange(len(exists)) < self.longest + new - 1)


class StaleMetadata(GraphFakeBackend):
    """Prepares nothing but when captured."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture)


class ReadsHostMirror(GraphFakeBackend):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.state_of(batch).raw_lens[: batch.batch_size].copy_(batch.seq_lens_cpu)


class Allocates(GraphFakeBackend):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.indptr = batch.seq_lens.cumsum(0)


class SynchronisesInPreparation(GraphFakeBackend):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.longest = batch.seq_lens.max().item()


class SynchronisesInForward(GraphFakeBackend):
    def attend(self, q, k, v, keep, layer):
        scale = 1.0 if int(keep.sum()) else 0.0
        return super().attend(q * scale, k, v, keep, layer)


class DependsOnValues(GraphFakeBackend):
    def attend(self, q, k, v, keep, layer):
        seen = keep.any(0)
        return super().attend(q, k[seen], v[seen], keep[:, seen], layer)


class MovesBuffers(GraphFakeBackend):
    """Makes its buffers anew for each step, where the graph reads the old ones."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.states.clear()
        self.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        super().init_forward_metadata_out_graph(batch, in_capture)


class ReplacesBuffers(GraphFakeBackend):
    """Makes its buffers anew for the graphs of another mode."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.states.clear()
        super().init_cuda_graph_state(max_bs, max_num_tokens)


class GrowsBuffers(GraphFakeBackend):
    """Makes its buffers anew for an eager step that is larger than they are."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if self.states[0].max_batch_size < batch.batch_size:
            self.states.clear()
            self.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        super().init_forward_metadata_out_graph(batch, in_capture)


class WritesBesideSlotZero(GraphFakeBackend):
    """Gives padding rows a slot that is another's."""

    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        slots = batch.out_cache_loc
        moved = replace(batch, out_cache_loc=torch.where(slots == 0, 3, slots))
        super().save_kv(k, v, layer, moved, k_rope=k_rope)


class PaddingIsNaN(GraphFakeBackend):
    def attend(self, q, k, v, keep, layer):
        out, lse = super().attend(q, k, v, keep, layer)
        alone = keep.sum() <= 1
        return torch.where(alone, torch.nan, out), lse


VIOLATIONS = {
    ReadsHostMirror: "init_forward_metadata_in_graph: aten.copy_.default reads a tensor of the",
    Allocates: "init_forward_metadata_in_graph: aten.cumsum.default allocates",
    SynchronisesInPreparation: "init_forward_metadata_in_graph: Tensor.item synchronises",
    SynchronisesInForward: "forward: Tensor.__int__ synchronises",
    DependsOnValues: "forward: aten.index.Tensor has a shape that depends on values",
    MovesBuffers: "init_forward_metadata_in_graph: .* read a tensor of .* has been freed or moved",
}
DISAGREEMENTS = {
    StaleHostLens: "step 1, DECODE: layer 1, output",
    StaleMetadata: "step 1, DECODE: layer 1, output",
    WritesBesideSlotZero: "step 1, DECODE: layer 1: K of slot 3 was written, and no token",
    PaddingIsNaN: "layer 1: a padding row of the graph is not finite",
}


def candidate_of(factory: type[AttentionBackend]) -> Candidate:
    card = replace(graph_card(), needs_cpu_seq_lens=True)
    return Candidate(card=card, platform=fake_platform(), factory=factory)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [(fault, GraphViolation, says) for fault, says in VIOLATIONS.items()]
    + [(fault, Disagreement, says) for fault, says in DISAGREEMENTS.items()],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_catches(fault: type[AttentionBackend], error: type[Exception], says: str) -> None:
    outcome = run_case(candidate_of(fault), CASES["decode-uneven-page16-graph"])
    assert outcome.status == "failed"
    assert isinstance(outcome.error, error), outcome.message
    with pytest.raises(type(outcome.error), match=says):
        raise outcome.error


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (ReplacesBuffers, "decode-and-verify"),
        (ReplacesBuffers, "verify-and-decode"),
        (GrowsBuffers, "decode-larger-than-graphs"),
        (GrowsBuffers, "verify-larger-than-graphs"),
        (GrowsBuffers, "verify-tree-larger-than-graphs"),
    ],
)
def test_catches_buffers_that_other_graphs_still_read(
    fault: type[AttentionBackend], case: str
) -> None:
    outcome = run_case(candidate_of(fault), CASES[f"{case}-page16-graph"])
    assert isinstance(outcome.error, GraphViolation), outcome
    assert "memory has been freed or moved" in outcome.message


class PicksOfTheCapture(GraphFakeBackend):
    """Takes what the indexer wrote while a graph was captured."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.kept = {}

    def _visible(self, layer, batch, *args):
        key = layer.layer_id, batch.batch_size
        kept = self.kept.setdefault(key, batch.topk_indices.clone())
        return super()._visible(layer, replace(batch, topk_indices=kept), *args)


def test_catches_picks_that_are_not_those_of_the_replay() -> None:
    outcome = run_case(candidate_of(PicksOfTheCapture), CASES["nsa-decode-page16-graph"])
    assert outcome.status == "failed"
    whole = run_case(candidate_of(GraphFakeBackend), CASES["nsa-decode-page16-graph"])
    assert whole.status == "passed", whole.message


def test_steps_larger_than_the_graphs_run_eagerly() -> None:
    sizes = []

    class Watched(GraphFakeBackend):
        def init_forward_metadata(self, batch: ForwardBatch) -> None:
            sizes.append(("eager", batch.batch_size))
            super().init_forward_metadata(batch)

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            sizes.append((max_bs, max_num_tokens))
            super().init_cuda_graph_state(max_bs, max_num_tokens)

    outcome = run_case(candidate_of(Watched), CASES["verify-larger-than-graphs-page16-graph"])
    assert outcome.status == "passed"
    assert sizes == [(2, 8), ("eager", 5)]


def test_a_card_that_claims_graphs_fails_without_them() -> None:
    outcome = run_case(candidate_of(FakeBackend), CASES["decode-one-request-page16-graph"])
    assert isinstance(outcome.error, GraphUnsupported)


class TestGraphFake(AttentionBackendTests):
    """The fake in graphs alone, in one page size: it is as slow as it is plain."""

    backend = Candidate(card=graph_card(page_size=one_of(16)), platform=fake_platform())
    page_sizes = (16,)
    executions = ("graph",)

    def wants(self, case: Case) -> bool:
        return "long" not in case.name


def test_cases_come_twice_where_a_card_declares_graphs() -> None:
    with_graphs = Candidate(card=graph_card(), platform=fake_platform()).cases()
    without = Candidate(card=fake_card(), platform=fake_platform()).cases()
    assert {case.execution for case in with_graphs} == {"eager", "graph"}
    assert [case for case in with_graphs if not case.graph] == list(without)
    for case in with_graphs:
        assert case.request.graph is case.graph
        assert not case.graph or any(step.can_be_captured for step in case.steps)


def test_batches_are_padded_and_replayed_twice() -> None:
    """Three requests replay in four rows, of two graphs that several steps share."""
    sizes = []

    class Watched(GraphFakeBackend):
        def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
            sizes.append((batch.batch_size, in_capture))
            super().init_forward_metadata_out_graph(batch, in_capture)

    steps = (decode(9, 0, 22), decode(31), decode(2, 60, 17, 5), decode(8, 3, 1))
    case = Case(name="changing", steps=steps, page_size=16, graph=True)
    assert run_case(candidate_of(Watched), case).status == "passed"
    captured = [(4, True), (1, True)]
    assert sizes == [*captured, (4, False), (1, False), (4, False), (4, False)]


@pytest.mark.parametrize("fill", [0, 1, 5])
def test_any_fill_value_will_do(fill: int) -> None:
    class Filled(GraphFakeBackend):
        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return fill

    for name in ("decode-uneven", "verify-tree-padding", "mla-decode"):
        outcome = run_case(candidate_of(Filled), CASES[f"{name}-page16-graph"])
        assert outcome.status == "passed", outcome.message


def test_a_hybrid_replays_the_phases_that_it_captures() -> None:
    def make(context, options) -> HybridAttnBackend:
        prefill = GraphFakeBackend(context) if context.request.spec_topk else FakeBackend(context)
        return HybridAttnBackend(prefill=prefill, decode=GraphFakeBackend(context))

    for name in ("extend-then-decode", "verify-chain", "decode-cross"):
        outcome = run_case(candidate_of(make), CASES[f"{name}-page16-graph"])
        assert outcome.status == "passed", outcome.message
