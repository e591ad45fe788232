"""Work that `generate` begins while torch is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnmux.core import Plugins, Settings
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.verbs import Run
from attnmux.cpu import compiled
from attnmux.transformers import recall
from attnmux.transformers.cli.early import BACKENDS, FIELDS, begin_early

HERE = probe_cpu()
UNSAID = dict.fromkeys((*FIELDS, *BACKENDS, "device"))


@pytest.mark.parametrize(
    ("model", "said", "begins"),
    [
        (None, {}, True),
        (str(recall.PATH), {"dtype": "float32", "device": "cpu"}, True),
        (None, {"backend": "torch_native"}, False),
        (None, {"device": "cuda:1"}, False),
        ("of-the-hub/model", {}, False),
    ],
)
def test_the_backend_that_config_and_options_decide_begins(
    monkeypatch: pytest.MonkeyPatch, model: str | None, said: dict[str, Any], begins: bool
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(compiled, "begin", calls.append)
    offers = [offer for offer in Plugins.load().offers() if offer.plugin == "cpu"]
    platform = replace(HERE, features=HERE.features | {"cxx_compiler"})
    woken: list[str] = []
    options = {**UNSAID, "model": model, **said}
    begin_early(Settings(), options, woken.append, offers, platform)
    assert calls == [platform] * begins
    assert woken == [said.get("device", "cpu")]


def test_it_is_called_once_with_the_platform_of_the_settings() -> None:
    run, settings, calls = Run(), Settings(platform="cpu"), []
    with run.importing(settings, lambda *found: calls.append(found)):
        platform = run.detect(run.plugins(settings)).pick("cpu")
    for _ in range(1000):
        if calls:
            break
        threading.Event().wait(0.01)
    ((offers, found),) = calls
    assert found == platform
    assert {offer.plugin for offer in offers} >= {"cpu"}


def test_nothing_of_it_imports_torch() -> None:
    text = "import sys, attnmux.cpu.compiled, attnmux.transformers.cli.early as early\n"
    text += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, cwd=Path(__file__).parent)
