"""`attnmux warm`: what it leaves on disk, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnmux.core import BackendFailed, Decision, InvalidInput
from attnmux.core.verbs import Run
from attnmux.transformers import recall
from attnmux.transformers.cli import run_warm
from attnmux.transformers.cli.warm import SHARED, warm
from attnmux.transformers.load import ahead


def run(*arguments: str) -> Result:
    return CliRunner().invoke(
        warm, [*arguments, "--device", "cpu"], obj=Run(), catch_exceptions=False
    )


def test_it_takes_the_options_of_generate_that_decide() -> None:
    names = {option.name for option in warm.params}
    assert names == {*SHARED, "as_json", "debug", "no_plugins"}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("drafts", [(), ("--draft", "ngram", "--topk", "2")])
def test_the_decided_backend_takes_each_phase_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool, drafts: tuple[str, ...]
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(recall.PATH / name, tmp_path)
    modes: list[str] = []
    real = ahead.rehearse

    def rehearse(backend) -> None:
        prepare = backend.init_forward_metadata
        backend.init_forward_metadata = lambda batch: (
            modes.append(batch.forward_mode.name),
            prepare(batch),
        )
        real(backend)

    monkeypatch.setattr(ahead, "rehearse", rehearse)
    result = run(
        "--model", str(tmp_path), "--backend", "torch_native", *drafts, *["--json"][:as_json]
    )
    assert {"EXTEND", "DECODE"} <= set(modes)
    assert ("TARGET_VERIFY" in modes) == bool(drafts)
    if as_json:
        answer = json.loads(result.stdout)
        assert answer["decision"]["phases"]["decode"]["backend"] == "torch_native"
        assert answer["seconds"] > 0
    else:
        phases = "extend, decode and verify" if drafts else "extend and decode"
        assert result.stdout.startswith(f"torch_native (cpu) serves {phases}")


def test_a_backend_that_fails_its_first_cases_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check(decision: Decision) -> None:
        checked.append(decision.phases["decode"].backend)
        if len(checked) == 1:
            raise BackendFailed(decision.phases["decode"].address, "a wrong answer")

    monkeypatch.setattr(run_warm, "first_use", lambda *_, **__: check)
    monkeypatch.setattr(Decision, "begin_ahead", lambda *_: None)
    result = run()
    assert len(checked) == 2
    assert f"instead {checked[1]}" in result.stderr
    assert result.stdout.startswith(checked[1])


def test_a_model_whose_layers_are_not_known_without_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_warm, "stated_request", lambda *_, **__: None)
    with pytest.raises(InvalidInput, match="generate's first run compiles all"):
        run()
