"""The suite of linear layers finds backends that are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from attnmux.core.plugin import one_of
from attnmux.cpu.plugin import TORCH_LINEAR
from attnmux.cpu.torch_linear import TorchLinearBackend
from attnmux.parts import LinearStatePool
from attnmux.testing import Candidate, fake_card, fake_platform, run_case, verify
from attnmux.testing.cases.linear import LinearCase
from attnmux.testing.sampling.linear import linear_samples


class KeepsOldStates(TorchLinearBackend):
    """Starts a new request from whatever its row holds."""

    def forward_decode(self, call, batch) -> None:
        super().forward_decode(call, replace(batch, seq_lens=batch.seq_lens + 1))

    def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.forward_mode.is_extend():
            self._step = replace(self._step, fresh=torch.zeros_like(self._step.fresh))


class ForgetsStates(TorchLinearBackend):
    """Starts every request from zeros."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.forward_mode.is_extend():
            self._step = replace(self._step, fresh=torch.ones_like(self._step.fresh))


class WritesNoState(TorchLinearBackend):
    def forward_decode(self, call, batch) -> None:
        state = self.states.state(call.layer.layer_id)
        before = state.clone()
        super().forward_decode(call, batch)
        state.copy_(before)


class WritesAnotherRow(TorchLinearBackend):
    def forward_decode(self, call, batch) -> None:
        super().forward_decode(call, batch)
        free = set(range(1, self.states.size + 1)) - set(batch.req_pool_indices.tolist())
        self.states.state(call.layer.layer_id)[min(free)] += 1


class WritesInputs(TorchLinearBackend):
    def forward_extend(self, call, batch) -> None:
        super().forward_extend(call, batch)
        call.k.mul_(2)


class WithoutBias(TorchLinearBackend):
    def forward_conv(self, call, batch) -> None:
        super().forward_conv(type(call)(*call_fields(call, bias=None)), batch)


class WithoutDeltaRule(TorchLinearBackend):
    def forward_decode(self, call, batch) -> None:
        layer = replace(call.layer, kind="mamba2") if call.layer.kind == "gdn" else call.layer
        super().forward_decode(type(call)(*call_fields(call, layer=layer)), batch)


class OldMetadata(TorchLinearBackend):
    def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
        if not hasattr(self, "_step"):
            super().init_forward_metadata_out_graph(batch, in_capture)


class VerifiesInPlace(TorchLinearBackend):
    """Writes the requests' own states, which nobody can take back."""

    def forward_verify(self, call, batch) -> None:
        super().forward_verify(call, batch)
        last = batch.drafts().draft_token_num - 1
        own, drafted = (
            each(call.layer.layer_id) for each in (self.states.state, self.states.draft_state)
        )
        own[batch.req_pool_indices] = drafted[batch.req_pool_indices, last]


class ConvolvesInPlace(TorchLinearBackend):
    def verify_conv(self, call, batch) -> None:
        super().verify_conv(call, batch)
        own, line = (
            each(call.layer.layer_id, call.index)
            for each in (self.states.conv, self.states.draft_conv)
        )
        own[batch.req_pool_indices] = line[batch.req_pool_indices, 1 : 1 + own.shape[1]]


class KeepsTheLastStateAlone(TorchLinearBackend):
    def forward_verify(self, call, batch) -> None:
        super().forward_verify(call, batch)
        drafted, num = self.states.draft_state(call.layer.layer_id), batch.drafts().draft_token_num
        drafted[batch.req_pool_indices, 0] = drafted[batch.req_pool_indices, num - 1]


class ShiftsInputs(TorchLinearBackend):
    def verify_conv(self, call, batch) -> None:
        super().verify_conv(call, batch)
        line, rows = self.states.draft_conv(call.layer.layer_id, call.index), batch.req_pool_indices
        line[rows] = line[rows].roll(1, dims=1)


class WritesBeyondTheDrafts(TorchLinearBackend):
    def forward_verify(self, call, batch) -> None:
        super().forward_verify(call, batch)
        drafted, num = self.states.draft_state(call.layer.layer_id), batch.drafts().draft_token_num
        drafted[batch.req_pool_indices, num] += 1


class WritesDraftsOfAnother(TorchLinearBackend):
    def forward_verify(self, call, batch) -> None:
        super().forward_verify(call, batch)
        free = set(range(1, self.states.size + 1)) - set(batch.req_pool_indices.tolist())
        self.states.draft_state(call.layer.layer_id)[min(free)] += 1


class VerifiesFromOldStates(TorchLinearBackend):
    """A request whose drafts are its first tokens does not start from zeros."""

    def forward_verify(self, call, batch) -> None:
        super().forward_verify(call, replace(batch, seq_lens=batch.seq_lens + 1))


def call_fields(call, **changes):
    return [changes.get(name, getattr(call, name)) for name in call.__struct_fields__]


WRONG = (
    *(KeepsOldStates, ForgetsStates, WritesNoState, WritesAnotherRow, WritesInputs),
    *(WithoutBias, WithoutDeltaRule, OldMetadata),
)
WRONG_DRAFTS = (
    *(VerifiesInPlace, ConvolvesInPlace, KeepsTheLastStateAlone, ShiftsInputs),
    *(WritesBeyondTheDrafts, WritesDraftsOfAnother, VerifiesFromOldStates),
)


def candidate(factory=TorchLinearBackend, card=TORCH_LINEAR) -> Candidate:
    return Candidate(card=card, platform=fake_platform(), factory=factory)


@pytest.mark.parametrize("factory", WRONG)
def test_a_wrong_backend_fails(factory) -> None:
    wrong = candidate(factory)
    kinds = ("gdn",) if factory is not WithoutBias else ("mamba2",)
    cases = [case for case in wrong.cases() if case.kind in kinds and not case.graph]
    failed = next((case for case in cases if run_case(wrong, case).status == "failed"), None)
    assert failed is not None
    assert run_case(candidate(), failed).status == "passed"


@pytest.mark.parametrize("factory", WRONG_DRAFTS)
@pytest.mark.turns(2)
def test_a_backend_that_verifies_wrongly_fails(factory) -> None:
    wrong = candidate(factory)
    names = ("gdn-verify", "gdn-verify-first-tokens")
    cases = [case for case in wrong.cases() if case.name in names]
    outcomes = [run_case(wrong, case) for case in cases]
    failed = [one for one in outcomes if one.status == "failed"]
    assert failed
    assert "layer 1" in failed[0].message
    assert {run_case(candidate(), case).status for case in cases} == {"passed"}


def test_drafts_that_are_accepted_wrongly_fail(monkeypatch) -> None:
    """The pool is core's; a case would tell all the same."""
    accept = LinearStatePool.accept
    monkeypatch.setattr(
        LinearStatePool,
        "accept",
        lambda pool, rows, counts: accept(pool, rows, counts.clamp(min=1)),
    )
    (case,) = (one for one in candidate().cases() if one.name == "gdn-verify-padding")
    outcomes = [run_case(candidate(), case, seed=seed) for seed in range(6)]
    failed = [one.message for one in outcomes if one.status == "failed"]
    assert any("without an accepted draft" in message for message in failed)


class ReadsOnTheHost(TorchLinearBackend):
    def forward_decode(self, call, batch) -> None:
        assert int(batch.seq_lens.max()) >= 0
        super().forward_decode(call, batch)


def test_a_graph_that_would_not_replay_fails() -> None:
    wrong = candidate(ReadsOnTheHost)
    case = next(case for case in wrong.cases() if case.graph)
    outcome = run_case(wrong, case)
    assert outcome.status == "failed"
    assert "GraphViolation" in outcome.message


def test_a_card_without_linear_layers_has_none_of_these_cases() -> None:
    attention = Candidate(card=fake_card(), platform=fake_platform())
    assert {type(case).__name__ for case in attention.cases()} == {"Case"}
    assert list(linear_samples(attention, 1)) == []
    assert {type(case).__name__ for case in candidate().cases()} == {"LinearCase"}


def test_samples_are_those_of_their_seed_and_card() -> None:
    narrow = replace(
        TORCH_LINEAR,
        clauses=tuple(replace(each, head_dim=one_of(64)) for each in TORCH_LINEAR.clauses),
    )
    first, again, other = (
        list(islice(linear_samples(candidate(card=narrow), seed), 30)) for seed in (5, 5, 6)
    )
    assert first == again != other
    assert {case.head_k_dim for case in first if case.kind not in ("conv",)} == {64}


def test_a_card_of_one_size_is_tested_with_every_step() -> None:
    """Cases that are not about dims have those that the card names."""
    clauses = tuple(
        replace(each, kind=one_of("gdn"), head_dim=one_of(128), v_head_dim=one_of(128))
        for each in TORCH_LINEAR.clauses
    )
    one_size = candidate(card=replace(TORCH_LINEAR, clauses=clauses))
    cases = {case.name: case for case in one_size.cases() if case.kind == "gdn"}
    refused = {name for name, case in cases.items() if not one_size.admits(case)}
    assert refused == {
        f"gdn-{phase}-dims-{dims}{graph}"
        for phase in ("decode", "extend", "verify")
        for dims in ("128-64", "64-128")
        for graph in ("", "-graph")
        if not (phase == "extend" and graph)
    }
    usual = {case.name: case for case in candidate().cases()}
    assert {case.head_k_dim for name, case in usual.items() if name == "gdn-verify"} == {64}
    assert usual["gdn-verify"] == replace(cases["gdn-verify"], head_k_dim=64, head_v_dim=64)
    samples = list(islice(linear_samples(one_size, 5), 10))
    assert {(case.head_k_dim, case.head_v_dim) for case in samples} == {(128, 128)}


def test_drafts_of_a_convolution_of_one_channel() -> None:
    """A request's only value there has the stride of the row that it was cut from."""
    case = LinearCase(name="one", kind="conv", steps=(verify(4, 5),), conv_dims=(1,))
    assert run_case(candidate(), replace(case, head_k_dim=0, head_v_dim=0)).status == "passed"
