"""Accuracy: what a request refuses, by cards and by measurements, and what a decision notes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from attnmux.core import (
    Decision,
    InvalidInput,
    Measurement,
    NoBackend,
    Platform,
    Policy,
    Request,
    solve,
    solve_measured,
)
from attnmux.core.measured.ranking import accuracy_by
from attnmux.core.plugin import ErrorBound, one_of
from attnmux.core.verbs import Device, Question
from attnmux.testing.bench.keeping import RecordFile

REQUEST = Request.parse("num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bf16,phases=decode")
HOPPER = replace(Platform.parse("nvidia:sm90,cuda=12.8", is_here=True), name="NVIDIA H200")
LONG = "decode:bs=1,ctx=131072"


def timed(offer, median_us, rms, worst=None, workload=LONG, **changes) -> Measurement:
    question = Question(request=REQUEST, platform=HOPPER, phase="decode")
    given = {
        "backend": offer.address,
        "phase": "decode",
        "shape": Measurement.shape_of(question),
        "workload": workload,
        "device": Device.of(HOPPER),
        "versions": offer.versions(),
        "median_us": median_us,
        "rms_error": rms,
        "worst_error": worst if worst is not None or rms is None else 2 * rms,
        "conformant": True,
        "date": datetime(2026, 5, 1, tzinfo=timezone.utc),
    }
    return Measurement(**{**given, **changes})


def decide(offers, measurements, policy=None, **asked) -> Decision:
    request = REQUEST.replace(**asked) if asked else REQUEST
    return solve_measured(request, HOPPER, offers, policy, measurements=measurements)


def refused(offers, measurements, **asked) -> dict[str, tuple[str, str]]:
    """Code and offer of each refused backend's reason."""
    try:
        candidates = decide(offers, measurements, **asked).candidates
    except NoBackend as refusal:
        candidates = refusal.candidates
    return {v.backend: (v.reasons[0].code, v.reasons[0].offered) for v in candidates if v.reasons}


@pytest.fixture
def pair(offer):
    return [offer("fast", rank=20), offer("exact", rank=10)]


@pytest.fixture
def measured(pair):
    """fast is twice as fast and 23 times as wrong, as FP8 sums of 131,072 keys are."""
    fast, exact = pair
    return [timed(fast, 50.0, 10.0), timed(exact, 100.0, 0.435)]


def test_a_fast_and_inaccurate_winner_is_noted(pair, measured) -> None:
    decision = decide(pair, measured)
    assert decision.phases["decode"].backend == "fast"
    (note,) = decision.notes
    assert "fake/fast for decode" in note
    assert f"10 roundings for {LONG}, 23 times the 0.435 of fake/exact" in note
    assert note in decision.summary()
    assert decision.to_dict()["notes"] == [note]
    assert Decision.from_json(decision.to_json()) == decision
    assert replace(decision, notes=()).hash == decision.hash


@pytest.mark.parametrize(("rms", "noted"), [(0.435, 0), (1.3, 0), (1.31, 1)])
def test_up_to_three_times_the_smallest_error_nothing_is_noted(pair, rms, noted) -> None:
    fast, exact = pair
    assert len(decide(pair, [timed(fast, 50.0, rms), timed(exact, 100.0, 0.435)]).notes) == noted


def test_only_equal_workloads_and_backends_that_could_serve_are_compared(pair, measured) -> None:
    other = [measured[0], replace(measured[1], workload="decode:bs=1,ctx=1024")]
    assert decide(pair, other).notes == ()
    assert decide(pair, measured, Policy(deny=("exact",))).notes == ()
    assert decide(pair, [measured[0], replace(measured[1], conformant=False)]).notes == ()
    assert decide(pair, [measured[0], timed(pair[1], 100.0, None)]).notes == ()
    assert len(decide(pair, measured, Policy(backend="fast")).notes) == 1


def test_max_error_bounds_the_worst_error(pair, measured) -> None:
    assert refused(pair, measured, max_error=25) == {}
    assert decide(pair, measured, max_error=0.9).phases["decode"].backend == "exact"
    said = refused(pair, measured, max_error=0.5)
    assert said["fast"] == ("MAX_ERROR", f"20 measured for {LONG}")
    assert said["exact"] == ("MAX_ERROR", f"0.87 measured for {LONG}")
    with pytest.raises(NoBackend, match=r"an error of 0\.5 roundings at most"):
        decide(pair, measured, max_error=0.5)


def test_a_bound_needs_a_measurement_or_the_cards_promise(pair, measured) -> None:
    code, offered = refused(pair, [], max_error=2)["fast"]
    assert code == "MAX_ERROR"
    assert "attnmux bench --keep" in offered
    old = [replace(each, rms_error=None, worst_error=None) for each in measured]
    assert set(refused(pair, old, max_error=2)) == {"fast", "exact"}
    # The phase that was not measured is as unproven
    assert set(refused(pair, measured, max_error=2, phases="decode+extend")) == {"fast", "exact"}


def test_a_loaded_decision_is_checked_for_accuracy(pair, measured) -> None:
    """Here the measurements differ: exact is no longer so."""
    loaded = Decision.from_json(decide(pair, measured, max_error=0.9).to_json())
    loaded.check(HOPPER, pair, accuracy=accuracy_by(measured, HOPPER, pair))
    fast, exact = pair
    worse = [timed(fast, 50.0, 0.4), timed(exact, 100.0, 10.0)]
    with pytest.raises(InvalidInput, match="fake/exact is not accurate enough here") as caught:
        loaded.check(HOPPER, pair, accuracy=accuracy_by(worse, HOPPER, pair))
    assert "0.9 roundings" in str(caught.value)


def test_without_measurements_a_loaded_decision_goes_by_the_card(pair, measured, offer) -> None:
    loaded = Decision.from_json(decide(pair, measured, max_error=0.9).to_json())
    with pytest.raises(InvalidInput, match="no measured error and no bound"):
        loaded.check(HOPPER, pair)
    bound = ErrorBound(max_error=0.9, keys=131072, source="the test")
    loaded.check(HOPPER, [offer("exact", rank=10, error_bounds=(bound,))])


def test_a_card_may_promise_a_bound(offer) -> None:
    bounds = (
        ErrorBound(max_error=1.5, keys=32768, kv_dtype=one_of("bfloat16"), source="the test"),
        ErrorBound(max_error=12, keys=131072, source="the test"),
    )
    a, b = offers = [offer("a", rank=10), offer("b", rank=20, error_bounds=bounds)]
    asked = REQUEST.replace(max_error=2)
    assert solve(asked, HOPPER, offers).phases["decode"].backend == "b"
    assert bounds[1].to_dict() == {
        **{"max_error": 12, "keys": 131072},
        **{"kv_dtype": "any", "source": "the test"},
    }
    said = refused(offers, [], max_error=1)
    assert said["b"] == ("MAX_ERROR", "1.5 up to 32,768 keys or 12 up to 131,072 keys")
    # What was measured outweighs what was promised
    assert decide(offers, [timed(a, 10.0, 0.4), timed(b, 10.0, 5)], max_error=2).phases[
        "decode"
    ].backend == ("a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_error", -1),
        ("max_error", "small"),
        ("max_error", float("nan")),
    ],
)
def test_requests_hold_a_number_and_a_word(field, value) -> None:
    with pytest.raises(InvalidInput, match=field):
        REQUEST.replace(**{field: value})
    assert Request.parse("max_error=2.5").max_error == 2.5


@pytest.mark.parametrize(
    "changes",
    [{"max_error": 0}, {"max_error": "1"}, {"keys": 0}, {"source": ""}, {"kv_dtype": "bfloat16"}],
)
def test_a_bound_is_checked(changes) -> None:
    given = {"max_error": 1.5, "keys": 4096, "source": "the test"}
    with pytest.raises(InvalidInput, match=f"error bound, {next(iter(changes))}"):
        ErrorBound(**{**given, **changes})


def test_errors_are_kept_and_old_records_have_none(tmp_path, pair, measured) -> None:
    path = tmp_path / "measurements.json"
    RecordFile(path, Measurement).add(measured)
    assert Measurement.read(path).found == tuple(measured)
    old = measured[0].to_dict()
    del old["rms_error"], old["worst_error"]
    assert Measurement.from_dict(old).rms_error is None
    for value in (-1, float("nan"), float("inf"), "2", True):
        with pytest.raises(InvalidInput, match="rms_error"):
            replace(measured[0], rms_error=value)
    assert replace(measured[0], rms_error=0).rms_error == 0
