"""`attnmux generate` tries a chosen backend that never passed before it serves."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import Offer, Plugins, Request, solve
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.verbs import Unverified
from attnmux.cpu.plugin import TORCH_LINEAR
from attnmux.testing import FirstUse, run_case
from attnmux.testing.cases.linear import LinearCase

PLUGIN = """
from attnmux.core.plugin import Clause, BackendCard, Prior, hookimpl, one_of

EVERY = Clause.when(
    vendor=one_of("cpu"), phase=one_of("extend", "decode"), kind=one_of("mha"),
    dtype=one_of("float32"), kv_dtype=one_of("float32"), page_size=one_of(16),
)

@hookimpl
def attnmux_cards():
    return [
        BackendCard(
            name="acme", summary="", clauses=(EVERY,), factory="acme_first_backend:make",
            priors=(Prior(rank=0, source="the test"),),
        )
    ]
"""
BACKENDS = {
    "right": "from attnmux.cpu.torch_native import TorchNativeBackend as make",
    "wrong": """
from attnmux.cpu.torch_native import TorchNativeBackend

class make(TorchNativeBackend):
    def forward_decode(self, call, batch):
        return super().forward_decode(call, batch) * 1.5
""",
    "exits": "import os\ndef make(context, options):\n    os._exit(0)\n",
}


@pytest.fixture
def acme(tmp_path, monkeypatch, fresh_plugins):
    """Installs a plugin whose backend is chosen; called with a name of BACKENDS."""
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(tmp_path), *sys.path[1:]])
    monkeypatch.setenv("ATTNMUX_ALLOW_PLUGINS", "acme-first,attnmux-cpu")
    monkeypatch.setattr("attnmux.core.Settings.cache_folder", lambda *_: tmp_path / "cache")

    def install(backend: str) -> None:
        info = tmp_path / "acme_first-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Name: acme-first\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{backend},,\n")
        (info / "entry_points.txt").write_text("[attnmux]\nacme = acme_first_plugin\n")
        (tmp_path / "acme_first_plugin.py").write_text(PLUGIN)
        (tmp_path / "acme_first_backend.py").write_text(BACKENDS[backend])
        sys.modules.pop("acme_first_backend", None)

    return install


def generate(*args: str):
    ask = ["generate", "k417, x90 ?k", "--max-new-tokens", "8", "--dtype", "float32"]
    return CliRunner().invoke(verbs, [*ask, *args])


def kept(folder: Path) -> list[str]:
    (file,) = (folder / "cache").glob("passed-*.json")
    return list(json.loads(file.read_text()).values())


def test_a_backend_that_passes_serves_and_is_not_tried_again(acme, tmp_path) -> None:
    acme("right")
    first = generate()
    assert first.exit_code == 0, first.output
    assert "417" in first.stdout
    assert "its card names no machine" in first.stderr
    assert "cases run on it first" in first.stderr
    assert "acme (acme)" in first.stderr
    assert kept(tmp_path) == ["acme/acme"]
    assert "cases run on it first" not in generate().stderr
    backend = tmp_path / "acme_first_backend.py"
    backend.write_text(f"{backend.read_text()}\n# edited, as RECORD does not tell\n")
    assert "cases run on it first" in generate().stderr


@pytest.mark.parametrize(
    ("backend", "said"),
    [("wrong", "decode-"), ("exits", "its process ended with exit status 0")],
)
@pytest.mark.turns(2)
def test_a_backend_that_fails_gives_way_to_the_next(acme, tmp_path, backend, said) -> None:
    acme(backend)
    result = generate()
    assert result.exit_code == 0, result.output
    assert "417" in result.stdout
    assert said in result.stderr
    assert result.stderr.count("acme/acme was chosen") == 1
    assert "--backend acme/acme takes it anyway" in result.stderr
    assert "native (cpu)" in result.stderr
    assert kept(tmp_path) == ["cpu/native"]


def test_without_another_backend_the_failure_is_the_error(acme, monkeypatch) -> None:
    acme("wrong")
    monkeypatch.setenv("ATTNMUX_ALLOW_BACKENDS", "acme")
    result = generate()
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
    assert "case decode-" in result.stderr


def test_a_backend_that_was_named_is_not_tried(acme) -> None:
    acme("right")
    result = generate("--backend", "acme")
    assert result.exit_code == 0
    assert "cases run on it first" not in result.stderr


def test_without_the_suite_a_warning_is_printed(acme, monkeypatch) -> None:
    acme("right")
    monkeypatch.setattr("attnmux.transformers.cli.run._from_testing", lambda _: None)
    result = generate()
    assert result.exit_code == 0
    assert result.stderr.count("acme/acme was chosen, but its card names no machine") == 1


def test_linear_layers_backends_are_tried_too(monkeypatch, tmp_path) -> None:
    """On cases of their kind, in the model's dims."""
    card = replace(TORCH_LINEAR, name="newcomer", verified_on=())
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_native"]
    offers.append(Offer(card=card, plugin="acme", distribution="acme-linear", version="1"))
    request = Request(dtype="float32", head_dim=16, linear_layers={"gdn": 1}, linear_head_dim=24)
    decision = solve(request, probe_cpu(), offers)
    (found,) = Unverified.by_cards(decision, offers, ())
    assert "acme/newcomer was chosen, but its card names no machine" in str(found)
    assert (found.request.kind, found.phases) == ("gdn", ("extend", "decode"))
    tried = []

    def run(candidate, trials, **_):
        for case, seed in trials:
            tried.append(case)
            yield run_case(candidate, case, seed=seed)

    monkeypatch.setattr("attnmux.testing.first_use.first_use.run_in_children", run)
    said: list[str] = []
    FirstUse(offers, device="cpu", cache=tmp_path, say=said.append)(decision)
    linear = [case for case in tried if isinstance(case, LinearCase)]
    assert {(case.kind, case.head_k_dim, case.dtype) for case in linear} == {("gdn", 24, "float32")}
    assert {phase for case in linear for phase in case.phases} >= {"extend", "decode"}
    assert any("acme/newcomer was chosen" in each for each in said)
