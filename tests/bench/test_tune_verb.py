"""`attnmux tune`: who is tuned, what is kept, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from attnmux.core.choosing.find.devices import Detection
from attnmux.core.choosing.find.plugins import PluginFailure
from attnmux.core.choosing.measured.launches import Job, Trial, current_launches, launch_file
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.cli import run as shared
from attnmux.core.cli.verbs import verbs
from attnmux.testing import fake_card, fake_platform

FIELDS = "dtype=bf16,num_q_heads=8,num_kv_heads=8,head_dim=64"
HERE = replace(fake_platform(), name="a machine")
jobs: list[Job] = []


def tuner(job: Job) -> Iterator[Trial]:
    jobs.append(job)
    print("what a library has to say")
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


def exiting(job: Job) -> Iterator[Trial]:
    raise SystemExit("no licence")


def interrupted(job: Job) -> Iterator[Trial]:
    raise KeyboardInterrupt


def slipping(job: Job) -> Iterator[Trial]:
    yield Trial(subject={"kind": "tiles"}, values={"warps": None}, median_us=1.0)


def telling_none(job: Job) -> Iterator[object]:
    yield {"warps": 4}


def failing_today(job: Job) -> Iterator[Trial]:
    yield Trial(subject={}, values={"warps": 4}, median_us=None, error="hangs", is_current=True)


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
    known = launch_file(file).read().found
    (kept,) = current_launches(known, "of-this-test/fake0", HERE, libraries=versions.get)
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
    assert "shares page=1" in said
    assert "1 launch is faster than today's" in said
    assert str(file) in "".join(result.stdout.split())


def test_a_backend_without_a_tuner(installed, file) -> None:
    result = tune("fake1")
    assert result.exit_code == 2
    assert "one with a tuner: of-this-test/fake0" in result.stderr
    assert tune("fake7").exit_code == 2
    installed(None)
    result = tune()
    assert result.exit_code == 3
    assert "no installed backend has a tuner" in result.stderr


def test_where_nothing_fits(installed, file) -> None:
    for args in (("fake0",), ()):
        result = tune(*args, "--request", "graph=true")
        assert result.exit_code == 3, result.output
        assert "fake0" in result.stderr
    assert jobs == []
    assert not file.exists()


def test_a_phase_that_others_serve(installed, file) -> None:
    installed(None, f"{__name__}:tuner")
    result = tune("fake1", "--request", "phases=encoder")
    assert result.exit_code == 3, result.output
    assert "others serve encoder" in result.stderr
    assert jobs == []


def test_names_that_are_configured_change_nothing(installed, file, monkeypatch) -> None:
    for name in ("DECODE", "PREFILL", "MM"):
        monkeypatch.setenv(f"ATTNMUX_{name}_BACKEND", "fake1")
    result = tune(
        "fake0", "--request", f"{FIELDS},phases=extend+decode+encoder,encoder_head_dim=64"
    )
    assert result.exit_code == 0, result.stderr
    assert len(jobs) == 1


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cpu:", "cpu:x", "gpu"])
def test_a_device_of_another_kind(installed, file, device) -> None:
    result = tune("--device", device)
    assert result.exit_code == 2
    assert "--device: expected a device of a machine: cpu, cpu:1" in result.stderr
    assert jobs == []


@pytest.mark.parametrize(
    ("tuner", "code", "said"),
    [
        ("broken", 1, "RuntimeError: no driver"),
        ("exiting", 1, "SystemExit: no licence"),
        ("missing", 1, "KeyError"),
        ("telling_none", 1, "{'warps': 4}, which is no Trial"),
        ("slipping", 2, "trial, values: expected numbers and words by name"),
    ],
)
def test_a_tuner_that_fails_says_so(installed, file, tuner, code, said) -> None:
    installed(f"{__name__}:{tuner}")
    result = tune("fake0")
    assert result.exit_code == code
    assert said in result.stderr
    if code == 1:
        assert f"of-this-test/fake0 cannot run here: {__name__}:{tuner}: " in result.stderr
    assert not file.exists()


def test_of_several_who_fails_is_warned_of(installed, file) -> None:
    installed(f"{__name__}:broken", f"{__name__}:tuner", f"{__name__}:broken")
    result = tune("--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [each["backend"] for each in answer["backends"]] == ["of-this-test/fake1"]
    assert [warning.partition(" ")[0] for warning in answer["warnings"]] == [
        "of-this-test/fake0",
        "of-this-test/fake2",
    ]
    installed(f"{__name__}:broken", f"{__name__}:broken")
    assert tune().exit_code == 1


def test_what_one_found_is_kept_before_the_next_tries(installed, file) -> None:
    installed(f"{__name__}:tuner", f"{__name__}:interrupted")
    result = tune()
    assert result.exit_code == 130
    assert "warps=8" in result.stdout
    assert len(launch_file(file).read().found) == 1


def test_today_s_launch_that_fails_says_why(installed, file) -> None:
    installed(f"{__name__}:failing_today")
    assert "warps=4 today's: hangs" in " ".join(tune().stdout.split())


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_tried(
    installed, file
) -> None:
    file.mkdir()
    result = tune()
    assert result.exit_code == 2
    assert f"{file} cannot be written: IsADirectoryError" in result.stderr
    assert "ATTNMUX_LAUNCHES" in result.stderr
    assert jobs == []
    assert tune("--dry-run").exit_code == 0


def test_a_file_that_cannot_be_read_is_warned_of_and_set_aside(installed, file) -> None:
    file.write_text('{"format": 2}')
    answer = json.loads(tune("--json").stdout)
    assert f"{file} holds no launches that can be read" in answer["warnings"][0]
    assert len(launch_file(file).read().found) == 1
    assert file.with_name(f"{file.name}.damaged").read_text() == '{"format": 2}'


def test_what_would_not_be_used_is_not_kept(installed, file, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_NO_LAUNCHES", "1")
    result = tune("fake0")
    assert result.exit_code == 2
    assert "ATTNMUX_NO_LAUNCHES" in result.stderr
    assert tune("--dry-run", "fake0").exit_code == 0


def test_without_a_home_directory_a_file_has_to_be_named(installed, monkeypatch) -> None:
    def homeless(*_: object, **__: object) -> None:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_cache_path", homeless)
    result = tune("fake0")
    assert result.exit_code == 2
    assert "ATTNMUX_LAUNCHES" in result.stderr
    assert jobs == []
    assert tune("--dry-run", "fake0").exit_code == 0
