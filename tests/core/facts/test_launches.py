"""Launches that were tuned on this machine: which are used, and how they are kept."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest

from attnmux.core import InvalidInput, Platform, TunedLaunch
from attnmux.core.plugin import Trial
from attnmux.core.verbs import Device, Records, Run
from attnmux.testing.bench.keeping import RecordFile
from attnmux.testing.bench.trials import by_subject, winner

HERE = replace(Platform.parse("nvidia:sm90,cuda=13.0"), name="NVIDIA H200")
NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
VERSIONS = {"triton": "3.6.0", "attnmux-triton": "0.1.0"}


def launch(number: int = 0, **changes: object) -> TunedLaunch:
    given: dict[str, object] = {
        "backend": "triton/triton",
        "device": Device.of(HERE),
        "versions": VERSIONS,
        "subject": {"kind": "shares", "page": number},
        "values": {"block_n": 64, "kernel": "portable"},
        "median_us": 12.5,
        "date": NOW,
    }
    return TunedLaunch(**{**given, **changes})


def add(path: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        RecordFile(path, TunedLaunch).add([launch(number)])


def test_it_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "new" / "launches.json"
    RecordFile(path, TunedLaunch).add([launch(0), launch(1)])
    records = RecordFile(path, TunedLaunch).read()
    assert (records.found, records.problems) == ((launch(0), launch(1)), ())
    later = launch(0, median_us=3.0, date=NOW + timedelta(seconds=1))
    RecordFile(path, TunedLaunch).add([later])
    RecordFile(path, TunedLaunch).add([launch(0)])
    assert set(RecordFile(path, TunedLaunch).read().found) == {later, launch(1)}


def test_writers_at_once_lose_nothing(tmp_path) -> None:
    """Each opens the lock anew, so that threads exclude each other as processes do."""
    path, count = tmp_path / "launches.json", 12
    with ThreadPoolExecutor(max_workers=4) as writers:
        for _ in writers.map(partial(add, path, count=count), range(0, 4 * count, count)):
            pass
    found = RecordFile(path, TunedLaunch).read()
    assert found.problems == ()
    assert {each.subject["page"] for each in found.found} == set(range(4 * count))


@pytest.mark.parametrize("content", [b'{"format": 2, "launches": []}', b'{"format": 1}'])
def test_a_file_of_another_version_is_named_and_set_aside(tmp_path, content) -> None:
    path = tmp_path / "launches.json"
    path.write_bytes(content)
    records = RecordFile(path, TunedLaunch).read()
    assert records.found == ()
    assert str(path) in records.problems[0]
    RecordFile(path, TunedLaunch).add([launch()])
    assert RecordFile(path, TunedLaunch).read().found == (launch(),)
    assert (tmp_path / "launches.json.damaged").read_bytes() == content


def test_unreadable_content_is_reported_before_writing(tmp_path) -> None:
    path = tmp_path / "new" / "launches.json"
    assert RecordFile(path, TunedLaunch).prepare() == Records()
    RecordFile(path, TunedLaunch).add([launch()])
    assert RecordFile(path, TunedLaunch).prepare().found == (launch(),)
    path.write_text('{"format": 0}')
    (problem,) = RecordFile(path, TunedLaunch).prepare().problems
    assert "delete it" in problem
    assert path.read_text() == '{"format": 0}'
    path.write_text("{")
    with pytest.raises(FileExistsError, match="something else than launches"):
        RecordFile(path, TunedLaunch).prepare()
    assert path.read_text() == "{"


def test_a_file_that_cannot_be_written_is_left_alone(tmp_path) -> None:
    folder = tmp_path / "launches.json"
    folder.mkdir()
    (folder / "something").touch()
    for path in (folder, folder / "something" / "launches.json"):
        for write in (
            RecordFile(path, TunedLaunch).prepare,
            partial(RecordFile(path, TunedLaunch).add, [launch()]),
        ):
            with pytest.raises(OSError, match=r"launches\.json"):
                write()
        assert RecordFile(path, TunedLaunch).read().problems
    assert (folder / "something").exists()


def test_a_new_file_keeps_the_permissions(tmp_path) -> None:
    path, umask = tmp_path / "launches.json", os.umask(0o022)
    try:
        RecordFile(path, TunedLaunch).add([launch()])
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o660)
    RecordFile(path, TunedLaunch).add([launch(1)])
    assert path.stat().st_mode & 0o777 == 0o660
    assert [each.name for each in tmp_path.iterdir() if each.suffix != ".lock"] == [path.name]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("subject", {"page": None}),
        ("values", ["block_n"]),
        ("median_us", 0),
        ("date", "2026-05-01T12:00:00"),
        ("device", {"vendor": "nvidia"}),
        ("versions", {"triton": 3}),
        ("versions", {"": "3.6.0"}),
        ("color", "red"),
    ],
)
def test_one_bad_entry_costs_no_other(tmp_path, field, value) -> None:
    path = tmp_path / "launches.json"
    with pytest.raises(InvalidInput, match="launch"):
        TunedLaunch.from_dict({**launch().to_dict(), field: value})
    entries = [{**launch().to_dict(), field: value}, launch(1).to_dict(), 3]
    path.write_text(json.dumps({"format": 1, "launches": entries}))
    records = RecordFile(path, TunedLaunch).read()
    assert records.found == (launch(1),)
    assert f"{path}, launches[0]: " in records.problems[0]
    assert len(records.problems) == 2


def test_versions_are_those_that_are_installed() -> None:
    for versions, counts in (({}, True), ({"no-such-library": "1"}, False)):
        tuned = launch(versions=versions)
        assert bool(TunedLaunch.current([tuned], "triton/triton", HERE)) is counts


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"backend": "triton/other"}, False),
        ({"device": replace(Device.of(HERE), name="NVIDIA H100")}, False),
        ({"device": replace(Device.of(HERE), arch="sm80")}, False),
        ({"versions": {**VERSIONS, "triton": "3.7.0"}}, False),
        ({"versions": {**VERSIONS, "gone": "1"}}, False),
    ],
)
def test_only_those_of_this_device_and_these_versions_are_used(changes, counts) -> None:
    found = TunedLaunch.current([launch(**changes)], "triton/triton", HERE, libraries=VERSIONS.get)
    assert bool(found) is counts


@pytest.mark.parametrize("content", ["{", '{"format": 1, "launches": [3]}'])
def test_the_command_warns_of_a_file_that_cannot_be_read(tmp_path, monkeypatch, content) -> None:
    path, run = tmp_path / "launches.json", Run()
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(path))
    assert run.launches(run.settings()) == ()
    RecordFile(path, TunedLaunch).add([launch()])
    assert run.launches(run.settings()) == (launch(),)
    path.write_text(content)
    assert run.launches(run.settings()) == ()
    (warning,) = run.warnings
    assert str(path) in warning
    monkeypatch.setenv("ATTNMUX_NO_LAUNCHES", "1")
    assert (run.launches(run.settings()), len(run.warnings)) == ((), 1)


def test_the_command_warns_of_a_file_in_an_unknown_home(monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_LAUNCHES", "~nobody-of-that-name/launches.json")
    run = Run()
    assert run.launches(run.settings()) == ()
    assert "ATTNMUX_LAUNCHES" in run.warnings[0]


def test_without_a_file_there_are_none(tmp_path) -> None:
    records = RecordFile(tmp_path / "none.json", TunedLaunch).read()
    assert (records.found, records.problems) == ((), ())


def trial(value: int, median_us: float | None, *, is_current: bool = False) -> Trial:
    return Trial(
        subject={"kind": "tiles"},
        values={"warps": value},
        median_us=median_us,
        is_current=is_current,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("median_us", 0.0),
        ("median_us", float("nan")),
        ("median_us", "12"),
        ("values", {"warps": [8]}),
        ("values", ["warps"]),
        ("subject", {"kind": None}),
        ("subject", {3: "tiles"}),
    ],
)
def test_a_trial_holds_only_values_that_a_launch_can(field, value) -> None:
    given: dict[str, object] = {"subject": {"kind": "tiles"}, "values": {}, "median_us": None}
    assert Trial(**given).to_dict() == {**given, "error": "", "is_current": False}
    with pytest.raises(InvalidInput, match=f"trial, {field}"):
        Trial(**{**given, field: value})


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ([10.0, 9.0, 9.5], 1),
        ([10.0, 9.81, None], None),
        ([10.0, 9.8, None], None),
        ([10.0, 9.79, None], 1),
        ([10.0, 11.0, 12.0], None),
        ([None, 11.0, 9.0], 2),
        ([None, None, None], None),
    ],
)
def test_a_launch_that_is_2_percent_faster_replaces_the_current_one(times, wins) -> None:
    trials = [trial(n, time, is_current=n == 0) for n, time in enumerate(times)]
    assert winner(trials) is (None if wins is None else trials[wins])
    assert by_subject(trials) == {trials[0].subject: trials}
