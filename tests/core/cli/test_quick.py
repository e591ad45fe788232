"""`attnmux select --json` without click: the same answers, and only where nothing is missing."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from attnmux.core.cli import quick
from attnmux.core.cli.select_command import select
from attnmux.core.cli.select_options import OPTIONS, read
from attnmux.core.cli.verbs import verbs

ELSEWHERE = ("--platform", "nvidia:sm90,cuda=12.8")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ELSEWHERE,
        (*ELSEWHERE, "--platform=amd:gfx942,rocm=6.4"),
        (*ELSEWHERE, "--request", "page_size=64,phases=decode"),
        (*ELSEWHERE, "--request", "kv_dtype=fp4_e2m1"),
        (*ELSEWHERE, "--request=", "--backend", "triton"),
        (*ELSEWHERE, "--backend", "nobody"),
        (*ELSEWHERE, "--without", "triton", "--without", "nothing"),
        (*ELSEWHERE, "--allow-coercion", "--no-measurements"),
        (*ELSEWHERE, "--set", "triton.nothing=1"),
        ("--set", "nothing"),
        ("--platform", "acme"),
        ("--request", "pages=7"),
        ("--model", "nowhere"),
    ],
)
def test_the_answer_is_that_of_click(args, capsys) -> None:
    code = quick.answer([*args, "--json"])
    said = capsys.readouterr()
    expected = CliRunner().invoke(verbs, ["select", *args, "--json"], prog_name="attnmux")
    assert (code, said.out, said.err) == (expected.exit_code, expected.stdout, expected.stderr)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--json", "--help"),
        ("--json", "-h"),
        ("--json", "--bogus"),
        ("--json", "--request"),
        ("--json", "--request", "--explain"),
        ("--json", "--explain"),
        ("--json", "--all"),
        ("--json", "--engine", "vllm"),
        ("--json", "--tp", "2"),
        ("--json", "--speculative-attention-mode", "decode"),
        ("--json", "--allow-coercion=yes"),
        ("--json=yes",),
        ("--json", "word"),
        ("--json", "--", "word"),
        ("--json", "--no-plugins"),
        ("--json", "--locked", "file"),
        ("--json", "--debug"),
    ],
)
def test_everything_else_is_left_to_click(args) -> None:
    assert quick.answer(args) is None


def test_values_are_read_as_click_reads_them() -> None:
    args = ["--platform", "a", "--without=b=c", "--platform=d", "--backend", "e", "--backend", "f"]
    with click.Context(select) as ctx:
        select.parse_args(ctx, list(args))
    assert read([*args, "--json"]) == {**ctx.params, "as_json": True}


def test_each_option_is_declared_once() -> None:
    own = {option.said for option in OPTIONS}
    common = {"--json", "--no-plugins", "--locked", "--debug"}
    said = [text for param in select.params for text in param.opts]
    assert sorted(said) == sorted(own | common)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "\nattnmux: interrupted\n"),
        (SystemExit(0), 1, "attnmux: ended early by a library: SystemExit: 0\n"),
        (ZeroDivisionError("oops"), 1, "attnmux: ZeroDivisionError: oops (--debug shows where)\n"),
    ],
)
def test_an_end_of_another_kind(raised, code, said, capsys, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(quick, "select", fail)
    assert quick.answer(["--json"]) == code
    assert capsys.readouterr().err == said


def test_an_answer_that_cannot_be_written(monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quick, "select", fail)
    with pytest.raises(OSError, match="No space left"):
        quick.answer(["--json"])


def test_a_plain_answer_imports_neither_click_nor_rich() -> None:
    """A hidden use would cost every start milliseconds."""
    code = (
        "import sys; from attnmux.core.cli.quick import answer\n"
        "answer(['--json', '--platform', 'nvidia:sm90,cuda=12.8'])\n"
        "slow = {'click', 'platformdirs', 'rich', 'shutil', 'torch'}\n"
        "print(sorted(slow & set(sys.modules)), file=sys.stderr)"
    )
    for _ in range(2):  # the first may fill the cache of offers
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"
