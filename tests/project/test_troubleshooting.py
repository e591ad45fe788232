"""Every command of docs/troubleshooting.md runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from attnmux.core.cli.verbs import verbs
from attnmux.testing import (
    Case,
    FailureKeeper,
    FakeBackend,
    decode,
    fake_platform,
    make_setup,
    prepare_step,
    standard_cases,
)
from attnmux.transformers import recall

pytestmark = pytest.mark.usefixtures("no_trial")

PAGE = Path(__file__).resolve().parents[2] / "docs/troubleshooting.md"
COMMANDS = [
    line.strip()
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if re.match(r" {4,}([A-Z_]+=\S* )?attnmux ", line)
]
EXPECTED_STATUS = {"doctor": (0, 1)}
"""`doctor` exits with 1 where something is missing, as on a machine without kernel libraries."""


class Broken(FakeBackend):
    def forward_decode(self, *_: object) -> None:
        raise RuntimeError("planted")


@pytest.fixture
def failure(tmp_path: Path) -> Path:
    """A kept step, without the decision that would name its backend."""
    setup = make_setup(Case(name="a", steps=(decode(5, 9),)), fake_platform(), "cpu")
    step = prepare_step(setup, setup.case.steps[0])
    keeper = FailureKeeper(Broken(setup.context), tmp_path / "kept")
    keeper.init_forward_metadata(step.batch)
    given = step.inputs[0]
    with pytest.raises(RuntimeError):
        keeper.forward(given.q, given.k, given.v, given.layer, step.batch)
    (folder,) = (tmp_path / "kept").iterdir()
    return folder


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` runs every twentieth case."""
    monkeypatch.setattr(
        "attnmux.testing.run.candidate.standard_cases", lambda sizes: standard_cases(sizes)[::20]
    )


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
@pytest.mark.turns(2)
def test_a_command_runs(
    command: str,
    failure: Path,
    shortened: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    replaced = {"MODEL": str(recall.PATH), "failures/failure-x": str(failure)}
    arguments = [replaced.get(word, word) for word in words[1:]]
    if arguments[0] == "replay" and "--backend" not in arguments:
        arguments += ["--backend", "torch_native"]
    if arguments[0] == "bench":
        arguments += ["--seconds", "0.01"]
    if arguments[0] == "verify":
        arguments += ["--budget", "0.3", "--jobs", "0"]
    done = CliRunner().invoke(verbs, arguments)
    assert done.exit_code in EXPECTED_STATUS.get(arguments[0], (0,)), done.output
    if "?S" in command:
        assert done.stdout.strip() == "3051"
    elif "?k" in command:
        assert done.stdout.strip() == "417"


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_first_step_notices_a_missed_first_page(skip_page_0, page_size: int) -> None:
    prompt = shlex.split(next(command for command in COMMANDS if "?S" in command))[2]
    given = ["generate", prompt, "--backend", "torch_native", "--page-size", str(page_size)]
    assert CliRunner().invoke(verbs, given).stdout.strip() == "3051"
    skip_page_0("decode")
    done = CliRunner().invoke(verbs, given)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() != "3051"


def break_decode(monkeypatch: pytest.MonkeyPatch, decode: object) -> None:
    target = "attnmux.cpu.torch_native.TorchNativeBackend.forward_decode"
    monkeypatch.setattr(target, decode)


def generate(*arguments: str) -> Result:
    given = ["generate", "k417, x90 ?k", "--backend", "torch_native", *arguments]
    return CliRunner().invoke(verbs, given)


def test_a_failure_while_generating_is_kept_with_its_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        break_decode(patch, fails)
        done = generate("--keep-failures", str(tmp_path), "--keep-values")
    assert done.exit_code == 1
    (folder,) = tmp_path.iterdir()
    assert str(folder) in done.stderr
    again = CliRunner().invoke(verbs, ["replay", str(folder)])
    assert again.exit_code == 0, again.output
    assert "torch_native, the kept values: agrees with the reference" in again.stdout


def test_the_canary_of_generate_stops_at_a_wrong_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_decode(monkeypatch, lambda self, call, batch: torch.zeros_like(call.q))
    assert generate().exit_code == 0
    done = generate("--canary", "1", "--keep-failures", str(tmp_path))
    assert done.exit_code == 1
    assert "canary, step 2, output, layer" in done.stderr
    assert len(list(tmp_path.iterdir())) == 1
