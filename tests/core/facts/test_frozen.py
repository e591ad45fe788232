from __future__ import annotations

import copy
import pickle

from attnmux.core import Request, solve
from attnmux.core.facts.frozen import Deferred
from attnmux.core.plugin import one_of


def test_it_is_made_once_when_first_read() -> None:
    made = []

    def make() -> tuple[int, ...]:
        made.append(1)
        return 3, 4

    deferred = Deferred(make)
    assert not made
    assert list(deferred) == [3, 4]
    assert (len(deferred), deferred[0], deferred[-1:], 4 in deferred) == (2, 3, (4,), True)
    assert made == [1]


def test_it_is_the_tuple_in_every_respect() -> None:
    deferred = Deferred(lambda: (3, 4))
    assert deferred == (3, 4)
    assert (3, 4) == deferred  # noqa: SIM300  # the other side's comparison is asked
    assert deferred == Deferred(lambda: (3, 4))
    assert deferred != (3,)
    assert deferred != [3, 4]
    assert hash(deferred) == hash((3, 4))
    assert repr(deferred) == "(3, 4)"
    assert type(pickle.loads(pickle.dumps(deferred))) is tuple
    assert copy.deepcopy(deferred) == (3, 4)


def test_a_decision_asks_for_no_verdict_and_no_library_that_it_does_not_need(offer, cpu) -> None:
    asked = []

    def libraries(name: str) -> str:
        asked.append(name)
        return "1"

    cards = [
        offer("a", rank=1, requires=("needed",)),
        offer("b", vendor=one_of("nobody"), requires=("elsewhere",)),
    ]
    decision = solve(Request(), cpu, cards, libraries=libraries)
    assert decision.phases["decode"].backend == "a"
    assert asked == ["needed"]
    assert len(decision.candidates) == 4
    assert asked == ["needed", "elsewhere"]


def test_a_decision_with_deferred_verdicts_is_the_decision(offer, cpu) -> None:
    def decide():
        return solve(Request.parse("dtype=bf16"), cpu, [offer("a", rank=1), offer("b")])

    read = decide()
    assert len(read.candidates) == 4
    for again in (decide(), pickle.loads(pickle.dumps(decide())), copy.deepcopy(decide())):
        assert again == read
        assert hash(again) == hash(read)
        assert again.hash == read.hash
        assert again.to_json() == read.to_json()
        assert repr(again) == repr(read)
