"""`attnmux report`: what it writes, what it leaves out, what it says and how it exits."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnmux.core import Measurement, Plugins
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import Verified
from attnmux.core.verbs import Device
from attnmux.testing import find_candidate
from attnmux.testing.bench.keeping import RecordFile
from attnmux.testing.report.facts import system
from attnmux.testing.run.candidate import Outcome
from attnmux.testing.verification.anonymous import anonymous, anonymous_error
from attnmux.testing.verification.run import Verification
from attnmux.testing.verification.summary import kept_file, read_summary, summarised, verified_by

NAME = "cpu/torch_native"
PASSED = Outcome(case="one", status="passed", max_error=0.25)
IN_A_GRAPH = Outcome(case="one", execution="graph", status="passed", max_error=0.5)
REFUSED = Outcome(case="two", status="refused")


def verification(*outcomes: Outcome, **given: object) -> Verification:
    facts = {
        "candidate": find_candidate("torch_native", device="cpu"),
        "distribution": "attnmux-cpu",
        "outcomes": outcomes or (PASSED, IN_A_GRAPH, REFUSED),
        "limits": (),
        "seed": 7,
        "is_complete": True,
        "sampled": 1,
        "pairs": 10,
        "pairs_covered": 4,
    }
    return Verification(**{**facts, **given})


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A user with a name, a home folder, and a machine with a name."""
    folder = tmp_path / "ann bell"
    (folder / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("LOGNAME", "annbell")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(socket, "gethostname", lambda: "anns-desk.example.org")
    monkeypatch.chdir(folder / "work")
    return folder


@pytest.fixture
def no_run(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the report ran cases")

    monkeypatch.setattr("attnmux.testing.report.command.verify_quickly", fail)


def report(*arguments: str) -> Result:
    return CliRunner().invoke(verbs, ["report", *arguments], prog_name="attnmux")


def written(name: str = "attnmux-report.json") -> dict:
    return json.loads(Path(name).read_text())


def keep(made: Verification) -> None:
    summarised(made).write(kept_file(NAME))


def test_it_runs_a_sample_where_nothing_was_kept(home) -> None:
    result = report("torch_native", "--device", "cpu", "--budget", "1")
    assert result.exit_code == 0, result.output
    assert "wrote attnmux-report.json: this machine and 1 backend\n" in result.stdout
    assert re.search(r"cpu/torch_native: (\d+) of \1 cases agree", result.stdout)
    assert f"attnmux verify {NAME} --keep, then report again" in result.stdout
    assert "attach it to an issue" in result.stdout
    data = written()
    (backend,) = data["backends"]
    run = backend["verify"]
    assert sum(run["agreed"].values()) == run["sampled"] > 0
    assert run["complete"] is False
    assert backend["verified"] is None
    assert (run["failures"], run["failed"]) == (0, [])


def test_the_machine_and_the_versions(home, no_run) -> None:
    assert report("torch_native", "--no-verify").exit_code == 0
    data = written()
    assert set(data) == {
        *("format", "date", "platforms", "system", "packages", "libraries"),
        *("failures", "backends"),
    }
    assert datetime.fromisoformat(data["date"]).utcoffset() is not None
    assert data["platforms"][-1] == probe_cpu().to_dict()
    assert {"attnmux-core", "attnmux-cpu", "attnmux-testing"} <= set(data["packages"])
    assert {"torch", "triton"} <= set(data["libraries"])
    assert {"python", "kernel", "os", "torch_version"} <= set(data["system"])
    (backend,) = data["backends"]
    assert (backend["backend"], backend["distribution"]) == (NAME, "attnmux-cpu")
    assert (backend["proof"], backend["verify"]) == ("hardware", None)
    assert backend["verified_on"]


def test_without_torch_s_collection_the_rest_is_there(monkeypatch) -> None:
    def broken() -> None:
        raise OSError("no such program: /opt/secret/tool")

    monkeypatch.setattr("torch.utils.collect_env.get_env_info", broken)
    assert system()["torch"] == "OSError: no such program: …/tool"


def test_kept_results_are_reported(home, no_run) -> None:
    keep(verification())
    (offer,) = [each for each in Plugins.load().offers() if each.address == NAME]
    made = {
        "backend": NAME,
        "device": Device.of(probe_cpu()),
        "versions": offer.versions(),
        "median_us": 5.0,
        "date": datetime.now(timezone.utc),
        "phase": "decode",
        "shape": "dtype=bfloat16",
        "workload": "batch=1",
        "conformant": True,
    }
    other = replace(made["device"], name="another")
    file = home / "cache" / "attnmux" / "measurements.json"
    RecordFile(file, Measurement).add(
        [Measurement(**made), Measurement(**{**made, "device": other})]
    )
    result = report("torch_native")
    assert result.exit_code == 0, result.output
    (backend,) = written()["backends"]
    assert backend["verify"] == asdict(summarised(verification()))
    assert backend["verify"]["agreed"] == {"eager": 1, "graph": 1}
    (measured,) = backend["measurements"]
    assert (measured["median_us"], measured["device"]["name"]) == (5.0, probe_cpu().name)
    # Without names: what has results
    assert report("--out", "all.json").exit_code == 0
    assert [each["backend"] for each in written("all.json")["backends"]] == [NAME]


def test_a_whole_run_gives_the_entry_of_the_card(home, no_run) -> None:
    keep(verification())
    result = report("torch_native")
    data = written()["backends"][0]["verified"]
    assert data["platform"] == f"cpu:{probe_cpu().arch}"
    assert (data["on"], data["cases"]) == (probe_cpu().name, 2)
    entry = next(line for line in result.stdout.splitlines() if "Verified(" in line)
    assert eval(entry, {"Verified": Verified}).to_dict() == data


@pytest.mark.parametrize(
    "made",
    [
        {"is_complete": False},
        {"outcomes": (PASSED, replace(PASSED, status="failed"))},
        {"outcomes": (REFUSED,)},
        {"limits": (replace(PASSED, status="failed"),)},
    ],
)
def test_no_other_run_does(home, made) -> None:
    run = verification(**made)
    assert verified_by(summarised(run), run.candidate) is None


def test_a_run_of_other_versions_or_of_another_device_is_left_out(home, no_run) -> None:
    summary = summarised(verification())
    for changed in (
        {"versions": {**summary.versions, "attnmux-cpu": "0.0.1"}},
        {"device": {**summary.device, "name": "another"}},
    ):
        replace(summary, **changed).write(kept_file(NAME))
        result = report("torch_native", "--no-verify")
        assert "was on another device or with other versions" in result.stderr
        assert written()["backends"][0]["verify"] is None
        assert "no kept run, and none was made" in result.stdout


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"backend": 1}', "null"])
def test_a_damaged_summary_is_none(home, content) -> None:
    file = kept_file(NAME)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert read_summary(file) is None


def test_verify_keeps_what_the_report_reads(home, no_run) -> None:
    arguments = ["verify", "torch_native", "--device", "cpu", "--jobs", "0", "--keep"]
    arguments += ["--budget", "0", "-k", "decode-uneven-page16$"]
    assert CliRunner().invoke(verbs, arguments).exit_code == 0
    assert report("torch_native").exit_code == 0
    run = written()["backends"][0]["verify"]
    assert sum(run["agreed"].values()) > 0
    assert run["complete"] is False


def test_a_report_names_neither_the_user_nor_the_machine(home, monkeypatch) -> None:
    message = (
        f"OSError: in {home}: {home}/models/secret.bin, {home}/.cache/a.so and '~/b/c.py' of "
        "annbell on anns-desk (anns-desk.example.org): /opt/annbell/lib/d.so; "
        "pages 16/64 of cpu/native"
    )
    failed = replace(PASSED, status="failed", message=message)
    monkeypatch.setattr(
        "attnmux.testing.report.command.verify_quickly", lambda *_, **__: verification(failed)
    )
    result = report("torch_native")
    assert result.exit_code == 0, result.output
    assert "1 failed: the file has their messages, the seed is 7" in result.stdout
    text = Path("attnmux-report.json").read_text()
    said = written()["backends"][0]["verify"]["failed"][0]["message"]
    assert said == (
        "OSError: in …: …/secret.bin, …/a.so and '…/c.py' of … on … (…): …/d.so; "
        "pages 16/64 of cpu/native"
    )
    for private in ("ann", "bell", "desk", "example.org", str(home), "secret/", "/work"):
        assert private not in text, private


def test_this_user_and_this_machine_are_not_named(no_run, tmp_path) -> None:
    file = tmp_path / "r.json"
    assert report("torch_native", "--no-verify", "--out", str(file)).exit_code == 0
    text = file.read_text()
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text


def test_paths_are_cut_and_shares_are_not() -> None:
    assert anonymous("16/64, a/b, https://x.org/y, 1 / 2") == "16/64, a/b, https://x.org/y, 1 / 2"
    assert anonymous("in /a/b/c.py:12") == "in …/c.py:12"
    assert anonymous('File "/a/b.py", line 3') == 'File "…/b.py", line 3'


def test_an_unknown_backend_is_a_usage_error(home, no_run) -> None:
    result = report("torch_nativ")
    assert result.exit_code == 2
    assert "did you mean 'torch_native'?" in result.stderr
    assert not Path("attnmux-report.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see https://ann:pw@acme.org/y?token=abc or ann@acme.org", "see … or …"),
        ("10.0.0.7:8080 and db.acme.internal:5432, port 443", "… and …, port 443"),
        ("host='proxy.acme.com'; [fe80:1:2:3::1]; node7:29500", "host='…'; […]; …"),
        (
            "api_key=abc, Authorization: Bearer abc.def, HF_TOKEN: 'abc'",
            "api_key=…, Authorization: Bearer …, HF_TOKEN: '…'",
        ),
        ("a key, hf_abcdefghijklmnopqrstuvwx", "a key, …"),
        ("no /data/My Files/Big Plan/a b.so: gone", "no …/a b.so: gone"),
        ("'/data/My Files/a b.so' and `~/x y/z.py`", "'…/a b.so' and `…/z.py`"),
        ("src/mine/a.py, ../x/y z/w.so, plan/a.bin", "…/a.py, …/w.so, …/a.bin"),
        (r"C:\work\x.dll, 'C:\my work\y.dll'", "…/x.dll, '…/y.dll'"),
        ("a.py:1234: torch 2.14.1+cu130, libcuda.so.1, cpu/native, 5 tokens/s", None),
    ],
)
def test_errors_have_no_credentials_addresses_and_folders(text, said) -> None:
    assert anonymous_error(text) == (text if said is None else said)


@pytest.mark.parametrize("out", ["/dev/null", "pipe", "."])
def test_what_is_no_file_is_not_replaced(home, no_run, out) -> None:
    os.mkfifo("pipe")
    before = os.stat(out)
    result = report("torch_native", "--no-verify", "--out", out)
    assert result.exit_code == 2
    assert "'--out'" in result.stderr or "--out: expected a regular file" in result.stderr
    assert os.path.samestat(before, os.stat(out))


@pytest.mark.parametrize("out", ["no/such/folder/r.json", "/proc/r.json"])
def test_a_file_that_cannot_be_written_is_an_error_before_anything_runs(home, no_run, out) -> None:
    result = report("torch_native", "--out", out)
    assert result.exit_code == 2, result.output
    assert "--out" in result.stderr


def test_json(home, no_run) -> None:
    result = report("torch_native", "--no-verify", "--json")
    answer = json.loads(result.stdout)
    assert set(answer) == {"file", "report", "warnings"}
    assert answer["file"] == "attnmux-report.json"
    assert answer["report"] == written()


def test_a_backend_that_cannot_run_here_says_what_to_look_at(home) -> None:
    result = report("fa3", "--budget", "0.1")
    assert result.exit_code == 0
    assert "nvidia/fa3: no case ran" in result.stdout
    assert "a library is missing: attnmux doctor" in result.stdout
    reasons = written()["backends"][0]["reasons"]
    assert any("sglang-kernel" in reason for reason in reasons)
