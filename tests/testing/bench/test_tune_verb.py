"""`attnmux tune`: the backends it tunes, the launches it keeps, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from attnmux.core import TunedLaunch
from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import Job, Trial
from attnmux.testing.bench.keeping import RecordFile

FIELDS = "dtype=bf16,num_q_heads=8,num_kv_heads=8,head_dim=64"
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


@pytest.fixture
def installed(install, make_offer, monkeypatch):
    jobs.clear()

    def put(*tuners: str | None) -> None:
        offers = [make_offer(name=f"fake{number}") for number in range(len(tuners))]
        install(
            *(
                replace(offer, card=replace(offer.card, tuner=tuner))
                for offer, tuner in zip(offers, tuners, strict=True)
            )
        )

    put(f"{__name__}:tuner", None)
    monkeypatch.setattr("pkgutil.resolve_name", lambda name: globals()[name.partition(":")[2]])
    return put


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(tmp_path / "launches.json"))
    return tmp_path / "launches.json"


def tune(*args: str) -> Result:
    asked = () if "--request" in args else ("--request", FIELDS)
    return CliRunner().invoke(verbs, ["tune", *asked, *args], prog_name="attnmux")


def test_the_fastest_is_kept_for_this_device_and_these_versions(installed, file, here) -> None:
    result = tune("--json", "fake0")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    (tried,) = answer["backends"]
    assert (tried["backend"], len(tried["trials"])) == ("fakes/fake0", 6)
    assert answer["file"] == str(file)
    versions = {"attnmux-fake": "1.0"}
    known = RecordFile(file, TunedLaunch).read().found
    (kept,) = TunedLaunch.current(known, "fakes/fake0", here, libraries=versions.get)
    assert kept.to_dict() == answer["launches"][0]
    assert (kept.values, kept.median_us) == ({"warps": 8}, 8.0)
    assert kept.subject["kind"] == "shares"
    (job,) = jobs
    # What the solver decided, and not only what was asked.
    assert job.request.page_size is not None
    assert job.request.kv_dtype == "bfloat16"
    assert (job.platform, job.device) == (here, "cpu")


def test_every_backend_with_a_tuner_is_tuned(installed, file) -> None:
    installed(f"{__name__}:tuner", None, f"{__name__}:tuner")
    answer = json.loads(tune("--json", "--device", "cpu:1").stdout)
    names = [each["backend"] for each in answer["backends"]]
    assert names == ["fakes/fake0", "fakes/fake2"]
    assert {job.device for job in jobs} == {"cpu:1"}


def test_a_dry_run_keeps_nothing(installed, file) -> None:
    answer = json.loads(tune("--json", "--dry-run").stdout)
    assert (len(answer["launches"]), answer["file"]) == (1, None)
    assert not file.exists()


def test_tables_have_trials_and_winners(installed, file) -> None:
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
    assert "one with a tuner: fakes/fake0" in result.stderr
    assert tune("fake7").exit_code == 2
    installed(None)
    result = tune()
    assert result.exit_code == 3
    assert "no installed backend has a tuner" in result.stderr


def test_exit_code_where_no_backend_fits(installed, file) -> None:
    for args in (("fake0",), ()):
        result = tune(*args, "--request", "graph=true")
        assert result.exit_code == 3, result.output
        assert "fake0" in result.stderr
    assert jobs == []
    assert not file.exists()


def test_a_backend_that_serves_no_phase_is_refused(installed, file) -> None:
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
def test_a_tuner_that_fails_says_so(installed, file, tuner, code, said, here) -> None:
    installed(f"{__name__}:{tuner}")
    result = tune("fake0")
    assert result.exit_code == code
    assert said in result.stderr
    if code == 1:
        assert f"fakes/fake0 cannot run here: {__name__}:{tuner}: " in result.stderr
    assert not file.exists()


def test_one_failing_tuner_of_several_is_a_warning(installed, file) -> None:
    installed(f"{__name__}:broken", f"{__name__}:tuner", f"{__name__}:broken")
    result = tune("--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [each["backend"] for each in answer["backends"]] == ["fakes/fake1"]
    assert [warning.partition(" ")[0] for warning in answer["warnings"]] == [
        "fakes/fake0",
        "fakes/fake2",
    ]
    installed(f"{__name__}:broken", f"{__name__}:broken")
    assert tune().exit_code == 1


def test_each_tuner_s_launches_are_kept_before_the_next(installed, file) -> None:
    installed(f"{__name__}:tuner", f"{__name__}:interrupted")
    result = tune()
    assert result.exit_code == 130
    assert "warps=8" in result.stdout
    assert len(RecordFile(file, TunedLaunch).read().found) == 1


def test_a_failing_current_launch_gives_its_error(installed, file) -> None:
    installed(f"{__name__}:failing_today")
    assert "warps=4 today's: hangs" in " ".join(tune().stdout.split())


def test_an_unwritable_file_is_refused_before_trying(installed, file) -> None:
    file.mkdir()
    result = tune()
    assert result.exit_code == 2
    assert f"{file} cannot be written: Is a directory" in result.stderr
    assert "ATTNMUX_LAUNCHES" in result.stderr
    assert jobs == []
    assert tune("--dry-run").exit_code == 0


def test_an_unreadable_file_is_a_warning_and_set_aside(installed, file) -> None:
    file.write_text('{"format": 2}')
    answer = json.loads(tune("--json").stdout)
    assert f"{file} holds no launches that can be read" in answer["warnings"][0]
    assert len(RecordFile(file, TunedLaunch).read().found) == 1
    assert file.with_name(f"{file.name}.damaged").read_text() == '{"format": 2}'


def test_tuning_is_refused_where_launches_are_off(installed, file, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_NO_LAUNCHES", "1")
    result = tune("fake0")
    assert result.exit_code == 2
    assert "ATTNMUX_NO_LAUNCHES" in result.stderr
    assert tune("--dry-run", "fake0").exit_code == 0


def test_without_a_home_directory_a_file_must_be_named(installed, monkeypatch) -> None:
    def homeless(*_: object, **__: object) -> None:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("platformdirs.user_cache_path", homeless)
    result = tune("fake0")
    assert result.exit_code == 2
    assert "ATTNMUX_LAUNCHES" in result.stderr
    assert jobs == []
    assert tune("--dry-run", "fake0").exit_code == 0
