"""A model runs on what `attnmux select` answers for it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from attnmux.configs import request_from_model
from attnmux.core import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
    Measurement,
    Platform,
    Plugins,
    Settings,
)
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.find.devices import Detection
from attnmux.core.verbs import Device, Question
from attnmux.testing.bench.keeping import RecordFile
from attnmux.transformers import recall
from attnmux.transformers.cli import run as cli_run
from attnmux.transformers.load.decision import decide, without

HERE = replace(probe_cpu(), features=frozenset({"avx2", "cxx_compiler"}))


class Reached(AttnmuxError):
    """Instead of loading the model: what it would have been loaded with."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory on a CPU where all three CPU backends fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared.Plugins, "detect", lambda plugins: Detection(platforms=(HERE,)))
    return tmp_path


@pytest.fixture
def generated(monkeypatch):
    """The choice of `attnmux generate`, as it makes it from config.json."""

    def load_runner(checkpoint, platform, offers, options, **_):
        raise Reached(platform, offers, options)

    monkeypatch.setattr(cli_run, "load_runner", load_runner)

    def choose(*args: str, failed=()):
        given = ["generate", "x", "--device", "cpu", *args]
        with pytest.raises(Reached) as caught:
            CliRunner().invoke(verbs, given, standalone_mode=False, catch_exceptions=False)
        platform, offers, options = caught.value.args
        reasons = {address: BackendFailed(address, "broken") for address in failed}
        options = without(reasons, options) if reasons else options
        return decide(request_from_model(recall.PATH), platform, offers, options)

    return choose


def selected(*args: str) -> dict:
    given = ["select", "--model", str(recall.PATH), "--json", *args]
    result = CliRunner().invoke(verbs, given)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def measure(file, *, batch_size: int = 1, **times: float) -> None:
    """Medians of the CPU backends for the shipped model."""
    offers = {offer.card.name: offer for offer in Plugins.load().offers()}
    request = request_from_model(recall.PATH)
    RecordFile(file, Measurement).add(
        [
            Measurement(
                backend=offers[name].address,
                phase=phase,
                shape=Measurement.shape_of(Question(request=request, platform=HERE, phase=phase)),
                workload=f"batch={batch_size}",
                batch_size=batch_size,
                device=Device.of(HERE),
                versions=offers[name].versions(),
                median_us=median_us,
                conformant=True,
                date=datetime(2026, 5, 1, tzinfo=timezone.utc),
            )
            for name, median_us in times.items()
            for phase in ("extend", "decode")
        ],
    )


def test_the_choice_is_the_same_where_nothing_is_configured(folder, generated) -> None:
    assert generated().hash == selected()["hash"]


def test_measurements_of_this_machine_count_for_both(folder, generated, monkeypatch) -> None:
    favourite = selected()["phases"]["decode"]["backend"]
    other = "flex_attention"
    file = folder / "measured.json"
    measure(file, **{favourite: 400.0, other: 100.0})
    (folder / "attnmux.toml").write_text(f'measurements = "{file}"\n')
    decision = generated()
    assert decision.phases["decode"].backend == other
    assert decision.hash == selected()["hash"]
    assert "(measured on this machine; the fastest of 2)" in decision.summary()
    assert generated(failed=[f"cpu/{other}"]).phases["decode"].backend == favourite
    monkeypatch.setenv("ATTNMUX_NO_MEASUREMENTS", "1")
    assert generated().hash == selected()["hash"]
    assert generated().phases["decode"].backend == favourite


def test_measurements_by_batch_size_count_for_both(folder, generated) -> None:
    usual = selected()["phases"]["decode"]["backend"]
    other = "flex_attention"
    file = folder / "measured.json"
    for batch_size, times in ((1, (100.0, 400.0)), (2, (100.0, 400.0)), (8, (100.0, 50.0))):
        measure(file, batch_size=batch_size, **dict(zip((usual, other), times, strict=True)))
    (folder / "attnmux.toml").write_text(f'measurements = "{file}"\n')
    decision = generated()
    assert decision.phases["decode"].backend == usual
    (only,) = decision.decode_sizes
    assert (only.least, only.most, only.choice.backend, only.gain) == (5, None, other, 0.5)
    assert decision.hash == selected()["hash"]
    assert generated(failed=[f"cpu/{other}"]).decode_sizes == ()


@pytest.mark.parametrize(
    "text",
    [
        'prefer_backends = ["flex_attention"]\n',
        'deny_backends = ["native", "torch_native"]\n',
        'decode_backend = "flex_attention"\n',
    ],
)
def test_the_policy_counts_for_both(folder, generated, text) -> None:
    (folder / "attnmux.toml").write_text(text)
    decision = generated()
    assert decision.phases["decode"].backend == "flex_attention"
    assert decision.hash == selected()["hash"]
    named = generated("--prefill-backend", "flex_attention")
    assert named.hash == selected("--prefill-backend", "flex_attention")["hash"]


def test_a_file_that_cannot_be_read_is_a_warning_of_both(folder, generated) -> None:
    (folder / "attnmux.toml").write_text('measurements = "damaged.json"\n')
    (folder / "damaged.json").write_text("{")
    (warning,) = selected()["warnings"]
    result = CliRunner().invoke(verbs, ["generate", "x", "--device", "cpu"])
    assert isinstance(result.exception, SystemExit)
    assert warning in result.stderr


@pytest.mark.parametrize("named", [None, "nvidia:sm86", "nvidia"])
def test_a_device_of_a_second_kind_names_its_platform(folder, monkeypatch, named) -> None:
    kinds = tuple(map(Platform.parse, ("nvidia:sm75", "nvidia:sm86")))
    facts = [
        SimpleNamespace(name="", gcnArchName="", major=major, minor=minor, total_memory=0)
        for major, minor in ((8, 6), (7, 5))
    ]
    cuda = SimpleNamespace(get_device_properties=lambda device: facts[device.index])
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    run = SimpleNamespace(detect=lambda _: Detection(platforms=(*kinds, HERE)))
    settings = Settings(platform=named)
    assert cli_run.platform_for(run, None, settings, "cuda:1").arch == "sm75"
    assert cli_run.platform_for(run, None, settings, "cuda:0").arch == "sm86"


@pytest.fixture
def orin(monkeypatch) -> None:
    """A GPU that torch can use, and no plugin finds."""
    facts = SimpleNamespace(name="Orin", gcnArchName="", major=8, minor=7, total_memory=0)
    module = SimpleNamespace(
        get_device_properties=lambda device: facts, is_initialized=lambda: True
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


def test_a_device_that_no_plugin_finds_can_be_named(folder, orin) -> None:
    run = SimpleNamespace(detect=lambda _: Detection(platforms=(HERE,)), warn=print)

    def platform(named: str | None, device: str | None = None) -> str:
        return str(cli_run.platform_for(run, None, Settings(platform=named), device))

    assert platform("nvidia:sm87,cuda=12.6") == "nvidia:sm87,cuda=12.6"
    assert platform(None, "cuda") == platform(None, "cuda:0") == "nvidia:sm87"
    assert platform(None) == platform("cpu") == str(HERE)
    with pytest.raises(InvalidInput, match="got 'nvidia:sm90'"):
        platform("nvidia:sm90")


def test_the_cpu_is_not_taken_in_silence(folder, orin, generated, monkeypatch) -> None:
    said = []
    monkeypatch.setattr(shared.Run, "warn", lambda self, text: said.append(text))
    with pytest.raises(Reached):
        CliRunner().invoke(verbs, ["generate", "x"], standalone_mode=False, catch_exceptions=False)
    assert [text for text in said if "say --device cuda" in text]
    said.clear()
    monkeypatch.setenv("ATTNMUX_PLATFORM", "cpu")
    with pytest.raises(Reached):
        CliRunner().invoke(verbs, ["generate", "x"], standalone_mode=False, catch_exceptions=False)
    assert not said
