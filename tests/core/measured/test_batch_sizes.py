"""Decode steps of some batch sizes on another backend: where measurements say so, never else."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import (
    BackendFailed,
    Decision,
    InvalidInput,
    Measurement,
    Offer,
    Platform,
    Policy,
    Request,
    solve,
    solve_measured,
)
from attnmux.core.plugin import ANY, BackendCard, Clause, Option, one_of
from attnmux.core.verbs import Device, Question

REQUEST = Request.parse("num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bf16")
HOPPER = replace(Platform.parse("nvidia:sm90,cuda=12.8", is_here=True), name="NVIDIA H200")
SIZES = (1, 16, 64, 256)


def timed(offer, size, median_us, **changes) -> Measurement:
    question = Question(request=REQUEST, platform=HOPPER, phase="decode")
    fields = {
        "backend": offer.address,
        "phase": "decode",
        "shape": Measurement.shape_of(question),
        "workload": f"decode:bs={size},ctx=4096",
        "batch_size": size,
        "device": Device.of(HOPPER),
        "versions": offer.versions(),
        "median_us": median_us,
        "conformant": True,
        "date": datetime(2026, 5, 1, 12, tzinfo=timezone.utc),
    }
    return Measurement(**{**fields, **changes})


def measured(**times) -> list[Measurement]:
    return [
        timed(offer, size, us)
        for offer, series in times.values()
        for size, us in zip(SIZES, series, strict=True)
    ]


def decide(offers, measurements, policy=None, request=REQUEST) -> Decision:
    return solve_measured(request, HOPPER, offers, policy, measurements=measurements)


def said(decision: Decision) -> list[tuple[int, int | None, str]]:
    return [(each.least, each.most, each.choice.backend) for each in decision.decode_sizes]


@pytest.fixture
def three(offer):
    """The priors favour a, then b, then c."""
    return [offer("a", rank=10), offer("b", rank=20), offer("c", rank=30)]


@pytest.fixture
def times(three):
    """a is best over all; b at 1 request, c at 256."""
    a, b, c = three
    return measured(
        a=(a, (10.0, 100.0, 100.0, 1000.0)),
        b=(b, (8.0, 140.0, 140.0, 1400.0)),
        c=(c, (30.0, 120.0, 99.0, 900.0)),
    )


def test_each_size_has_the_backend_that_is_fastest_there(three, times) -> None:
    decision = decide(three, times)
    assert decision.phases["decode"].backend == "a"
    # Between 1 and 16, and between 64 and 256, by the nearer ratio.
    assert said(decision) == [(1, 4, "b"), (129, None, "c")]
    assert [each.gain for each in decision.decode_sizes] == [0.2, 0.1]
    assert decision.decode_sizes[0].choice.origin == ""
    assert (
        "b (fake) serves decode of 1 to 4 requests, saving at least 20% of the time (measured)"
        in decision.summary()
    )
    assert "c (fake) serves decode of 129 and more requests" in decision.summary()
    assert [choice.backend for _, choice in decision.choices] == ["a", "a", "b", "c"]


def test_a_range_in_words(three, times) -> None:
    one = decide(three, times).decode_sizes[0]
    told = [str(replace(one, most=most)) for most in (1, 4, None)]
    assert told == ["1", "1 to 4", "1 and more"]


def test_it_survives_json_and_is_in_the_hash(three, times) -> None:
    decision = decide(three, times)
    assert Decision.from_json(decision.to_json()) == decision
    plain = replace(decision, decode_sizes=())
    assert decision.hash != plain.hash
    slower = replace(decision.decode_sizes[0], gain=0.05)
    assert replace(decision, decode_sizes=(slower, *decision.decode_sizes[1:])).hash == (
        decision.hash
    )
    text = decision.to_json().replace('"most": 4', '"most": 5')
    with pytest.raises(InvalidInput, match="it was changed since"):
        Decision.from_json(text)


def test_neighbours_of_one_backend_are_one_range(three) -> None:
    a, b, _ = three
    found = measured(a=(a, (100.0, 100.0, 100.0, 100.0)), b=(b, (90.0, 80.0, 200.0, 200.0)))
    (only,) = decide(three, found).decode_sizes
    # What is saved at the least: 10 % at 1 request.
    assert (only.least, only.most, only.gain) == (1, 32, 0.1)


@pytest.mark.parametrize(("us", "there"), [(97.9, True), (98.1, False), (100.0, False)])
def test_a_gain_of_two_percent_is_needed(three, us, there) -> None:
    a, b, _ = three
    found = measured(a=(a, (100.0,) * 4), b=(b, (200.0, us, 200.0, 200.0)))
    assert bool(decide(three, found).decode_sizes) is there


def test_one_that_is_best_at_every_size_serves_alone(three) -> None:
    a, b, _ = three
    found = measured(a=(a, (100.0,) * 4), b=(b, (50.0,) * 4))
    decision = decide(three, found)
    assert (decision.phases["decode"].backend, decision.decode_sizes) == ("b", ())


@pytest.mark.parametrize(
    "policy",
    [
        Policy(backend="a"),
        Policy(decode_backend="a"),
        Policy(decode_backend="a", origins={"decode_backend": "env"}),
        Policy(prefer=("a",)),
        Policy(deny=("b", "c")),
        Policy(allow=("a",)),
        Policy(failed={name: BackendFailed(name, "no kernel") for name in ("fake/b", "fake/c")}),
    ],
)
def test_a_policy_turns_it_off(three, times, policy) -> None:
    decision = decide(three, times, policy)
    assert (decision.phases["decode"].backend, decision.decode_sizes) == ("a", ())


def test_the_options_of_all_are_the_users(offer, three, times) -> None:
    option = Option(name="splits", type=int, default=0)
    b = offer("b", rank=20, options=(option,))
    offers = [three[0], b, three[2]]
    (first, _) = decide(offers, times, Policy(options={"b": {"splits": "8"}})).decode_sizes
    assert first.choice.options == {"splits": 8}
    (first, _) = decide(offers, times).decode_sizes
    assert first.choice.options == {"splits": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"conformant": False},
        {"batch_size": None},
        {"phase": "extend"},
        {"shape": "head_dim=64"},
        {"versions": {"attnmux-fake": "1.0"}},
        {"device": replace(Device.of(HOPPER), name="NVIDIA H100")},
    ],
)
def test_measurements_that_do_not_count(three, times, change) -> None:
    changed = [replace(each, **change) if "/a" not in each.backend else each for each in times]
    assert decide(three, changed).decode_sizes == ()


def test_one_that_cannot_decode_as_decided(offer, three, times) -> None:
    """The decided page size is a's, whose pages b does not read."""
    b = offer("b", rank=20, page_size=one_of(64))
    a = offer("a", rank=10, page_size=one_of(16))
    decision = decide([a, b, three[2]], times)
    assert decision.page_size == 16
    assert said(decision) == [(129, None, "c")]


def test_one_that_must_not_share_the_cache(offer, three, times) -> None:
    b = offer("b", rank=20, excludes=("a",))
    assert said(decide([three[0], b, three[2]], times)) == [(129, None, "c")]


def test_one_size_is_no_reason(three) -> None:
    a, b, _ = three
    found = [timed(a, 16, 100.0), timed(b, 16, 90.0), timed(b, 64, 10.0)]
    assert decide(three, found).decode_sizes == ()


def test_a_request_without_decode(three, times) -> None:
    asked = REQUEST.replace(phases=("extend",))
    assert decide(three, times, request=asked).decode_sizes == ()


def test_without_measurements_it_equals_solve(three) -> None:
    assert decide(three, []) == solve(REQUEST, HOPPER, three)


def test_a_loaded_decision_is_checked_in_full(three, times) -> None:
    decision = decide(three, times)
    decision.check(HOPPER, three)
    with pytest.raises(InvalidInput, match="fake/b for decode is offered by no plugin here"):
        decision.check(HOPPER, [three[0], three[2]])


series = st.lists(st.floats(min_value=1.0, max_value=100.0), min_size=4, max_size=4)


@settings(deadline=None)
@given(st.tuples(series, series, series))
def test_ranges_are_in_order_and_always_save_time(all_times) -> None:
    everything = dict.fromkeys(Clause.__dataclass_fields__, ANY)
    offers = [
        Offer(
            card=BackendCard(name=name, summary="", clauses=(Clause(**everything),), factory="x:y"),
            plugin="fake",
            version="1",
        )
        for name in "abc"
    ]
    found = measured(**{o.card.name: (o, ts) for o, ts in zip(offers, all_times, strict=True)})
    decision = decide(offers, found)
    by_name = {
        o.card.name: dict(zip(SIZES, ts, strict=True))
        for o, ts in zip(offers, all_times, strict=True)
    }
    usual = decision.phases["decode"].backend
    end = 0
    for each in decision.decode_sizes:
        assert each.least > end
        end = each.most or 10**9
        inside = [size for size in SIZES if each.least <= size <= end]
        assert inside
        shares = [by_name[each.choice.backend][s] / by_name[usual][s] for s in inside]
        assert max(shares) < 0.98
        assert each.gain == pytest.approx(1 - max(shares), abs=1e-4)
        for size in inside:
            fastest = min(times[size] for times in by_name.values())
            assert by_name[each.choice.backend][size] == pytest.approx(fastest)
    served = [
        s for s in SIZES if not any(e.least <= s <= (e.most or s) for e in decision.decode_sizes)
    ]
    for size in served:
        best = min(times[size] for times in by_name.values())
        assert best / by_name[usual][size] >= 0.98
