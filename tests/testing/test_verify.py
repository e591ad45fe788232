"""`attnmux verify`: what it runs, what it says, how it exits."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import one_of
from attnmux.testing import (
    Candidate,
    FakeBackend,
    fake_card,
    fake_platform,
    graph_card,
    run_in_children,
    standard_cases,
)
from attnmux.testing.run import children
from attnmux.testing.run.candidate import Outcome, StepFigures
from attnmux.testing.verification.printed import by_length


class NoScale(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q * 2, k, v, keep, layer)


def invoke(*arguments: str) -> Result:
    """The verb in this process with the fixed cases alone, unless told otherwise."""
    return CliRunner().invoke(verbs, ["verify", "--jobs", "0", "--budget", "0", *arguments])


@pytest.fixture
def on_trial(monkeypatch: pytest.MonkeyPatch):
    """Puts a candidate in the place of an installed backend."""

    def put(**given: object) -> None:
        candidate = Candidate(**{"card": fake_card(), "platform": fake_platform(), **given})
        monkeypatch.setattr(
            "attnmux.testing.verification.command.find_candidate", lambda *_, **__: candidate
        )

    return put


@pytest.fixture
def fewer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One case in six, where what is said of them is what matters."""
    monkeypatch.setattr(
        "attnmux.testing.run.candidate.standard_cases", lambda sizes: standard_cases(sizes)[::6]
    )


def test_an_installed_backend_passes(fewer_cases) -> None:
    result = invoke("torch_native", "--device", "cpu", "--page-size", "16", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["backend"] == "torch_native"
    assert answer["failed"] == 0
    assert answer["complete"] is False  # of one page size
    assert {"attnmux-cpu", "attnmux-core", "torch"} <= set(answer["versions"])
    assert answer["passed"] + answer["refused"] == len(answer["cases"])
    assert answer["passed"] > 25
    assert answer["limits"]
    assert 0 < answer["max_error"] < 0.1
    steps = [step for case in answer["cases"] for step in case["steps"]]
    assert all(0 <= step["rms"] <= 1.01 * step["worst"] for step in steps)
    assert len({step["keys"] for step in steps}) > 5


def test_a_pattern_that_no_sampled_case_has_ends_with_the_budget(on_trial) -> None:
    on_trial(card=fake_card(phase=one_of("decode"), kind=one_of("mha")))
    given = ["fake", "-k", "decode-uneven-page16$", "--budget", "0.5", "--json"]
    answer = json.loads(invoke(*given).stdout)
    assert (answer["passed"], answer["sampled"]) == (1, 0)


def test_counts_what_ran_and_what_was_refused(on_trial) -> None:
    on_trial(card=fake_card(page_size=one_of(16), phase=one_of("verify"), kind=one_of("mha")))
    cases = [case for case in standard_cases((5, 16)) if case.page_size in (5, 16)]
    served = sum(
        (case.page_size == 16 and case.kind == "mha" and case.kv_dtype != "fp4_e2m1")
        and set(case.request.phases) == {"verify"}
        for case in cases
    )
    result = invoke("fake", "--page-size", "16", "--page-size", "5")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert f"{served} of {served} cases agree" in said
    assert f"{len(cases) - served} refused by the card" in said
    assert "bfloat16, rms (worst)" in said
    assert "page_size: asked for 5, serves 16" in result.stdout
    assert result.stderr == ""


def test_a_failure_is_named_and_exits_with_1(on_trial, fewer_cases) -> None:
    on_trial(factory=NoScale, card=fake_card(phase=one_of("decode"), kind=one_of("mha")))
    result = invoke("fake", "--page-size", "1")
    assert result.exit_code == 1
    assert "decode-one-request-page1" in result.stdout
    result = invoke("fake", "--page-size", "1", "--json")
    assert result.exit_code == 1
    failed = [case for case in json.loads(result.stdout)["cases"] if case["status"] == "failed"]
    assert len(failed) > 5
    assert all("instead of" in case["message"] for case in failed)


def test_a_backend_that_cannot_run_here_is_no_success(on_trial) -> None:
    on_trial(card=fake_card(vendor=one_of("elsewhere")))
    result = invoke("fake", "--page-size", "1")
    assert result.exit_code == 3
    assert "vendor: needs elsewhere, this is fake" in result.stdout
    assert invoke("fake", "--page-size", "1", "--json").exit_code == 3


def test_an_unknown_backend_is_a_usage_error() -> None:
    result = invoke("torch_nativ")
    assert result.exit_code == 2
    assert "did you mean 'torch_native'?" in result.stderr


def test_a_device_that_is_not_there_is_a_usage_error() -> None:
    result = invoke("torch_native", "--device", "npu")
    assert result.exit_code == 2
    assert "device: expected one of" in result.stderr


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmux.testing.verification.command.find_spec", lambda name: None)
    result = invoke("torch_native", "--device", "cpu")
    assert result.exit_code == 3
    assert "pip install 'attnmux-core[torch]'" in result.stderr


def test_runs_cases_in_graphs_where_the_card_declares_them(on_trial, fewer_cases) -> None:
    on_trial(card=graph_card(page_size=one_of(48), phase=one_of("verify"), kind=one_of("mha")))
    result = invoke("fake", "--page-size", "48")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    eager, graph = re.search(
        r"(\d+) of \1 cases agree and (\d+) of \2 cases in graphs", said
    ).groups()
    assert int(eager) >= int(graph) > 0
    for execution, count in (("eager", eager), ("graph", graph)):
        result = invoke("fake", "--page-size", "48", "--execution", execution, "--json")
        answer = json.loads(result.stdout)
        assert answer["passed"] == int(count)
        assert {case["execution"] for case in answer["cases"]} == {execution}


def test_samples_until_the_budget_ends(on_trial) -> None:
    on_trial(card=fake_card(phase=one_of("decode"), kind=one_of("mha")))
    arguments = ["fake", "--quick", "--budget", "1", "--seed", "7"]
    first = json.loads(invoke(*arguments, "--json").stdout)
    assert first["seed"] == 7
    assert first["failed"] == 0
    assert 0 < first["pairs_covered"] < first["pairs"]
    assert first["sampled"] == len(first["cases"]) > 0
    result = invoke(*arguments)
    assert re.search(r"\d+ % of \d+ pairs of values; repeat them with --seed 7", result.stdout)


def test_a_pattern_and_fail_fast_run_less(on_trial) -> None:
    on_trial(factory=NoScale, card=fake_card(phase=one_of("decode"), kind=one_of("mha")))
    answer = json.loads(invoke("fake", "-k", "decode-uneven-page16$", "--json").stdout)
    assert {case["case"] for case in answer["cases"]} == {"decode-uneven-page16"}
    answer = json.loads(invoke("fake", "--fail-fast", "--json").stdout)
    assert answer["failed"] == 1
    assert answer["cases"][-1]["status"] == "failed"
    assert invoke("fake", "-k", "(").exit_code == 2
    result = invoke("fake", "-k", "zzz", "--budget", "0")
    assert result.exit_code == 2
    assert "-k: expected a pattern in the name of a case, such as " in result.stderr


@pytest.mark.parametrize("option", ["--budget", "--timeout"])
@pytest.mark.parametrize("seconds", ["nan", "inf"])
def test_seconds_that_never_end_are_refused(on_trial, option, seconds) -> None:
    on_trial()
    result = invoke("fake", option, seconds)
    assert result.exit_code == 2
    assert f"{seconds} is not a finite number" in result.stderr


class Crashing(FakeBackend):
    """Ends the process in one case and hangs in another."""

    def attend(self, q, k, v, keep, layer):
        if q.shape[1] == 14:
            os.abort()
        if q.shape[1] == 16:
            time.sleep(3600)
        return super().attend(q, k, v, keep, layer)


def test_a_crash_and_a_hang_are_failed_cases(monkeypatch) -> None:
    # The child imports this module, and pytest's import mode leaves no path to it
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    candidate = Candidate(card=fake_card(), platform=fake_platform(), factory=Crashing)
    names = ("decode-14x2-heads-page16", "decode-16x2-heads-page16", "decode-uneven-page16")
    cases = {case.name: case for case in standard_cases((16,))}
    trials = iter([(cases[name], 0) for name in names])
    outcomes = {
        outcome.case: outcome for outcome in run_in_children(candidate, trials, jobs=1, timeout=3)
    }
    assert outcomes[names[0]].message == "its process ended with SIGABRT"
    assert outcomes[names[1]].message == "it took longer than 3 seconds"
    assert outcomes[names[2]].status == "passed"


def test_a_child_that_does_not_start_is_a_failed_case(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.setattr(children, "STARTUP", 0.05)
    candidate = Candidate(card=fake_card(), platform=fake_platform(), factory=Crashing)
    trials = iter([(standard_cases((16,))[0], 0)])
    (outcome,) = run_in_children(candidate, trials, jobs=1, timeout=0.05)
    assert outcome.message == "its process did not start within 0.1 seconds"


class Leaving(FakeBackend):
    """Ends the process as if all were well: within one case, and soon after another."""

    def attend(self, q, k, v, keep, layer):
        if q.shape[1] == 14:
            os._exit(0)
        if q.shape[1] == 16:
            threading.Timer(0.2, os._exit, (0,)).start()
        return super().attend(q, k, v, keep, layer)


def test_a_library_that_ends_the_process_with_0_fails_the_case(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    candidate = Candidate(card=fake_card(), platform=fake_platform(), factory=Leaving)
    names = ("decode-14x2-heads-page16", "decode-16x2-heads-page16", "decode-uneven-page16")
    cases = {case.name: case for case in standard_cases((16,))}

    def trials():
        yield cases[names[0]], 0
        yield cases[names[1]], 0
        time.sleep(2)  # the process ends meanwhile
        yield cases[names[2]], 0

    outcomes = {
        each.case: each for each in run_in_children(candidate, trials(), jobs=1, timeout=60)
    }
    for name in (names[0], names[2]):
        assert outcomes[name].status == "failed"
        assert outcomes[name].message == "its process ended with exit status 0"


def test_a_card_without_graphs_has_nothing_to_run_in_them(on_trial) -> None:
    on_trial()
    result = invoke("fake", "--execution", "graph")
    assert result.exit_code == 2
    assert "expected eager: the card of fake declares no graphs, got graph" in result.output


def test_errors_by_length_and_dtype() -> None:
    table = by_length(
        [
            StepFigures(dtype="bfloat16", keys=16, ms=1.0, rms=0.5, worst=0.75),
            StepFigures(dtype="bfloat16", keys=17, ms=2.0, rms=0.25, worst=1.5),
            StepFigures(dtype="bfloat16", keys=64, ms=4.0, rms=0.75, worst=1.25),
            StepFigures(dtype="float16", keys=300, ms=8.0, rms=1.0, worst=2.0),
        ]
    )
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    assert columns == [
        ["up to 16", "up to 64", "up to 1024"],
        ["1", "2", "1"],
        ["1.00", "3.00", "8.00"],
        ["0.5 (0.75)", "0.75 (1.5)", ""],
        ["", "", "1 (2)"],
    ]


class Passing:
    """Counts the cases that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        monkeypatch.setattr("attnmux.testing.run.runner.run_case", self)

    def __call__(self, candidate: Candidate, case, *, seed: int) -> Outcome:
        self.ran.append(f"{case.name} {case.execution} {seed}")
        if len(self.ran) == 6:
            raise KeyboardInterrupt
        status = "failed" if len(self.ran) == 3 else "passed"
        return Outcome(case=case.name, execution=case.execution, status=status, max_error=0.25)


RESUMED = ("fake", "--page-size", "16", "-k", "decode", "--json")


def test_an_interrupted_run_goes_on(on_trial, monkeypatch, tmp_path) -> None:
    on_trial()
    file = str(tmp_path / "run.jsonl")
    first = Passing(monkeypatch)
    assert invoke(*RESUMED, "--resume", file).exit_code != 0
    assert len(first.ran) == 6
    second = Passing(monkeypatch)
    second.ran = ["earlier"] * 6
    result = invoke(*RESUMED, "--resume", file)
    answer = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    # The failed one and the interrupted one run again, with the same seed
    assert second.ran[6:8] == [first.ran[2], first.ran[5]]
    assert answer["resumed"] == 4
    assert answer["passed"] == len(second.ran) - 6 + 4
    assert answer["max_error"] == 0.25
    third = Passing(monkeypatch)
    assert json.loads(invoke(*RESUMED, "--resume", file).stdout)["resumed"] == answer["passed"]
    assert third.ran == []


@pytest.mark.parametrize("change", [{"seed": 5}, {"card": fake_card(page_size=one_of(16))}])
def test_another_seed_or_card_starts_anew(on_trial, monkeypatch, tmp_path, change) -> None:
    on_trial()
    file = tmp_path / "run.jsonl"
    Passing(monkeypatch).ran = ["earlier"] * 6
    invoke(*RESUMED, "--resume", str(file), "--seed", "4")
    assert len(file.read_text().splitlines()) > 10
    if "card" in change:
        on_trial(**change)
    passing = Passing(monkeypatch)
    passing.ran = ["earlier"] * 6
    seed = str(change.get("seed", 4))
    answer = json.loads(invoke(*RESUMED, "--resume", str(file), "--seed", seed).stdout)
    assert answer["resumed"] == 0
    assert len(passing.ran) > 10


def test_a_line_that_was_cut_off_is_dropped(on_trial, monkeypatch, tmp_path) -> None:
    on_trial()
    file = tmp_path / "run.jsonl"
    Passing(monkeypatch).ran = ["earlier"] * 6
    passed = json.loads(invoke(*RESUMED, "--resume", str(file)).stdout)["passed"]
    file.write_bytes(file.read_bytes()[:-9])
    Passing(monkeypatch).ran = ["earlier"] * 6
    assert json.loads(invoke(*RESUMED, "--resume", str(file)).stdout)["resumed"] == passed - 1


@pytest.mark.parametrize("content", ["[1]\n", "not json\n{}\n", '{"subject": 1}\n', "{}", "hello"])
def test_a_file_of_something_else(on_trial, tmp_path, content) -> None:
    on_trial()
    file = tmp_path / "notes.txt"
    file.write_text(content)
    result = invoke(*RESUMED, "--resume", str(file))
    assert result.exit_code == 2
    assert "a file that `verify --resume` wrote" in result.output
    assert file.read_text() == content
