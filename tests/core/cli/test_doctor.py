"""`attnmux doctor` with plugins that work, raise, exit, crash and hang, each a distribution."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import Platform, Settings
from attnmux.core.choosing.requirements import required
from attnmux.core.cli import doctor_diagnosis
from attnmux.core.cli.doctor_diagnosis import diagnose
from attnmux.core.cli.verbs import verbs
from attnmux.core.find import devices as probe
from attnmux.core.find import unserved
from attnmux.core.find.devices import survey
from attnmux.core.find.plugin import Plugin, PluginFailure
from attnmux.core.find.plugins import unknown_plugins
from attnmux.core.plugin import BackendCard, Clause, Figures, includes, one_of

GOOD = """
from attnmux.core.plugin import BackendCard
from attnmux.core import Platform
from attnmux.core.plugin import hookimpl

print("a banner")

@hookimpl
def attnmux_platforms():
    return [Platform.parse("acme:v1,device=cpu,count=2")]

@hookimpl
def attnmux_cards():
    return [BackendCard(name="fast", summary="", clauses=(), factory="a:b", {more})]
"""
HOOK = "from attnmux.core.find.hooks import hookimpl\n@hookimpl\n"
GONE = "no_such_distribution_of_acme"


def install(folder: Path, plugin: str, source: str, distribution: str = "") -> None:
    distribution = distribution or f"dist-{plugin}"
    stem = distribution.replace("-", "_")
    (folder / f"{stem}_module.py").write_text(source)
    info = folder / f"{stem}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(f"[attnmux]\n{plugin} = {stem}_module\n")


@pytest.fixture
def ask(tmp_path, monkeypatch, fresh_plugins):
    """Ask for a diagnosis of a machine without devices that has these plugins and no others."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor_diagnosis, "survey", partial(survey, root=tmp_path / "root"))
    allowed = []

    def call(*args: str, **plugins: str):
        for plugin, source in plugins.items():
            install(tmp_path, plugin, source)
        allowed.extend(f"dist-{plugin}" for plugin in plugins)
        monkeypatch.setenv("ATTNMUX_ALLOW_PLUGINS", ",".join(allowed))
        return CliRunner().invoke(verbs, ["doctor", "--timeout", "60", *args], prog_name="attnmux")

    call.allowed = allowed
    return call


def rows(result) -> dict[str, dict]:
    return {row["distribution"]: row for row in json.loads(result.stdout)["plugins"]}


def own(folder: Path, distribution: str, package: str, digest: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    files = f"{package}/__init__.py,sha256={digest},9\n{package}/more/__init__.py,sha256=other,9\n"
    (info / "RECORD").write_text(files)


def test_two_distributions_of_one_package(ask, tmp_path) -> None:
    own(tmp_path, "acme-kernels", "acme_kernels", "first")
    own(tmp_path, "acme-kernel", "acme_kernels", "second")
    own(tmp_path, "acme-other", "shared", "same")
    own(tmp_path, "acme-more", "shared", "same")
    own(tmp_path, "of-nobody", "elsewhere", "first")
    own(tmp_path, "of-none", "elsewhere", "second")
    source = GOOD.format(more='requires=("acme-kernels>=1", "acme-other")')
    result = ask("--json", good=source)
    assert result.exit_code == 1, result.output
    (problem,) = json.loads(result.stdout)["problems"]
    assert "acme-kernel 1.2 and acme-kernels 1.2 own one package, acme_kernels" in problem
    assert "pip uninstall acme-kernel acme-kernels, then pip install the one" in problem


def test_a_plugin_that_works(ask) -> None:
    result = ask("--json", good=GOOD.format(more=""))
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    (row,) = data["plugins"]
    assert (row["plugin"], row["distribution"], row["version"]) == ("good", "dist-good", "0.3")
    assert (row["status"], row["failures"]) == ("works", [])
    assert row["platforms"] == ["acme:v1,device=cpu,count=2"]
    assert [backend["address"] for backend in row["backends"]] == ["good/fast"]
    assert [found["vendor"] for found in data["platforms"]] == ["acme", "cpu"]
    assert data["picked"] == "acme:v1,device=cpu,count=2"
    assert data["problems"] == []


BROKEN = {
    "raises": ("raise RuntimeError('no driver')", "load", "RuntimeError: no driver"),
    "exits": ("raise SystemExit(3)", "load", "SystemExit: 3"),
    "ends": ("import os; os._exit(0)", "load", "its process ended with 0 after 0."),
    "crashes": ("import os; os.abort()", "load", "killed by SIGABRT after "),
    "interrupts": ("raise KeyboardInterrupt", "load", "KeyboardInterrupt"),
    "cards": (f"{HOOK}def attnmux_cards(): raise OSError('gone')", "cards", "OSError: gone"),
    "dies": (
        f"{HOOK}def attnmux_cards(): __import__('os').abort()",
        "load",
        "killed by SIGABRT after ",
    ),
    "probe": (f"{HOOK}def attnmux_platforms(): raise SystemExit(1)", "platforms", "SystemExit: 1"),
}


def test_whatever_a_plugin_does_is_a_row_and_the_others_go_on(ask) -> None:
    sources = {name: source for name, (source, _, _) in BROKEN.items()}
    result = ask("--json", good=GOOD.format(more=""), **sources)
    assert result.exit_code == 1, result.output
    found = rows(result)
    assert found.pop("dist-good")["status"] == "works"
    for name, (_, stage, said) in BROKEN.items():
        row = found.pop(f"dist-{name}")
        (failure,) = row["failures"]
        assert (row["status"], failure["plugin"], failure["version"]) == ("broken", name, "0.3")
        assert (failure["stage"], failure["distribution"]) == (stage, f"dist-{name}")
        assert said in failure["error"]
        if name != "ends":
            assert f"dist_{name}_module.py" in failure["traceback"]
        (problem,) = (
            one for one in json.loads(result.stdout)["problems"] if f"dist-{name} " in one
        )
        assert f"ATTNMUX_DENY_PLUGINS={name})" in problem
    assert not found
    assert len(json.loads(result.stdout)["problems"]) == len(BROKEN)


def test_a_plugin_that_imports_torch_is_a_problem_with_its_seconds(ask, tmp_path) -> None:
    (tmp_path / "fake/torch").mkdir(parents=True)
    (tmp_path / "fake/torch/__init__.py").touch()
    head = f"import sys; sys.path.insert(0, {str(tmp_path / 'fake')!r}); import torch\n"
    result = ask("--json", good=GOOD.format(more=""), slow=head + GOOD.format(more=""))
    (problem,) = json.loads(result.stdout)["problems"]
    assert "plugin slow (dist-slow 0.3) imports torch, 0." in problem
    assert 'deny_plugins = ["slow"] in attnmux.toml leaves it out' in problem
    assert unknown_plugins(["slow", "good"], denied=True) == {}
    assert unknown_plugins(["slow"], denied=False) == {"slow": "dist-slow"}
    assert rows(result)["dist-slow"]["status"] == "works"
    assert rows(result)["dist-slow"]["seconds"] > 0


def test_plugins_that_hang_are_ended_with_what_they_started(ask, tmp_path) -> None:
    started = tmp_path / "pid"
    sources = {
        "at_import": "import time; time.sleep(600)",
        "in_probe": GOOD.format(more="")
        + "@hookimpl\ndef attnmux_platforms():\n"
        + "    import subprocess\n    child = subprocess.Popen(['sleep', '600'])\n"
        + f"    open({str(started)!r}, 'w').write(str(child.pid))\n    child.wait()\n",
    }
    result = ask("--timeout", "5", "--json", **sources)
    assert result.exit_code == 1, result.output
    found = rows(result)
    for name, stage in (("at_import", "load"), ("in_probe", "platforms")):
        (failure,) = found[f"dist-{name}"]["failures"]
        assert (failure["stage"], failure["error"]) == (stage, "no answer in 5 s")
        assert f"dist_{name}_module.py" in failure["traceback"]
    assert [card["address"] for card in found["dist-in_probe"]["backends"]] == ["in_probe/fast"]
    assert has_ended(int(started.read_text()))


def test_an_interrupt_leaves_no_plugin_behind(tmp_path) -> None:
    started = tmp_path / "pid"
    source = f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\n"
    install(tmp_path, "slow", source + "time.sleep(600)")
    # A shell's background jobs, and so all that they start, ignore interrupts.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}; from attnmux.core.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor", "--timeout", "300"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "ATTNMUX_ALLOW_PLUGINS": "dist-slow"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (started.exists() and started.read_text()):
        time.sleep(0.01)
    try:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert has_ended(int(started.read_text()))
    finally:
        process.kill()
        process.wait()


def has_ended(pid: int) -> bool:
    """An orphan that nobody waits for stays as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_a_card_of_another_contract_is_a_problem(ask) -> None:
    result = ask(good=GOOD.format(more="contract='>=7'"))
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "good/fast (dist-good 0.3) is written for contract >=7" in said
    assert "other contract" in said


def test_one_name_of_two_plugins(ask, tmp_path) -> None:
    install(tmp_path, "good", GOOD.format(more=""), "dist-impostor")
    ask.allowed.append("dist-impostor")
    result = ask("--json", good=GOOD.format(more=""), other=GOOD.format(more=""))
    assert result.exit_code == 1
    found = rows(result)
    for name in ("dist-good", "dist-impostor"):
        (failure,) = found[name]["failures"]
        assert "'good' belongs to dist-good and dist-impostor" in failure["error"]
    assert found["dist-other"]["status"] == "works"


def test_entry_points_that_cannot_be_read(ask, tmp_path) -> None:
    install(tmp_path, "bad", "")
    (tmp_path / "dist_bad-0.3.dist-info/entry_points.txt").write_text("[attnmux]\nno equals\n")
    result = ask("--json", good=GOOD.format(more=""))
    assert result.exit_code == 1
    assert [name for name, row in rows(result).items() if row["status"] == "broken"] == ["dist-bad"]


def test_one_name_of_two_backends_is_a_note(ask) -> None:
    result = ask(one=GOOD.format(more=""), two=GOOD.format(more=""))
    assert result.exit_code == 0, result.output
    assert "fast is the name of several backends: say one/fast or two/fast" in result.stdout


def test_a_device_without_its_plugin(ask, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(unserved, "installed_version", lambda name: None)
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/nvidia0").touch()
    result = ask(good=GOOD.format(more=""))
    assert result.exit_code == 1
    assert "attnmux-nvidia is not installed: pip install attnmux-nvidia" in " ".join(
        result.stdout.split()
    )


def test_no_plugin_at_all(ask, tmp_path, monkeypatch) -> None:
    """None is asked for, and the one that is there is not imported."""
    trace = tmp_path / "trace"
    source = f"open({str(trace)!r}, 'w')"
    for result in (ask("--no-plugins", bad=source), ask("--json", "--no-plugins")):
        assert result.exit_code == 1
        assert "no plugin is installed" in result.stdout
    monkeypatch.setenv("ATTNMUX_NO_PLUGINS", "1")
    assert "no plugin is installed" in ask().stdout
    assert not trace.exists()


def test_the_report_shows_the_traceback_and_the_libraries(ask) -> None:
    more = f"requires=('{GONE}>=2', 'click>=1'), extra='fast'"
    result = ask(good=GOOD.format(more=more), bad="raise RuntimeError('[no] driver')")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert f"{GONE}>=2: missing pip install 'dist-good[fast]'" in text
    assert "click " in text
    assert "plugin bad (dist-bad 0.3): RuntimeError: [no] driver" in text
    assert "Traceback (most recent call last)" in text


def test_what_keeps_a_backend_from_running_here(ask, tmp_path, monkeypatch) -> None:
    cards = """
    return [
        BackendCard(name=name, summary="", factory="a:b", clauses=clauses,
                    requires=("no_such_library>=2",) if needs else (), verified_on=runs)
        for name, clauses, needs, runs in (
            ("other", (Clause.when(vendor=one_of("zeta", "omega")),), True, ()),
            ("unwanted", (), False, ()),
            ("here", (Clause.when(vendor=ANY), Clause.when(vendor=one_of("zeta"))), True,
             (Verified(on="it", libraries=(), date="2026-11-21"),)),
            ("able", (Clause.when(vendor=one_of("acme")),), False,
             (Verified(on="H", platform="zeta:z1", libraries=(), date="2026-11-21"),)),
        )
    ]
"""
    head = "from attnmux.core.plugin import Clause\n"
    head += "from attnmux.core.cards.conditions import ANY, one_of\n"
    head += "from attnmux.core.cards.proof import Verified\n"
    source = head + GOOD.partition("    return [BackendCard(")[0] + cards
    monkeypatch.setenv("ATTNMUX_DENY_BACKENDS", "unwanted")
    result = ask(good=source)
    assert result.exit_code == 0, result.output
    table = result.stdout.partition("libraries")[2].splitlines()
    said = {line.split()[0]: " ".join(line.split()[1:]) for line in table if "good/" in line}
    assert said.pop("for") == "other hardware (attnmux backends --all): good/other"
    assert said == {
        "good/unwanted": "nothing denied",
        "good/here": "emulated lacks libraries no_such_library>=2: missing",
        "good/able": "other device ready",
    }
    assert result.stdout.count("pip install") == 1
    backends = rows(ask("--json"))["dist-good"]["backends"]
    assert [backend["vendors"] for backend in backends] == [
        *(["omega", "zeta"], [], [], ["acme"]),
    ]
    assert [backend["proof"] for backend in backends] == [
        *("nothing", "nothing", "emulated", "other device"),
    ]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('backend = "fasst"', "did you mean 'fast'? (named by backend of the configuration file)"),
        ('deny_backends = ["fasst"]', "did you mean 'fast'? (among the backends to deny)"),
        ("[options.fast]\nx = 1", "an option of fast"),
    ],
)
def test_a_configured_name_that_nothing_has_is_a_problem(ask, tmp_path, setting, said) -> None:
    (tmp_path / "attnmux.toml").write_text(setting)
    result = ask(good=GOOD.format(more=""))
    assert result.exit_code == 1
    assert said in result.stdout


def test_a_machine_on_which_no_backend_runs_is_a_problem(ask) -> None:
    result = ask(good=GOOD.format(more="requires=('no_such_library>=2',)"))
    assert result.exit_code == 1
    (problem,) = (line for line in result.stdout.splitlines() if line.startswith("problem"))
    assert "no backend runs on acme:v1,device=cpu,count=2," in problem
    assert problem.endswith(": pip install 'no_such_library>=2', or pip install attnmux-cpu")


def test_a_machine_for_which_no_plugin_brings_a_backend_is_a_problem(ask) -> None:
    head = "from attnmux.core.plugin import Clause\n"
    head += "from attnmux.core.cards.conditions import one_of\n"
    elsewhere = "clauses=(Clause.when(vendor=one_of('zeta')),)"
    result = ask(good=head + GOOD.replace("clauses=()", elsewhere).format(more=""))
    assert result.exit_code == 1
    assert "as installed and configured: pip install attnmux-cpu" in result.stdout


def test_a_backend_that_leaves_the_machine_out_is_for_other_hardware(ask) -> None:
    """No list of vendors says so."""
    head = "from attnmux.core.plugin import Clause, anything_but\n"
    elsewhere = "clauses=(Clause.when(vendor=anything_but('acme', 'cpu')),)"
    result = ask(good=head + GOOD.replace("clauses=()", elsewhere).format(more=""))
    assert result.exit_code == 1
    assert "other hardware" in result.stdout
    assert "as installed and configured: pip install attnmux-cpu" in result.stdout


@pytest.mark.parametrize("seconds", ["0", "nan", "inf", "3601", "soon"])
def test_a_bad_timeout_is_refused(ask, seconds) -> None:
    assert ask("--timeout", seconds).exit_code == 2


def test_a_signal_without_a_name(ask) -> None:
    signal = "__import__('signal').SIGRTMIN + 1"
    result = ask("--json", odd=f"import os\nos.kill(os.getpid(), {signal})\n")
    (failure,) = rows(result)["dist-odd"]["failures"]
    assert failure["error"].startswith("killed by signal ")


def test_figures_that_cannot_be_read_are_a_problem(ask, tmp_path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/acme-v1-v1.json").write_text("{")
    source = "from attnmux.core.plugin import Figures\nfrom pathlib import Path\n" + GOOD.format(
        more=""
    )
    source += "@hookimpl\ndef attnmux_figures():\n"
    source += f"    return Figures.in_folder(Path({str(tmp_path / 'figures')!r}))\n"
    (problem,) = json.loads(ask("--json", good=source).stdout)["problems"]
    assert "figures of dist-good 0.3 are left out" in problem
    assert problem.endswith(": pip install --upgrade dist-good")


def test_figures_that_do_not_count_here_are_a_note(bare) -> None:
    """One backend is of no plugin, and the other's release is later than the figures'."""
    clause = Clause.when(vendor=one_of("nvidia"))
    card = BackendCard(name="usual", summary="", factory="a:b", clauses=(clause,))
    figures = tuple(Figures.in_folder(Path(__file__).parents[1] / "measured/figures"))
    plugin = examined("fake", "nvidia:sm90")._replace(cards=(card,), figures=figures, version="2.0")
    (note,) = diagnose([plugin], Settings(platform="nvidia")).notes
    assert note.startswith(
        "nvidia-sm90-h200.json of attnmux-fake 2.0 does not count for fake/usual"
    )
    assert "measured with attnmux-fake >=1,<2, and 2.0 is installed" in note
    assert "fake/other (no plugin here offers it)" in note
    assert note.endswith("or measure here by attnmux bench --keep")
    other = plugin._replace(platforms=(Platform.parse("nvidia:sm80"),))
    assert diagnose([other], Settings(platform="nvidia")).notes == ()


def examined(name: str, *platforms: str, error: str = "") -> Plugin:
    failure = PluginFailure(
        plugin=name, distribution=f"attnmux-{name}", version="0.3", stage="load", error=error
    )
    return Plugin(
        EntryPoint(name, "", "attnmux"),
        f"attnmux-{name}",
        "0.3",
        platforms=tuple(map(Platform.parse, platforms)),
        cards=(BackendCard(name=name, summary="", factory="a:b", clauses=()),),
        failures=(failure,) if error else (),
    )


@pytest.fixture
def bare(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(doctor_diagnosis, "survey", partial(survey, root=tmp_path))
    monkeypatch.setattr(unserved, "installed_version", lambda name: None)
    return tmp_path


def test_a_backend_that_lacks_a_compiler_is_a_note(bare) -> None:
    clause = Clause.when(vendor=one_of("nvidia"), features=includes("cxx_compiler"))
    card = BackendCard(name="made", summary="", factory="a:b", clauses=(clause,))
    for platform, said in (("nvidia:sm90", True), ("nvidia:sm90,features=cxx_compiler", False)):
        plugin = examined("nvidia", platform)._replace(cards=(card,))
        notes = diagnose([plugin], Settings(platform="nvidia")).notes
        assert [note.endswith("apt-get install g++") for note in notes] == [True] * said


def test_two_vendors_in_one_box(bare) -> None:
    both = [examined("nvidia", "nvidia:sm90"), examined("amd", "amd:gfx942")]
    undecided = diagnose(both, Settings())
    assert [found.vendor for found in undecided.detection.accelerators] == ["amd", "nvidia"]
    assert undecided.picked is None
    assert "amd:gfx942 and nvidia:sm90" in undecided.problems[0]
    decided = diagnose(both, Settings(platform="amd"))
    assert decided.picked == Platform.parse("amd:gfx942")
    assert decided.problems == ()


def test_a_platform_that_is_configured_and_not_there(bare) -> None:
    diagnosis = diagnose([examined("cpu")], Settings(platform="nvidia"))
    assert diagnosis.picked is None
    assert diagnosis.problems[0].startswith("platform: expected one of cpu:")
    assert "got 'nvidia'" in diagnosis.problems[0]


def test_what_core_itself_cannot_find_out_is_a_problem(bare, monkeypatch) -> None:
    def fails() -> Platform:
        raise OSError("gone")

    monkeypatch.setattr(probe, "probe_cpu", fails)
    diagnosis = diagnose([examined("nvidia", "nvidia:sm90")], Settings())
    assert diagnosis.picked == Platform.parse("nvidia:sm90")
    (problem,) = diagnosis.problems
    assert "asking the CPU" in problem
    assert "OSError: gone" in problem


def test_a_device_whose_plugin_is_broken(bare) -> None:
    (bare / "dev").mkdir()
    (bare / "dev/nvidia0").touch()
    diagnosis = diagnose([examined("nvidia", error="ImportError: x")], Settings())
    assert "attnmux-nvidia is broken (ImportError: x)" in diagnosis.problems[1]


@pytest.mark.parametrize(
    ("installed", "state", "hint"),
    [
        ({"a": "2.5"}, "present", ""),
        ({"a": "1.9"}, "too old", "pip install 'dist[x]'"),
        ({"a": "4.0"}, "too new", "pip install 'dist[x]'"),
        ({}, "missing", "pip install 'dist[x]'"),
        ({"b": "1"}, "present", ""),
        ({"a": "1.0", "b": "0.1"}, "too old", "pip install 'dist[x]'"),
        ({"a": "nightly"}, "too old", "pip install 'dist[x]'"),
    ],
)
def test_libraries(installed, state, hint) -> None:
    card = BackendCard(
        name="fast",
        summary="",
        clauses=(),
        factory="a:b",
        requires=(("a>=2,<4", "b==1.*"), "c; python_version < '3'"),
        extra="x",
    )
    (row,) = required(card, installed.get, "dist")
    assert (row.wanted, row.state, row.hint) == ("a>=2,<4 or b==1.*", state, hint)
    assert bool(row.installed) == bool(installed)


def test_the_plugins_of_this_environment() -> None:
    if not metadata.entry_points(group="attnmux"):
        pytest.skip("no plugin is installed in this environment")
    result = CliRunner().invoke(verbs, ["doctor", "--json", "--timeout", "60"])
    ours = [row for name, row in rows(result).items() if name.startswith("attnmux-")]
    assert [row["plugin"] for row in ours if row["status"] != "works"] == []
