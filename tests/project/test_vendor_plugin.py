"""A vendor's distribution joins on equal terms, and the pages about writing one are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/vendor-plugin"
PAGES = ("writing-a-plugin", "writing-an-adapter", "testing-a-plugin", "plugins-in-depth")
PAGE = "\n".join((ROOT / f"docs/{name}.md").read_text() for name in PAGES)
COMMANDS = re.findall(r"^    ((?:\w+=\S+ )?(?:attnmux|pip|pytest)\b.*)$", PAGE, re.MULTILINE)
QUOTED = re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", PAGE, re.DOTALL)
M2 = "acme:m2,device=cpu,runtime=acmert 3.1,features=fp8"
PROGRAMS = {
    "attnmux": ["-c", "from attnmux.core.cli import main; main()"],
    "pip": ["-m", "pip", "--disable-pip-version-check"],
    "pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider"],
}
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
"""So that pip asks no index: what is needed is installed."""


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A folder of installed packages that holds the example, as pip leaves it there."""
    pytest.importorskip("hatchling")
    # Without what earlier builds left, and where building may write
    source = tmp_path_factory.mktemp("source") / "vendor-plugin"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", ".*", "dist"))
    site = tmp_path_factory.mktemp("site")
    run("pip", "install", ".", *OFFLINE, "--target", str(site), cwd=source, check=True)
    return source, site


def run(
    program: str,
    *args: str,
    cwd: Path,
    site: Path | None = None,
    simulator: str = "",
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """A program of the page; `site` is where the example is installed."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("ATTNMUX_", "ACME_"))
    }
    # Small shapes gain nothing from threads, which only wait for one another where cores are few
    environment["OMP_NUM_THREADS"] = "1"
    if site is not None:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), before]))
    if simulator:
        environment["ACME_SIMULATOR"] = simulator
    return subprocess.run(
        [sys.executable, *PROGRAMS[program], *args],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=check,
        timeout=300,
    )


@pytest.fixture
def attnmux(installed, tmp_path):
    """`attnmux … --json` where the example is installed: (exit code, answer)."""

    def call(*args: str, simulator: str = "") -> tuple[int, dict]:
        done = run("attnmux", *args, "--json", cwd=tmp_path, site=installed[1], simulator=simulator)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    return call


def test_it_is_listed_with_its_distribution(attnmux) -> None:
    _, answer = attnmux("backends")
    (row,) = [row for row in answer["backends"] if row["name"] == "acme_paged"]
    assert (row["plugin"], row["distribution"], row["version"]) == ("acme", "acme-attnmux", "1.0.0")
    assert row["reasons"] == []
    assert not [failure for failure in answer["failures"] if failure["plugin"] == "acme"]


def test_its_device_is_there_only_where_it_was_switched_on(attnmux) -> None:
    def vendors(simulator: str) -> list[str]:
        _, answer = attnmux("platforms", simulator=simulator)
        return [platform["vendor"] for platform in answer["platforms"]]

    assert "acme" not in vendors("")
    assert vendors("m2").count("acme") == 1


def test_an_unknown_generation_fails_that_probe_alone(attnmux) -> None:
    _, answer = attnmux("platforms", simulator="m9")
    assert [platform["vendor"] for platform in answer["platforms"]][-1] == "cpu"
    assert any("acme-attnmux" in text and "m1 or m2" in text for text in answer["warnings"])


@pytest.mark.parametrize(("platform", "simulator"), [("acme", "m2"), ("acme", "m1"), (M2, "")])
def test_it_wins_every_phase_on_its_platform(attnmux, platform, simulator) -> None:
    request = "dtype=bfloat16,spec_topk=1,spec_draft_tokens=4"
    code, answer = attnmux(
        "select", "--platform", platform, "--request", request, simulator=simulator
    )
    assert code == 0
    assert set(answer["phases"]) >= {"extend", "decode", "verify", "draft"}
    for phase in answer["phases"].values():
        assert (phase["backend"], phase["plugin"]) == ("acme_paged", "acme")
    assert answer["page_size"] == 64


def test_it_changes_no_other_machine_s_choice(attnmux, tmp_path) -> None:
    request = ["select", "--platform", "cpu:x86_64"]
    _, with_it = attnmux(*request)
    done = run("attnmux", *request, "--json", cwd=tmp_path)
    without = json.loads(done.stdout)
    assert with_it["phases"] == without["phases"]
    assert with_it["page_size"] == without["page_size"]


@pytest.mark.parametrize(
    ("platform", "request_", "axis"),
    [
        (M2, "sinks=true", "sinks"),
        (M2, "head_dim=80", "head_dim"),
        (M2, "page_size=128", "page_size"),
        (M2, "spec_topk=4,spec_draft_tokens=8", "spec_topk"),
        (M2, "num_q_heads=32,num_kv_heads=1", "group_size"),
        ("acme:m1,device=cpu,runtime=acmert 3.1", "kv_dtype=fp8_e4m3", "kv_dtype"),
        ("acme:m3,device=cpu,runtime=acmert 3.1", "", "arch"),
        ("acme:m2,device=cpu,runtime=acmert 2.9", "", "runtime"),
    ],
)
def test_features_missing_from_the_card_are_refused(attnmux, platform, request_, axis) -> None:
    code, answer = attnmux(
        "select", "--platform", platform, "--request", request_, "--backend", "acme_paged"
    )
    assert code == 3
    own = [row for row in answer["candidates"] if row["backend"] == "acme_paged"]
    assert own
    assert all(axis in [reason["axis"] for reason in row["reasons"]] for row in own)


def test_it_imports_core_and_its_suite_alone() -> None:
    """What is done for the members of this repository can be done from outside."""
    modules = {
        module
        for path in EXAMPLE.rglob("*.py")
        for module in re.findall(
            r"^(?:from|import) (attnmux[\w.]*)", path.read_text(), re.MULTILINE
        )
    }
    assert modules
    assert all(module.startswith(("attnmux.core", "attnmux.testing")) for module in modules), (
        modules
    )


def test_the_plugin_module_imports_no_torch(installed, tmp_path) -> None:
    code = "import sys, acme_attnmux.plugin; sys.exit('torch' in sys.modules)"
    site = {**os.environ, "PYTHONPATH": str(installed[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=site, check=False)
    assert done.returncode == 0


def test_the_wheel_holds_the_package_alone(installed, tmp_path) -> None:
    source, _ = installed
    run("pip", "wheel", ".", *OFFLINE, "-w", str(tmp_path), cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in files} == {
        "acme_attnmux",
        "acme_attnmux-1.0.0.dist-info",
    }
    assert "acme_attnmux/py.typed" in files


def test_the_pages_show_the_example_s_own_code() -> None:
    assert len(QUOTED) >= 6
    for name, block in QUOTED:
        # The pages' code is formatted without the class's indentation
        code, text = ("".join(each.split()) for each in (block, (EXAMPLE / name).read_text()))
        assert code in text, f"{name}:\n{block}"


def test_the_diff_of_the_pages_adds_a_backend(tmp_path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    source = shutil.copytree(EXAMPLE, tmp_path / "plugin", ignore=shutil.ignore_patterns(".*"))
    subprocess.run(["git", "apply", "-"], input=diff, cwd=source, text=True, check=True)
    code = """
from acme_attnmux.plugin import attnmux_cards
from attnmux.core import Platform
from attnmux.testing import Candidate, run_case

m2 = Platform.parse("acme:m2,device=cpu,runtime=acmert 3.1")
candidate = Candidate(card=attnmux_cards()[-1], platform=m2)
some = candidate.cases(page_sizes=[16])[::4]
cases = [case for case in some if not candidate.refusals(case.request)]
outcomes = {case.name: run_case(candidate, case) for case in cases}
assert len(outcomes) > 10
assert all(outcome.status == "passed" for outcome in outcomes.values()), outcomes
"""
    site = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=site, check=True)


def test_the_pages_have_their_commands() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    assert len(COMMANDS) == len(re.findall(r"^    \S", prose, re.MULTILINE))
    assert len(COMMANDS) >= 10


# Not the suite twice: `.ci/run` verifies what the example's wheel brings.
@pytest.mark.parametrize("command", [each for each in COMMANDS if "attnmux verify" not in each])
@pytest.mark.turns(2)
def test_a_command_of_the_pages_does_what_it_says(installed, tmp_path, command) -> None:
    source, site = installed
    said = re.search(r"# exits with (\d+)", command)
    words = shlex.split(command, comments=True)
    simulator = words.pop(0).partition("=")[2] if words[0].startswith("ACME_SIMULATOR=") else ""
    program, *args = words
    if program == "pip":
        args += [*OFFLINE, "--target", str(tmp_path / "site")]
    if program == "pytest":
        args += ["-k", "uneven-page16 or prefix-page16 or not agrees"]  # a part of the suite
    folder = ROOT if program == "pip" else source
    done = run(program, *args, cwd=folder, site=site, simulator=simulator)
    assert done.returncode == int(said[1] if said else 0), done.stdout + done.stderr
    if program == "attnmux" and "select" in args and said is None:
        assert "acme_paged" in done.stdout.splitlines()[0]
    if program == "attnmux" and "generate" in args:
        assert done.stdout.strip() == "3051"
        assert any(line.startswith("acme_paged ") for line in done.stderr.splitlines())
