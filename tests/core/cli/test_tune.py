"""`attnmux tune`: who is tuned, what is kept, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.failures import PluginFailure
from attnmux.core.choosing.launches import current_launches
from attnmux.core.choosing.probe import Detection
from attnmux.core.choosing.trials import Job, Trial
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.core.testing import fake_card, fake_platform

FIELDS = "dtype=bf16,num_q_heads=8,num_kv_heads=8,head_dim=64"
HERE = replace(fake_platform(), name="a machine")
jobs: list[Job] = []


def tuner(job: Job) -> Iterator[Trial]:
    jobs.append(job)
    for kind, times in (("shares", (10.0, 8.0, None)), ("tiles", (10.0, 9.9, 20.0))):
        for warps, time in zip((4, 8, 16), times, strict=True):
            yield Trial(
                subject={"kind": kind, "page": job.request.page_size or 0},
                values={"warps": warps},
                median_us=time,
                error="" if time else "out of resource: shared memory",
                is_current=warps == 4,
            )


def broken(job: Job) -> Iterator[Trial]:
    raise RuntimeError("no driver\nand much more")


class Installed:
    """Plugins with cards of this test's."""

    failures: tuple[PluginFailure, ...] = ()
    loaded = ("of-this-test",)

    def __init__(self, *tuners: str | None) -> None:
        self._offers = tuple(
            Offer(
                card=replace(fake_card(), name=f"fake{number}", tuner=tuner),
                plugin="of-this-test",
                distribution="attnmux-fake",
                version="1.0",
            )
            for number, tuner in enumerate(tuners)
        )

    def offers(self) -> tuple[Offer, ...]:
        return self._offers


@pytest.fixture
def installed(monkeypatch):
    jobs.clear()
    monkeypatch.setattr(shared, "detect", lambda plugins: Detection(platforms=(HERE,)))

    def put(*tuners: str | None) -> None:
        plugins = Installed(*tuners)
        monkeypatch.setattr(shared, "load_plugins", lambda *_: plugins)

    put(f"{__name__}:tuner", None)
    monkeypatch.setattr("pkgutil.resolve_name", lambda name: globals()[name.partition(":")[2]])
    return put


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(tmp_path / "launches.json"))
    return tmp_path / "launches.json"


def tune(*args: str) -> Result:
    return CliRunner().invoke(verbs, ["tune", "--request", FIELDS, *args], prog_name="attnmux")


def test_the_fastest_is_kept_for_this_device_and_these_versions(installed, file) -> None:
    result = tune("--json", "fake0")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    (tried,) = answer["backends"]
    assert (tried["backend"], len(tried["trials"])) == ("of-this-test/fake0", 6)
    assert answer["file"] == str(file)
    versions = {"attnmux-fake": "1.0"}
    (kept,) = current_launches(file, "of-this-test/fake0", HERE, libraries=versions.get).found
    assert kept.to_dict() == answer["launches"][0]
    assert (kept.values, kept.median_us) == ({"warps": 8}, 8.0)
    assert kept.subject["kind"] == "shares"
    (job,) = jobs
    # What the solver decided, and not only what was asked.
    assert job.request.page_size is not None
    assert job.request.kv_dtype == "bfloat16"
    assert (job.platform, job.device) == (HERE, "cpu")


def test_all_that_can_be_tuned_are(installed, file) -> None:
    installed(f"{__name__}:tuner", None, f"{__name__}:tuner")
    answer = json.loads(tune("--json", "--device", "cpu:1").stdout)
    names = [each["backend"] for each in answer["backends"]]
    assert names == ["of-this-test/fake0", "of-this-test/fake2"]
    assert {job.device for job in jobs} == {"cpu:1"}


def test_a_dry_run_keeps_nothing(installed, file) -> None:
    answer = json.loads(tune("--json", "--dry-run").stdout)
    assert (len(answer["launches"]), answer["file"]) == (1, None)
    assert not file.exists()


def test_people_see_what_was_tried_and_what_won(installed, file) -> None:
    result = tune()
    said = " ".join(result.stdout.split())
    assert "warps=8 8.0 0.800 won" in said
    assert "warps=4 10.0 1.000 today's" in said
    assert "warps=16 out of resource: shared memory" in said
    assert "1 launches are faster than today's" in said
    assert str(file) in "".join(result.stdout.split())


def test_a_backend_without_a_tuner(installed, file) -> None:
    result = tune("fake1")
    assert result.exit_code == 2
    assert "one with a tuner: of-this-test/fake0" in result.stderr
    assert tune("fake7").exit_code == 2


def test_where_nothing_fits(installed, file) -> None:
    for args in (("fake0",), ()):
        result = tune(*args, "--request", "kind=nsa")
        assert result.exit_code == 3, result.output
        assert "fake0" in result.stderr
    assert jobs == []
    assert not file.exists()


def test_a_tuner_that_fails_says_so(installed, file) -> None:
    installed(f"{__name__}:broken")
    result = tune("fake0")
    assert result.exit_code == 1
    assert "of-this-test/fake0 cannot run here" in result.stderr
    assert "RuntimeError: no driver" in result.stderr
    assert not file.exists()


def test_what_would_not_be_used_is_not_kept(installed, file, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_NO_LAUNCHES", "1")
    result = tune("fake0")
    assert result.exit_code == 2
    assert "ATTNMUX_NO_LAUNCHES" in result.stderr
    assert tune("--dry-run", "fake0").exit_code == 0
