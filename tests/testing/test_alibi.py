"""ALiBi in the reference, in the suite, and in backends that get it wrong."""

from __future__ import annotations

import secrets
from dataclasses import replace
from itertools import islice

import pytest
import torch

from attnmux.core import ForwardMode
from attnmux.core.plugin import NONE
from attnmux.testing import (
    Candidate,
    Disagreement,
    FakeBackend,
    fake_card,
    fake_platform,
    make_setup,
    prepare_step,
    run_case,
    standard_cases,
)
from attnmux.testing.cases.case import Case, case_of, decode, extend
from attnmux.testing.fakes.graphs import graph_card
from attnmux.testing.reference import attention, dense_attention
from attnmux.testing.reference.dense import alibi_bias
from attnmux.testing.sampling.sampler import Sampler

CASES = {case.name: case for case in standard_cases((16,)) if case.alibi}


class WrongSign(FakeBackend):
    def biased(self, q, k, layer, positions):
        layer = replace(layer, alibi_slopes=-layer.alibi_slopes)
        return super().biased(q, k, layer, positions)


class OnePlaceLate(FakeBackend):
    def biased(self, q, k, layer, positions):
        return super().biased(q, k, layer, positions + 1)


class PlaceAmongTheNewTokens(FakeBackend):
    def biased(self, q, k, layer, positions):
        return super().biased(q, k, layer, positions - positions[:1])


class SlopesOfTheFirstLayer(FakeBackend):
    def biased(self, q, k, layer, positions):
        layer = replace(layer, alibi_slopes=self.context.layers[0].alibi_slopes)
        return super().biased(q, k, layer, positions)


class SlopeOfTheKVHead(FakeBackend):
    def biased(self, q, k, layer, positions):
        group = layer.tp_q_head_num // layer.tp_k_head_num
        slopes = layer.alibi_slopes[::group].repeat_interleave(group)
        return super().biased(q, k, replace(layer, alibi_slopes=slopes), positions)


class BiasBeforeScaling(FakeBackend):
    def biased(self, q, k, layer, positions):
        layer = replace(layer, alibi_slopes=layer.alibi_slopes * layer.scaling)
        return super().biased(q, k, layer, positions)


class NoBias(FakeBackend):
    def biased(self, q, k, layer, positions):
        return q, k


CAUGHT_BY: dict[type[FakeBackend], tuple[str, ...]] = {
    WrongSign: ("alibi-decode", "alibi-extend", "alibi-verify-chain", "alibi-extend-window"),
    OnePlaceLate: (
        *("alibi-decode-lse", "alibi-extend-lse", "alibi-verify-chain-lse"),
        *("alibi-decode-sinks", "alibi-extend-unsaved-lse", "alibi-decode-chunk-lse"),
    ),
    PlaceAmongTheNewTokens: ("alibi-decode-lse", "alibi-extend-lse", "alibi-verify-chain-lse"),
    SlopesOfTheFirstLayer: ("alibi-decode", "alibi-extend"),
    SlopeOfTheKVHead: ("alibi-decode", "alibi-decode-14x2-heads"),
    BiasBeforeScaling: ("alibi-decode", "alibi-extend-scale"),
    NoBias: ("alibi-decode", "alibi-mixed", "alibi-draft-extend", "alibi-decode-window-pool"),
}
"""The cases that each fault fails. All logits of a query grow alike with its place, so that only an
LSE or a sink shows an error there."""


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault, names in CAUGHT_BY.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_catches(fault: type[FakeBackend], name: str) -> None:
    broken = Candidate(card=fake_card(), platform=fake_platform(), factory=fault)
    outcome = run_case(broken, CASES[f"{name}-page16"])
    assert outcome.status == "failed"
    assert isinstance(outcome.error, Disagreement), outcome.message


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_right_backend_passes(case: Case) -> None:
    candidate = Candidate(card=fake_card(), platform=fake_platform())
    assert run_case(candidate, case).status == "passed"


@pytest.mark.parametrize("name", ["alibi-decode-lse", "alibi-verify-chain-lse"])
def test_a_right_backend_passes_in_graphs(name: str) -> None:
    candidate = Candidate(card=graph_card(), platform=fake_platform())
    assert run_case(candidate, replace(CASES[f"{name}-page16"], graph=True)).status == "passed"


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_card_that_does_not_offer_it_refuses(case: Case) -> None:
    candidate = Candidate(card=fake_card(alibi=NONE), platform=fake_platform())
    outcome = run_case(candidate, case)
    assert outcome.status == "refused"
    assert {reason.axis for reason in outcome.reasons} == {"alibi"}


def test_sampled_cases_have_it_where_layers_can() -> None:
    """Even of a card that claims everything together."""
    candidate = Candidate(card=fake_card(), platform=fake_platform())
    sampler = Sampler(candidate=candidate, seed=secrets.randbits(31), most_cost=0.01)
    sampled = islice(sampler.cases(), 150)
    biased = [case for case in sampled if isinstance(case, Case) and case.alibi]
    assert len(biased) > 5
    for case in biased:
        asked = case.logit_cap, case.custom_mask, case.cross_attention, case.multi_item
        assert not any(asked)
        layers = make_setup(case, fake_platform(), "cpu").context.layers
        assert all(layer.alibi_slopes is not None for layer in layers)


def test_the_bias_grows_with_the_distance() -> None:
    """Two heads, the tokens at places 2 and 3 of four keys."""
    bias = alibi_bias(torch.tensor([1.0, 0.25]), torch.tensor([2, 3]), 4)
    assert bias[:, 0].tolist() == [[-2, -1, 0, 1], [-3, -2, -1, 0]]
    assert bias[:, 1].tolist() == [[-0.5, -0.25, 0, 0.25], [-0.75, -0.5, -0.25, 0]]


def test_the_reference_adds_the_bias_to_the_scaled_logits() -> None:
    q, k = torch.tensor([[[2.0]]]), torch.tensor([[[1.0]], [[3.0]]])
    keep = torch.ones(1, 2, dtype=torch.bool)
    bias = alibi_bias(torch.tensor([0.5]), torch.tensor([1]), 2)
    _, lse = dense_attention(q, k, k, keep, scaling=0.25, bias=bias)
    expected = torch.logsumexp(torch.tensor([0.5 - 0.5, 1.5], dtype=torch.float64), 0)
    torch.testing.assert_close(lse[0, 0], expected)


def test_a_prompt_in_chunks_is_that_prompt() -> None:
    """Places are those of the sequence, so that a cached prefix changes nothing."""
    case = case_of("chunks", 1, extend((0, 9)), decode(9), alibi=True, lse=True)
    setup = make_setup(case, fake_platform(), "cpu")
    made = prepare_step(setup, case.steps[0])
    given = made.inputs[0]
    pool, table = setup.context.token_to_kv_pool, setup.context.req_to_token_pool.req_to_token
    layer, batch = given.layer, made.batch
    assert given.k is not None
    assert given.v is not None
    pool.set_kv_buffer(layer, batch.out_cache_loc, given.k, given.v, None, None)
    whole, whole_lse = attention(given.q, layer, batch, table, pool)
    last = replace(
        batch,
        forward_mode=ForwardMode.DECODE,
        extend_seq_lens=None,
        extend_prefix_lens=None,
    )
    out, lse = attention(given.q[-1:], layer, last, table, pool)
    torch.testing.assert_close(out, whole[-1:])
    torch.testing.assert_close(lse, whole_lse[-1:])
