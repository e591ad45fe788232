"""The frame of the command: verbs, errors, exit codes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from attnmux.core import cli
from attnmux.core.cli import verbs as module
from attnmux.core.cli.verbs import verbs
from attnmux.core.facts.libraries import identity

MAIN = "import sys; sys.argv[0] = 'attnmux'; from attnmux.core.cli import main; main()"
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 1,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def call():
    def invoke(*args: str):
        return CliRunner().invoke(verbs, args, prog_name="attnmux")

    return invoke


class Owner:
    """Of an entry point."""


def point(name: str, value: str, distribution: str = "") -> EntryPoint:
    owner = Owner()
    owner.metadata = {"Name": distribution, "Version": ""}
    return EntryPoint(name, value, module.GROUP)._for(owner)


@pytest.fixture
def outside(monkeypatch):
    """Install verbs of other distributions, and no others."""

    def install(*points: EntryPoint) -> None:
        def entry_points(group: str):
            assert group == module.GROUP
            return points, ()

        monkeypatch.setattr(module, "entry_points", entry_points)

    return install


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_verbs(call, outside, flag) -> None:
    outside(point("sing", "no_such_module:sing"))
    result = call(flag)
    assert result.exit_code == 0
    for name in (*module.VERBS, "sing"):
        assert name in result.output


def test_what_the_terminal_cannot_say_is_escaped(outside, tmp_path, monkeypatch) -> None:
    outside()
    monkeypatch.chdir(tmp_path)
    Path("mö del").mkdir()
    Path("mö del/config.json").write_text(json.dumps(MODEL))
    args = ["select", "--model", "mö del", "--platform", "cpu:x86_64", "--explain"]
    result = CliRunner(charset="ascii").invoke(verbs, args)
    assert result.exit_code in (0, 3)
    assert "mha (m\\xf6 del)" in result.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [("selcet", "Did you mean 'select'?"), ("zzz", "No such verb 'zzz'."), ("", "No such verb")],
)
def test_an_unknown_verb(call, name, said) -> None:
    result = call(name)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(("name", "optional"), module.OPTIONAL.items(), ids=module.OPTIONAL)
def test_a_verb_of_a_package_that_is_not_installed(call, outside, name, optional) -> None:
    outside()
    for args in ((name,), (name, "--help"), (f"{name[:3]}{name[4:]}",)):
        result = call(*args)
        assert result.exit_code == 2
        assert f"{name!r} needs {optional[0]}, which is not installed" in result.stderr
        assert f"pip install {optional[0]}" in result.stderr


def test_help_says_how_to_install_the_other_verbs(call, outside) -> None:
    outside()
    said = call("--help").output
    for name, (distribution, summary) in module.OPTIONAL.items():
        assert f"  {name:<11}(pip install {distribution})" in said
        assert summary in " ".join(said.split())


def test_help_of_an_installed_verb_gives_its_summary(call, outside, monkeypatch) -> None:
    ours, theirs = point("verify", "no_such_module:verify"), point("bench", "no_such_module:bench")
    monkeypatch.setattr(
        module, "_distribution", {ours: "attnmux-testing", theirs: "acme-bench"}.__getitem__
    )
    outside(ours, theirs)
    said = call("--help").output
    summary = module.OPTIONAL["verify"][1]
    assert f"  verify     {summary}\n" in said
    assert "  bench      (from acme-bench)\n" in said


def test_every_optional_verb_is_installed_by_the_distribution_that_is_named() -> None:
    found = {point.name: identity(point.dist)[0] for point in module.entry_points(module.GROUP)[0]}
    for name, (distribution, _) in module.OPTIONAL.items():
        assert found.get(name, distribution) == distribution


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["platforms", "--json"], ["zzz"]])
def test_the_module_runs_as_the_command_does(args, tmp_path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, *args], capture_output=True, text=True, check=False
        )

    as_module, as_command = run("-m", "attnmux.core"), run("-c", MAIN)
    assert as_module.returncode == as_command.returncode
    said = [
        [text.replace("python -m attnmux.core", "attnmux") for text in (each.stdout, each.stderr)]
        for each in (as_module, as_command)
    ]
    assert said[0] == said[1]


def test_a_verb_of_another_distribution(call, outside, tmp_path, monkeypatch) -> None:
    (tmp_path / "outside_verb.py").write_text(
        "import click\n@click.command()\n@click.option('--loud', is_flag=True)\n"
        "def sing(loud):\n    click.echo('LA' if loud else 'la')\nnot_a_command = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    outside(
        point("sing", "outside_verb:sing"),
        point("number", "outside_verb:not_a_command"),
        point("gone", "outside_verb:gone"),
        point("twice", "outside_verb:sing"),
        point("twice", "outside_verb:other"),
        point("select", "outside_verb:sing"),
    )
    assert call("sing", "--loud").output == "LA\n"
    assert "not a click command" in call("number").stderr
    assert call("gone").exit_code == 1
    assert "cannot be loaded" in call("gone").stderr
    assert "uninstall one" in call("twice").stderr
    assert "--request" in call("select", "--help").output


def test_ctrl_c(call, outside, tmp_path, monkeypatch) -> None:
    (tmp_path / "interrupted_verb.py").write_text(
        "import click\n@click.command()\ndef stop():\n    raise KeyboardInterrupt\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    outside(point("stop", "interrupted_verb:stop"))
    result = call("stop")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_while_the_verbs_are_loaded(monkeypatch, capsys) -> None:
    def interrupted() -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "answers_apart", interrupted)
    monkeypatch.setattr(cli, "gc", SimpleNamespace(disable=lambda: None, freeze=lambda: None))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "attnmux: interrupted\n"


def test_a_verb_collects_its_own_garbage_and_not_what_was_imported(call) -> None:
    before = gc.get_freeze_count()
    gc.disable()
    try:
        assert call("select", "--help").exit_code == 0
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        # Nothing is unfrozen: every later collection would go through all tests
        gc.enable()


def test_an_unexpected_error(call, outside, tmp_path, monkeypatch) -> None:
    (tmp_path / "failing_verb.py").write_text(
        "import click\nfrom attnmux.core.cli.run import common_options\n"
        "@click.command()\n@common_options\n"
        "def fail(run, as_json):\n    raise ZeroDivisionError('oops')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    outside(point("fail", "failing_verb:fail"))
    result = call("fail")
    assert result.exit_code == 1
    assert result.stderr == "attnmux: ZeroDivisionError: oops (--debug shows where)\n"
    result = call("fail", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "failing_verb.py" in result.stderr


def test_version(call) -> None:
    assert metadata.version("attnmux-core") in call("--version").output


def test_the_settings_can_ask_for_tracebacks(call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNMUX_DEBUG", "1")
    result = call("select", "--backend", "nothing-like-it")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("verb", ["select", "platforms", "backends"])
def test_a_bad_variable_is_an_error_of_use(call, monkeypatch, verb) -> None:
    monkeypatch.setenv("ATTNMUX_NO_PLUGINS", "perhaps")
    result = call(verb)
    assert result.exit_code == 2
    assert "ATTNMUX_NO_PLUGINS: expected true or false" in result.stderr


SINGS = "import click\n@click.command()\ndef sing():\n    click.echo('la')\n"


@pytest.mark.parametrize(
    ("variable", "value", "sings"),
    [
        ("ALLOW_PLUGINS", "acme-sing", True),
        ("ALLOW_PLUGINS", "Acme.Sing", True),
        ("ALLOW_PLUGINS", "sing", False),
        ("ALLOW_PLUGINS", "attnmux-cpu", False),
        ("DENY_PLUGINS", "acme-sing", False),
        ("DENY_PLUGINS", "attnmux-cpu", True),
        ("NO_PLUGINS", "1", False),
    ],
)
def test_who_is_allowed_holds_for_verbs(
    call, outside, tmp_path, monkeypatch, variable, value, sings
) -> None:
    (tmp_path / "singing_verb.py").write_text(SINGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    verify = point("verify", "singing_verb:sing", "attnmux-testing")
    outside(point("sing", "singing_verb:sing", "acme-sing"), verify)
    monkeypatch.setenv(f"ATTNMUX_{variable}", value)
    result = call("sing")
    assert (result.output == "la\n") is sings
    assert sings or "That of acme-sing is left out" in result.stderr
    assert ("acme-sing" in call("--help").output) is sings
    assert call("verify").output == "la\n"


def test_help_needs_no_configuration(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_ALLOW_PLUGIN", "misspelt")
    assert call("--help").exit_code == 0
    assert call("verify").exit_code == 2


def test_an_early_exit_of_a_library_is_no_success(call, outside, tmp_path, monkeypatch) -> None:
    (tmp_path / "exiting_verb.py").write_text(
        "import sys\nimport click\n@click.command()\ndef leave():\n    sys.exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    outside(point("leave", "exiting_verb:leave"))
    result = call("leave")
    assert result.exit_code == 1
    assert "ended early by a library: SystemExit: 0" in result.stderr


def test_what_libraries_print_is_no_part_of_an_answer(tmp_path) -> None:
    (tmp_path / "loud_verb.py").write_text(
        "import ctypes, os, subprocess, sys\nimport click\n"
        "from attnmux.core.verbs import common_options\n"
        "@click.command()\n@common_options\n"
        "def loud(run, as_json):\n"
        "    print('spoilt')\n"
        "    os.write(1, b'spoilt')\n"
        "    sys.__stdout__.write('spoilt')\n"
        "    subprocess.run(['echo', 'spoilt'])\n"
        "    c = ctypes.CDLL(None); c.printf(b'spoilt'); c.fflush(None)\n"
        "    run.echo_json([1])\n"
    )
    info = tmp_path / "acme_loud-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: acme-loud\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[attnmux.commands]\nloud = loud_verb:loud\n")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "loud", "--json"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [1]
    assert done.stderr.count("spoilt") == 5
