"""The suite of linear layers finds backends that are wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from attnmux.core import one_of
from attnmux.cpu.plugin import TORCH_LINEAR
from attnmux.cpu.torch_linear import TorchLinearBackend
from attnmux.testing import Candidate, fake_card, fake_platform, run_case
from attnmux.testing.linear_sampling import linear_samples


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


def call_fields(call, **changes):
    return [changes.get(name, getattr(call, name)) for name in call.__struct_fields__]


WRONG = (
    *(KeepsOldStates, ForgetsStates, WritesNoState, WritesAnotherRow, WritesInputs),
    *(WithoutBias, WithoutDeltaRule, OldMetadata),
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
