from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import Decision, InvalidInput, Platform, Policy, Request, solve
from attnmux.core.plugin import Option, includes

SPLITS = Option(name="splits", type=int, default=8)


@pytest.fixture
def fast(offer):
    return offer("fast", rank=1, features=includes("avx2"), requires=("kernels>=2",))


@pytest.fixture
def loaded(offer, fast, cpu) -> Decision:
    """What a launcher decided and wrote down."""
    cards = [fast, offer("slow", rank=9, options=(SPLITS,))]
    policy = Policy(prefill_backend="slow", options={"slow": {"splits": 2}})
    decision = solve(Request(), cpu, cards, policy, libraries={"kernels": "2.1"}.get)
    return Decision.from_json(decision.to_json())


def test_a_decision_holds_where_the_facts_are_the_same(loaded, offer, fast, cpu) -> None:
    own = [offer("slow", options=(SPLITS,)), offer("another", rank=0), fast]
    loaded.check(replace(cpu, name="the same CPU, said otherwise"), own, libraries=lambda _: "2")


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ("cpu:aarch64,features=avx2", "arch aarch64 here, x86_64 in the decision"),
        ("nvidia:sm90,cuda=12.8,features=avx2", "runtime cuda 12.8 here, unknown in the decision"),
        ("cpu:x86_64", "fake/fast does not serve decode here: features: needs avx2, this has none"),
    ],
)
def test_another_machine_is_refused(loaded, offer, fast, platform, said) -> None:
    own = [fast, offer("slow", options=(SPLITS,))]
    with pytest.raises(InvalidInput) as caught:
        loaded.check(Platform.parse(platform), own, libraries={"kernels": "2.1"}.get)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": "1.3"}, "fake/slow: version 1.3 here, 1.2.3 in the decision"),
        ({"distribution": ""}, "fake/slow: distribution none here, attnmux-fake in the decision"),
    ],
)
def test_another_plugin_is_refused(loaded, offer, fast, cpu, changed, said) -> None:
    own = [fast, replace(offer("slow", options=(SPLITS,)), **changed)]
    with pytest.raises(InvalidInput) as caught:
        loaded.check(cpu, own, libraries={"kernels": "2.1"}.get)
    assert said in str(caught.value)


def test_a_card_that_says_otherwise_is_refused(loaded, offer, fast, cpu) -> None:
    own = [fast, offer("slow", factory="fake.other:Backend")]
    with pytest.raises(InvalidInput) as caught:
        loaded.check(cpu, own, libraries={"kernels": "2.1"}.get)
    assert "fake/slow: factory fake.other:Backend here, fake.slow:Backend in" in str(caught.value)
    assert "fake/slow: options none here, splits in the decision" in str(caught.value)


def test_every_difference_is_reported(loaded, fast, cpu) -> None:
    with pytest.raises(InvalidInput) as caught:
        loaded.check(cpu, [fast], libraries={}.get)
    assert "fake/slow for extend is offered by no plugin here" in str(caught.value)
    assert "fake/fast does not serve decode here: requires: needs kernels>=2" in str(caught.value)


def test_a_difference_is_reported_once_for_all_phases(offer, cpu) -> None:
    card = offer("both", requires=("kernels>=2",))
    policy = Policy(decode_backend="both")
    decision = solve(Request(), cpu, [card], policy, libraries={"kernels": "2.1"}.get)
    with pytest.raises(InvalidInput) as caught:
        decision.check(cpu, [replace(card, version="9")], libraries={}.get)
    said = str(caught.value)
    assert said.count("version 9 here") == 1
    assert said.count("fake/both does not serve extend and decode here: requires: ") == 1
    with pytest.raises(InvalidInput, match="fake/both for extend and decode is offered by no"):
        decision.check(cpu, [])
