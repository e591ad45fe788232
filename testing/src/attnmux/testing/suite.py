"""The conformance suite as a test class."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from random import SystemRandom
from typing import ClassVar

import pytest

from attnmux.core import InvalidInput
from attnmux.core.plugin import OptionValue
from attnmux.testing.cases.linear import AnyCase
from attnmux.testing.run.candidate import MACHINE_AXES, Candidate, find_candidate
from attnmux.testing.run.execution import EXECUTIONS
from attnmux.testing.run.runner import run_case
from attnmux.testing.sampling.card_limits import OutsidePoint, outside_points, try_point
from attnmux.testing.sampling.sampler import Sampler


class AttentionBackendTests:
    """Tests that a backend keeps the contract and that its card is right.

    A plugin's test is a subclass that names the backend:

        class TestTorchNative(AttentionBackendTests):
            backend = "torch_native"

    Each case that the card admits is a test of its own; all refused cases together are one test.
    """

    backend: ClassVar[str | Candidate]
    """The name of an installed backend, or a `Candidate`."""
    device: ClassVar[str] = ""
    """torch's name of the device. Empty: the first platform on which the card admits a case,
    accelerators before the CPU."""
    options: ClassVar[Mapping[str, OptionValue]] = {}
    page_sizes: ClassVar[tuple[int, ...]] = ()
    """Page sizes of the cases. Empty: the usual ones and those that the card names."""
    executions: ClassVar[tuple[str, ...]] = ("eager", "graph")
    """How cases are run: "eager", "graph" or both. Graphs run only if the card declares them."""

    sampled: ClassVar[int] = 0
    """Cases to sample from the card in each run, with a seed that a failure names. `attnmux verify`
    samples until its budget ends."""

    def wants(self, case: AnyCase) -> bool:
        """Whether to run the case. Override it to save time; `attnmux verify` runs all cases."""
        return True

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise the tests with the admitted cases and the points beyond the card's limits."""
        unknown = set(self.executions).difference(EXECUTIONS)
        if unknown:
            raise InvalidInput(
                "executions", got=sorted(unknown), expected=f"some of {sorted(EXECUTIONS)}"
            )
        candidate = self._candidate()
        metafunc.parametrize("candidate", [candidate], ids=[candidate.card.name])
        names = metafunc.fixturenames
        if "admitted" in names:
            cases = list(candidate.admitted(self._cases(candidate)))
            metafunc.parametrize("admitted", cases, ids=lambda case: case.name)
        if "outside" in names:
            points = outside_points(candidate)
            metafunc.parametrize("outside", points, ids=lambda point: point.name)

    def _candidate(self) -> Candidate:
        if isinstance(self.backend, Candidate):
            return self.backend
        return find_candidate(self.backend, device=self.device, options=self.options)

    def _cases(self, candidate: Candidate) -> list[AnyCase]:
        cases = candidate.cases(self.page_sizes)
        return [case for case in cases if case.execution in self.executions and self.wants(case)]

    def test_agrees_with_reference(self, candidate: Candidate, admitted: AnyCase) -> None:
        outcome = run_case(candidate, admitted)
        if outcome.status != "passed":
            raise AssertionError(outcome.message) from outcome.error

    def test_agrees_on_samples(self, candidate: Candidate) -> None:
        """Random cases of the card, others in each run. A failure names the seed."""
        seed = SystemRandom().randrange(1 << 31)
        print(f"seed of the sampled cases: {seed}")  # pytest shows it on a failure
        sampler = Sampler(
            candidate=candidate, seed=seed, page_sizes=frozenset(self.page_sizes), most_cost=0.1
        )
        wanted = (case for case in sampler.cases() if case.execution in self.executions)
        for case in islice(wanted, self.sampled):
            outcome = run_case(candidate, case, seed=seed)
            if outcome.status != "passed":
                again = f"attnmux verify {candidate.card.name} --quick --seed {seed}"
                raise AssertionError(f"{case.name}: {outcome.message} ({again})") from outcome.error

    def test_card_refuses_the_rest(self, candidate: Candidate) -> None:
        cases = self._cases(candidate)
        admitted = {case.name for case in candidate.admitted(cases)}
        outcomes = [run_case(candidate, case) for case in cases if case.name not in admitted]
        assert all(outcome.status == "refused" and outcome.reasons for outcome in outcomes)

    def test_limits_are_kept(self, candidate: Candidate, outside: OutsidePoint) -> None:
        outcome = try_point(candidate, outside)
        assert outcome.status == "refused", outcome.message

    def test_some_case_runs(self, candidate: Candidate) -> None:
        """A card that admits no case proves nothing."""
        cases = self._cases(candidate)
        if any(candidate.admitted(cases)):
            return
        refusals = [candidate.refusals(case.request) for case in cases]
        if not refusals:
            pytest.fail(f"the card of {candidate.card.name} declares no graphs")
        if all(refusals):
            reasons = {str(r): r for reasons in refusals for r in reasons}
            machine = [text for text, r in reasons.items() if r.axis in MACHINE_AXES]
            if machine:
                pytest.skip(f"{candidate.card.name} cannot run here: {'; '.join(machine)}")
            pytest.fail(f"{candidate.card.name} admits no case: {'; '.join(reasons)}")
