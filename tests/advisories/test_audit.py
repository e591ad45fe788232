"""`attnmux audit`, as users see it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnmux.core.cli.verbs import verbs


def audit(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(verbs, ["audit", *args], env=environ)


def told(*args: str, **environ: str) -> dict[str, Any]:
    answer = json.loads(audit(*args, "--json", **environ).stdout)
    return {each["id"]: each for each in answer["findings"]}


def test_a_machine_without_such_libraries_is_well() -> None:
    answer = audit("--platform", "cpu:x86_64")
    assert answer.exit_code == 0
    assert "0 of 12 findings apply on cpu:x86_64" in answer.output


def test_our_adapter_avoids_what_the_engines_own_calls_fall_into() -> None:
    where = ("--platform", "amd:gfx942", "--library", "amd-aiter==0.1.18")
    assert told(*where)["AKA-2026-0001"]["verdict"] == "does not apply"
    own = audit(*where, "--engine", "vllm")
    assert own.exit_code == 1
    assert "https://github.com/ROCm/aiter/issues/4363" in own.output


def test_a_finding_names_the_backends_and_what_helps() -> None:
    where = ("--platform", "nvidia:sm103,cuda=13.0", "--library", "flashinfer-python==0.6.7")
    found = told(*where, "--engine", "vllm")["AKA-2026-0008"]
    assert found["hint"] == "pip install 'flashinfer-python>=0.6.7.post2'"
    ours = told(*where)["AKA-2026-0008"]
    assert ours["backends"] == ["nvidia/trtllm_mha"]
    assert ours["hint"] == "pip install 'flashinfer-python==0.6.13'"


def test_an_unknown_release_is_undecided() -> None:
    where = ("--platform", "nvidia:sm75,cuda=13.0", "--engine", "vllm")
    answer = audit(*where, "--library", "torch==2.13")
    assert answer.exit_code == 1
    assert "--library flashinfer-python==VERSION decides" in answer.output


def test_an_ignored_finding_does_not_count() -> None:
    where = ("--platform", "amd:gfx942", "--library", "amd-aiter==0.1.18", "--engine", "vllm")
    ignoring = {"ATTNMUX_IGNORE_ADVISORIES": "AKA-2026-0001,AKA-1"}
    answer = audit(*where, **ignoring)
    assert answer.exit_code == 0
    assert "no finding has the id 'AKA-1'" in answer.output
    assert told(*where, **ignoring)["AKA-2026-0001"]["verdict"] == "ignored"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--platform", "cpu:x86_64", "--library", "torch"), "DIST==VERSION"),
        (("--engine", "no-such-engine"), "pip install no-such-engine"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(args: tuple[str, ...], said: str) -> None:
    answer = audit(*args)
    assert (answer.exit_code, said in answer.output) == (2, True)
