"""The conformance suite as a test class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from attnmux.core.choosing.ask.values import OptionValue
from attnmux.core.errors import InvalidInput
from attnmux.testing.candidate import MACHINE_AXES, Candidate, find_candidate
from attnmux.testing.cases import Case
from attnmux.testing.limits import OutsidePoint, outside_points, try_point
from attnmux.testing.runner import EXECUTIONS, run_case


class AttentionBackendTests:
    """Proof that a backend keeps the contract and that its card is honest.

    A plugin's test is a subclass that names the backend:

        class TestTorchNative(AttentionBackendTests):
            backend = "torch_native"

    Each case that the card admits is a test, so that a report tells how much was really run;
    all that it refuses are one.
    """

    backend: ClassVar[str | Candidate]
    """A name that an installed plugin offers, or a card with its factory."""
    device: ClassVar[str] = ""
    """torch's word; empty: where the card admits anything, an accelerator first."""
    options: ClassVar[Mapping[str, OptionValue]] = {}
    page_sizes: ClassVar[tuple[int, ...]] = ()
    """Only these; empty: the usual ones and those that the card names."""
    executions: ClassVar[tuple[str, ...]] = ("eager", "graph")
    """How cases are run, in graphs where the card declares them."""

    def wants(self, case: Case) -> bool:
        """Whether there is time for the case, for a subclass to say; `attnmux verify` runs all."""
        return True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Sort the cases by whether the card admits them."""
        unknown = set(self.executions).difference(EXECUTIONS)
        if unknown:
            raise InvalidInput(
                "executions", came=sorted(unknown), expected=f"some of {sorted(EXECUTIONS)}"
            )
        candidate = self._candidate()
        metafunc.parametrize("candidate", [candidate], ids=[candidate.card.name])
        names = metafunc.fixturenames
        if "admitted" in names:
            cases = [case for case in self._cases(candidate) if candidate.admits(case)]
            metafunc.parametrize("admitted", cases, ids=lambda case: case.name)
        if "outside" in names:
            points = outside_points(candidate)
            metafunc.parametrize("outside", points, ids=lambda point: point.name)

    def _candidate(self) -> Candidate:
        if isinstance(self.backend, Candidate):
            return self.backend
        return find_candidate(self.backend, device=self.device, options=self.options)

    def _cases(self, candidate: Candidate) -> list[Case]:
        cases = candidate.cases(self.page_sizes)
        return [case for case in cases if case.execution in self.executions and self.wants(case)]

    def test_agrees_with_reference(self, candidate: Candidate, admitted: Case) -> None:
        outcome = run_case(candidate, admitted)
        if outcome.status != "passed":
            raise AssertionError(outcome.message) from outcome.error

    def test_card_refuses_the_rest(self, candidate: Candidate) -> None:
        rest = [case for case in self._cases(candidate) if not candidate.admits(case)]
        outcomes = [run_case(candidate, case) for case in rest]
        assert all(outcome.status == "refused" and outcome.reasons for outcome in outcomes)

    def test_limits_are_kept(self, candidate: Candidate, outside: OutsidePoint) -> None:
        outcome = try_point(candidate, outside)
        assert outcome.status == "refused", outcome.message

    def test_some_case_runs(self, candidate: Candidate) -> None:
        """A card that admits nothing of what is to be run proves nothing."""
        refusals = [candidate.refusals(case.request) for case in self._cases(candidate)]
        if not refusals:
            pytest.fail(f"the card of {candidate.card.name} declares no graphs")
        if all(refusals):
            reasons = {str(r): r for reasons in refusals for r in reasons}
            machine = [text for text, r in reasons.items() if r.axis in MACHINE_AXES]
            if machine:
                pytest.skip(f"{candidate.card.name} cannot run here: {'; '.join(machine)}")
            pytest.fail(f"{candidate.card.name} admits no case: {'; '.join(reasons)}")
