"""The suite on the fake backend, and what it says of backends that cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnmux.core import InvalidInput
from attnmux.core.plugin import NONE, one_of
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    FakeBackend,
    extend,
    fake_card,
    fake_platform,
    find_candidate,
    run_case,
)
from attnmux.testing.cases.standard import case_of


class TestFakeBackend(AttentionBackendTests):
    backend = Candidate(card=fake_card(), platform=fake_platform())
    page_sizes = (16,)
    sampled = 2


class TestNarrowCard(AttentionBackendTests):
    """Most of the suite has to be refused."""

    backend = Candidate(
        card=fake_card(
            page_size=one_of(64), phase=one_of("decode"), sinks=NONE, dtype=one_of("bfloat16")
        ),
        platform=fake_platform(),
    )


def test_a_wrong_backend_fails_with_what_is_wrong() -> None:
    class Doubled(FakeBackend):
        def attend(self, q, k, v, keep, layer):
            out, lse = super().attend(q, k, v, keep, layer)
            return 2 * out, lse

    candidate = Candidate(card=fake_card(), platform=fake_platform(), factory=Doubled)
    with pytest.raises(AssertionError, match=r"step 1, DECODE: layer 1, output: .* worst is row 0"):
        AttentionBackendTests().test_agrees_with_reference(candidate, candidate.cases()[0])


def test_a_backend_for_another_machine_is_skipped_with_the_reason() -> None:
    candidate = Candidate(card=fake_card(vendor=one_of("elsewhere")), platform=fake_platform())
    with pytest.raises(pytest.skip.Exception, match="cannot run here: vendor: needs"):
        AttentionBackendTests().test_some_case_runs(candidate)


def test_a_card_that_admits_nothing_of_the_suite_fails() -> None:
    candidate = Candidate(card=fake_card(head_dim=one_of(7), kind=NONE), platform=fake_platform())
    with pytest.raises(pytest.fail.Exception, match="fake admits no case: kind"):
        AttentionBackendTests().test_some_case_runs(candidate)


def test_executions_without_a_case_fail() -> None:
    class Tests(AttentionBackendTests):
        backend = Candidate(card=fake_card(), platform=fake_platform())
        executions = ("graph",)

    with pytest.raises(pytest.fail.Exception, match="card of fake declares no graphs"):
        Tests().test_some_case_runs(Tests.backend)


def test_a_case_that_is_not_wanted_is_left_out() -> None:
    class Tests(AttentionBackendTests):
        backend = Candidate(card=fake_card(), platform=fake_platform())
        page_sizes = (16,)

        def wants(self, case):
            return case.name.startswith("decode-scale")

    assert [case.name for case in Tests()._cases(Tests.backend)] == ["decode-scale-page16"]


def test_unknown_executions_are_refused() -> None:
    class Tests(AttentionBackendTests):
        executions = ("graphs",)

    with pytest.raises(InvalidInput, match=r"some of \['eager', 'graph'\], got \['graphs'\]"):
        Tests().pytest_generate_tests(None)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("attnmux.testing", ("torch", "pytest")),
        ("attnmux.testing.cases.standard", ("torch", "pytest")),
        ("attnmux.testing.run.candidate", ("torch", "pytest")),
        ("attnmux.testing.sampling.card_limits", ("torch", "pytest")),
        ("attnmux.testing.run.runner", ("pytest",)),
        ("attnmux.testing.fakes.backend", ("pytest",)),
    ],
)
def test_imports_only_what_it_needs(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {absent!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("strided_kv", [False, True])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(1, 8), (8, 1), (1, 1)])
def test_heads_of_one_value(head_dim, v_head_dim, strided_kv) -> None:
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim, "strided_kv": strided_kv}
    case = case_of("one-value", 4, extend((0, 5), (7, 3)), **dims)
    outcome = run_case(find_candidate("torch_native", device="cpu"), case)
    assert outcome.status == "passed", outcome.message
