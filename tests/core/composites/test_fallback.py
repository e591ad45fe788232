"""Going on to the next candidate when a chosen backend cannot be made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import pytest

from attnmux.core import (
    BackendFailed,
    Decision,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Request,
    make_first,
    solve,
)
from attnmux.core.plugin import ANY, BackendCard, Clause, Prior

Decide = Callable[[Mapping[str, BackendFailed]], Decision]


def offer(name: str, rank: int) -> Offer:
    card = BackendCard(
        name=name,
        summary="",
        factory="nowhere:make",
        requires=(f"{name}-kernels",),
        extra=name,
        clauses=(
            Clause(
                vendor=ANY,
                phase=ANY,
                kind=ANY,
                dtype=ANY,
                kv_dtype=ANY,
                page_size=ANY,
                head_dim=ANY,
            ),
        ),
        priors=(Prior(rank=rank, source="a test"),),
    )
    return Offer(card=card, plugin="fakes", distribution="attnmux-fakes")


def deciding(backend: str | None = None) -> Decide:
    def decide(failed: Mapping[str, BackendFailed]) -> Decision:
        return solve(
            Request(dtype="bfloat16"),
            Platform.parse("cpu:x86_64"),
            [offer("first", 1), offer("second", 2), offer("third", 3)],
            Policy(backend=backend, failed=failed),
            libraries=lambda _: "1.0",
        )

    return decide


def failing(*names: str) -> Callable[[Decision], str]:
    def make(decision: Decision) -> str:
        name = decision.phases["decode"].backend
        if name in names:
            raise BackendFailed(f"fakes/{name}", "nvcc: not found")
        return name

    return make


def test_nothing_is_said_when_the_winner_is_made() -> None:
    assert make_first(deciding(), failing(), lambda *_: pytest.fail("no fallback")) == "first"


def test_each_failure_is_told_with_what_replaces_it() -> None:
    said: list[tuple[str, str]] = []
    made = make_first(
        deciding(),
        failing("first", "second"),
        lambda failure, decision: said.append((failure.address, decision.phases["decode"].backend)),
    )
    assert made == "third"
    assert said == [("fakes/first", "second"), ("fakes/second", "third")]


def test_the_loser_carries_its_failure() -> None:
    def make(decision: Decision) -> Decision:
        failing("first")(decision)
        return decision

    decision = make_first(deciding(), make, lambda *_: None)
    (reason,) = {
        reason
        for verdict in decision.candidates
        if verdict.backend == "first"
        for reason in verdict.reasons
    }
    assert reason.code == "FAILED"
    assert "nvcc: not found" in reason.offered
    assert reason.hint == "pip install 'attnmux-fakes[first]'"


def test_a_named_backend_is_an_error_and_not_replaced() -> None:
    with pytest.raises(NoBackend, match="first cannot serve") as caught:
        make_first(deciding("first"), failing("first"), lambda *_: pytest.fail("no fallback"))
    assert "nvcc: not found" in str(caught.value)
    assert "pip install 'attnmux-fakes[first]'" in str(caught.value)


def test_all_failing_is_an_error_with_every_failure() -> None:
    with pytest.raises(NoBackend) as caught:
        make_first(deciding(), failing("first", "second", "third"), lambda *_: None)
    assert str(caught.value).count("nvcc: not found") == 3


def test_what_a_failed_attempt_held_is_free_before_the_next() -> None:
    class Pool:
        pass

    held: list[weakref.ref[Pool]] = []

    def make(decision: Decision) -> str:
        gc.collect()
        assert all(pool() is None for pool in held)
        pool = Pool()
        held.append(weakref.ref(pool))
        return failing("first")(decision)

    assert make_first(deciding(), make, lambda *_: None) == "second"
