"""Relative position biases in the reference, in the suite, and in backends that get them wrong."""

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
from attnmux.testing.reference import attention
from attnmux.testing.reference.dense import relative_bias
from attnmux.testing.sampling.sampler import Sampler

CASES = {case.name: case for case in standard_cases((16,)) if case.relative_reach is not None}


class OnePlaceLate(FakeBackend):
    def relative(self, q, k, layer, positions):
        return super().relative(q, k, layer, positions + 1)


class PlaceAmongTheNewTokens(FakeBackend):
    def relative(self, q, k, layer, positions):
        return super().relative(q, k, layer, positions - positions[:1])


class NotClipped(FakeBackend):
    """Keys beyond the table's reach have no bias."""

    def relative(self, q, k, layer, positions):
        zero = torch.zeros_like(layer.relative_bias[:, :1])
        sides = [zero, layer.relative_bias] + [zero] * (not layer.is_causal)
        return super().relative(q, k, replace(layer, relative_bias=torch.cat(sides, 1)), positions)


class Mirrored(FakeBackend):
    def relative(self, q, k, layer, positions):
        table = layer.relative_bias.flip(1)
        return super().relative(q, k, replace(layer, relative_bias=table), positions)


class TableOfTheFirstLayer(FakeBackend):
    def relative(self, q, k, layer, positions):
        layer = replace(layer, relative_bias=self.context.layers[0].relative_bias)
        return super().relative(q, k, layer, positions)


class RowOfTheKVHead(FakeBackend):
    def relative(self, q, k, layer, positions):
        group = layer.tp_q_head_num // layer.tp_k_head_num
        table = layer.relative_bias[::group].repeat_interleave(group, dim=0)
        return super().relative(q, k, replace(layer, relative_bias=table), positions)


class BiasBeforeScaling(FakeBackend):
    def relative(self, q, k, layer, positions):
        layer = replace(layer, relative_bias=layer.relative_bias * layer.scaling)
        return super().relative(q, k, layer, positions)


class NoBias(FakeBackend):
    def relative(self, q, k, layer, positions):
        return q, k


CAUGHT_BY: dict[type[FakeBackend], tuple[str, ...]] = {
    OnePlaceLate: ("decode", "extend", "verify-chain", "decode-window", "encoder"),
    PlaceAmongTheNewTokens: ("decode", "extend", "verify-chain", "extend-cross"),
    NotClipped: ("decode", "extend", "decode-reach-0-lse", "encoder", "decode-long-lse"),
    Mirrored: ("decode", "extend-cross", "encoder", "encoder-reach-128"),
    TableOfTheFirstLayer: ("decode", "extend", "encoder"),
    RowOfTheKVHead: ("decode", "decode-14x2-heads", "encoder"),
    BiasBeforeScaling: ("decode", "extend", "encoder"),
    NoBias: ("decode", "mixed", "draft-extend", "decode-window-pool", "decode-cross", "encoder"),
}
"""The cases that each fault fails."""


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault, names in CAUGHT_BY.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_catches(fault: type[FakeBackend], name: str) -> None:
    broken = Candidate(card=fake_card(), platform=fake_platform(), factory=fault)
    page = 1 if name.startswith("encoder") else 16
    outcome = run_case(broken, CASES[f"relative-{name}-page{page}"])
    assert outcome.status == "failed"
    assert isinstance(outcome.error, Disagreement), outcome.message


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
@pytest.mark.turns(2)
def test_a_right_backend_passes(case: Case) -> None:
    candidate = Candidate(card=fake_card(), platform=fake_platform())
    assert run_case(candidate, case).status == "passed"


@pytest.mark.parametrize("name", ["relative-decode-lse", "relative-verify-chain"])
def test_a_right_backend_passes_in_graphs(name: str) -> None:
    candidate = Candidate(card=graph_card(), platform=fake_platform())
    assert run_case(candidate, replace(CASES[f"{name}-page16"], graph=True)).status == "passed"


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_a_card_that_does_not_offer_it_refuses(case: Case) -> None:
    """An encoder's cases too."""
    candidate = Candidate(card=fake_card(relative_bias=NONE), platform=fake_platform())
    outcome = run_case(candidate, case)
    assert outcome.status == "refused"
    assert {reason.axis for reason in outcome.reasons} == {"relative_bias"}


def test_sampled_cases_have_it_where_layers_can() -> None:
    """Even of a card that claims everything together."""
    candidate = Candidate(card=fake_card(), platform=fake_platform())
    sampler = Sampler(candidate=candidate, seed=secrets.randbits(31), most_cost=0.01)
    sampled = islice(sampler.cases(), 150)
    biased = [
        case for case in sampled if isinstance(case, Case) and case.relative_reach is not None
    ]
    assert len(biased) > 5
    for case in biased:
        assert not any((case.logit_cap, case.custom_mask, case.alibi, case.multi_item))
        *layers, last = make_setup(case, fake_platform(), "cpu").context.layers
        assert all(layer.relative_bias is not None for layer in layers)
        assert last.is_cross_attention or last.relative_bias is not None


def test_distances_are_clipped_to_the_table() -> None:
    """Two heads, the tokens at places 1 and 3 of five keys, and a reach of two places."""
    table = torch.tensor([[1.0, 2, 3, 4, 5], [10, 20, 30, 40, 50]])
    bias = relative_bias(table, torch.tensor([1, 3]), 5, causal=False)
    assert bias[:, 0].tolist() == [[2, 3, 4, 5, 5], [1, 1, 2, 3, 4]]
    assert bias[:, 1].tolist() == [[20, 30, 40, 50, 50], [10, 10, 20, 30, 40]]


def test_a_causal_table_ends_with_the_tokens_own_place() -> None:
    table = torch.tensor([[1.0, 2, 3]])
    bias = relative_bias(table, torch.tensor([1, 3]), 4, causal=True)
    assert bias[:, 0].tolist() == [[2, 3, 3, 3], [1, 1, 2, 3]]


def test_a_prompt_in_chunks_is_that_prompt() -> None:
    """Places are those of the sequence, so that a cached prefix changes nothing."""
    case = case_of("chunks", 1, extend((0, 9)), decode(9), relative_reach=4, lse=True)
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
        batch, forward_mode=ForwardMode.DECODE, extend_seq_lens=None, extend_prefix_lens=None
    )
    out, lse = attention(given.q[-1:], layer, last, table, pool)
    torch.testing.assert_close(out, whole[-1:])
    torch.testing.assert_close(lse, whole_lse[-1:])
