from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest

from attnmux.core import Decision, InvalidInput, Policy, Request, solve
from attnmux.core.plugin import Prior, one_of


@pytest.fixture
def decision(offer, cpu) -> Decision:
    cards = [offer("a", rank=10), offer("b", rank=20)]
    return solve(Request.parse("dtype=bf16,page_size=16"), cpu, cards)


def test_json_and_pickle_give_it_back(decision) -> None:
    again = Decision.from_json(decision.to_json())
    assert again == decision
    assert again.hash == decision.hash
    assert Decision.from_json(decision.to_json(indent=2)) == decision
    assert pickle.loads(pickle.dumps(decision)) == decision


def test_a_last_resort_in_one_phase_makes_it_one(offer, cpu) -> None:
    request = Request.parse("dtype=bf16,page_size=16")
    fast, slow = offer("a", rank=10), offer("b", rank=Prior.LAST_RESORT)
    assert not solve(request, cpu, [fast, slow]).is_last_resort
    assert solve(request, cpu, [slow]).is_last_resort
    assert solve(request, cpu, [fast, slow], Policy(prefill_backend="b")).is_last_resort


def test_the_hash_covers_the_decision(decision, offer, cpu) -> None:
    other = replace(decision, candidates=(), platform=replace(cpu, name="other", count=2))
    assert other.hash == decision.hash
    asked_by_file = decision.request.replace(origin="config", page_size=16)
    assert replace(decision, request=asked_by_file).hash == decision.hash
    assert replace(decision, page_size=32).hash != decision.hash
    assert replace(decision, kv_dtype="float16").hash != decision.hash
    newer = {phase: replace(c, version="9") for phase, c in decision.phases.items()}
    assert replace(decision, phases=newer).hash != decision.hash
    named = solve(decision.request, cpu, [offer("b")], Policy(backend="b"))
    assert named.hash != decision.hash


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data.pop("phases"), "KeyError: 'phases'"),
        (lambda data: data.update(page_size=32), "the hash of its content"),
        (lambda data: data["request"].update(tree=1), "'tree'"),
        (lambda data: data["phases"]["decode"].update(backend="c"), "the hash of its content"),
        (lambda data: data["phases"].update(decode=3), "decision: expected the JSON"),
        (lambda data: data.update(hash=None), "the hash of its content"),
        (lambda data: data["request"].pop("page_size"), "by another version of attnmux"),
        (lambda data: data["phases"]["decode"].update(new=1), "of this version's"),
        (lambda data: data["candidates"][0].update(reasons="x"), "decision: expected the JSON"),
        (lambda data: data.update(hash=None, phases={}), "in which nothing was decided"),
    ],
)
def test_text_that_is_not_a_decision_is_refused(decision, damage, said) -> None:
    data = json.loads(decision.to_json())
    damage(data)
    with pytest.raises(InvalidInput) as caught:
        Decision.from_json(json.dumps(data))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"platform": {"vendor', "[" * 100_000])
def test_other_json_is_refused(text) -> None:
    with pytest.raises(InvalidInput, match="decision: expected the JSON"):
        Decision.from_json(text)


def test_the_summary_names_backends_and_reasons(decision, offer, hopper, cpu) -> None:
    assert decision.summary() == (
        "a (fake) serves extend and decode, rank 10, the best of 2 that fit; "
        "on cpu:x86_64,features=avx2, page size 16, KV in bfloat16"
    )
    cards = [offer("a", rank=10), offer("b", rank=20)]
    named = solve(Request(), replace(cpu, name="A CPU"), cards, Policy(decode_backend="b"))
    said = "b (fake) serves decode, named by user, rank 20, behind 1 of 2 that fit"
    assert said in named.summary()
    assert "; on A CPU, " in named.summary()
    assert "\n" not in named.summary()


def test_a_choice_has_its_origin_and_the_hash_leaves_it_out(offer, cpu) -> None:
    cards = [
        offer("a", rank=10),
        offer("b", rank=20, phase=one_of("decode"), companions=("c",)),
        offer("c", rank=30),
    ]
    request = Request.parse("dtype=bf16")

    def origins(decision: Decision) -> dict[str, str]:
        again = Decision.from_json(decision.to_json())
        return {phase: choice.origin for phase, choice in again.phases.items()}

    nobody = solve(request, cpu, cards)
    assert origins(nobody) == {"extend": "", "decode": ""}
    both = solve(request, cpu, cards, Policy(backend="a", origins={"backend": "config"}))
    assert origins(both) == {"extend": "config", "decode": "config"}
    assert both.hash == nobody.hash
    one = solve(
        request, cpu, cards, Policy(prefill_backend="a", origins={"prefill_backend": "env"})
    )
    assert origins(one) == {"extend": "env", "decode": ""}
    companion = solve(request, cpu, cards, Policy(backend="b"))
    assert [choice.backend for choice in companion.phases.values()] == ["c", "b"]
    assert origins(companion) == {"extend": "", "decode": "user"}


def test_the_summary_counts_only_eligible_backends(offer, cpu) -> None:
    """One fits alone but not at the page size that was decided, one not beside the other half."""
    cards = [
        offer("decoder", rank=10, phase=one_of("decode"), page_size=one_of(64), excludes=("foe",)),
        offer("elsewhere", rank=20, page_size=one_of(16)),
        offer("foe", rank=5, phase=one_of("extend")),
        offer("taken", rank=30),
        offer("behind", rank=40),
    ]
    decision = solve(Request.parse("dtype=bf16"), cpu, cards)
    assert "taken (fake) serves extend, rank 30, the best of 2 that fit" in decision.summary()
    assert "decoder (fake) serves decode, rank 10, the best of 3 that fit" in decision.summary()
    again = Decision.from_json(decision.to_json())
    assert again.summary() == decision.summary()
    eligible = {(v.backend, v.phase) for v in again.candidates if v.eligible}
    assert eligible == {
        ("decoder", "decode"),
        *((name, phase) for name in ("taken", "behind") for phase in ("extend", "decode")),
    }
