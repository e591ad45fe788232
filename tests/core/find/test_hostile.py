"""`attnmux select --json` with one plugin that misbehaves and one that works, both installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from attnmux.core.cli import main; main()"
SECONDS = "3"
HEAD = """
import ctypes, os, signal, subprocess, sys, threading, time
from attnmux.core import Platform
from attnmux.core.plugin import Clause
from attnmux.core.plugin import (
    ANY,
    BackendCard,
    Clause,
    Condition,
    Option,
    Prior,
    hookimpl,
    one_of,
    at_most,
)

def card(**more):
    given = dict(name="b", summary="", clauses=(Clause.when(),), factory="a:b", **more)
    return BackendCard(**given)

"""
CARDS = HEAD + "@hookimpl\ndef attnmux_cards():\n    "
PROBE = HEAD + (
    "@hookimpl\ndef attnmux_cards():\n    return [card()]\n"
    "@hookimpl\ndef attnmux_platforms():\n    "
)
GOOD = HEAD.replace('"b"', '"a"') + "@hookimpl\ndef attnmux_cards():\n    return [card()]\n"
WORKS = "@hookimpl\ndef attnmux_cards():\n    return [card()]\n"
TIMEOUT = f"no answer in {SECONDS} s"

HOSTILE: dict[str, tuple[str, str]] = {
    # While it is imported
    "exit_0": (HEAD + "os._exit(0)", "ended with 0"),
    "exit_7": (HEAD + "os._exit(7)", "ended with 7"),
    "c_exit": (HEAD + "ctypes.CDLL(None).exit(0)", "ended with 0"),
    "loop": (HEAD + "while True: pass", TIMEOUT),
    "sleep": (HEAD + "time.sleep(600)", TIMEOUT),
    "stop": (HEAD + "os.kill(os.getpid(), signal.SIGSTOP)", TIMEOUT),
    "ignores_term": (HEAD + "signal.signal(15, signal.SIG_IGN)\ntime.sleep(600)", TIMEOUT),
    "gil": (HEAD + "ctypes.PyDLL(None).sleep(600)", TIMEOUT),
    "segfault": (HEAD + "ctypes.string_at(0)", "killed by SIGSEGV"),
    "abort": (HEAD + "os.abort()", "killed by SIGABRT"),
    "alarm": (HEAD + "signal.alarm(1)\ntime.sleep(600)", "killed by SIGALRM"),
    "kills_parent": (HEAD + "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)", ""),
    "kills_group": (HEAD + "os.kill(0, signal.SIGKILL)", "killed by SIGKILL"),
    "system_exit": (HEAD + "raise SystemExit(3)", "SystemExit: 3"),
    "interrupt": (HEAD + "raise KeyboardInterrupt", "KeyboardInterrupt"),
    "memory": (HEAD + "x = b'1' * 2**36", "MemoryError"),
    "grows": (HEAD + "x = []\nwhile True: x.append(bytes(2**26))", "MemoryError"),
    "recursion": (HEAD + "def f(): f()\nf()", "RecursionError"),
    "mute": (
        HEAD + "class E(Exception):\n def __str__(self): raise SystemExit(3)\nraise E",
        "its message cannot be read",
    ),
    "mute_interrupt": (
        HEAD + "class E(Exception):\n def __str__(self): raise KeyboardInterrupt\nraise E",
        "its message cannot be read",
    ),
    "long_error": (HEAD + "raise ValueError('x' * 10**7)", "ValueError: xxx"),
    "escape_error": (HEAD + "raise ValueError('\\x1b[31mred\\x07')", "\\x1b[31mred\\x07"),
    # It works, and leaves the answer of the command alone
    "daemon": (
        HEAD + "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "+",
    ),
    "thread": (HEAD + "threading.Thread(target=time.sleep, args=(600,)).start()\n", "+"),
    "printer": (
        HEAD + "def p():\n while True: print('x', flush=True)\n"
        "threading.Thread(target=p).start()\n",
        "+",
    ),
    "fork": (HEAD + "os.fork()\n", "+"),
    "fork_sleeps": (HEAD + "if not os.fork(): time.sleep(600)\n", "+"),
    "excepthook": (HEAD + "sys.excepthook = None\nsys.setprofile(lambda *_: None)\n", "+"),
    "trace": (HEAD + "sys.settrace(lambda *_: 1 / 0)\n" + WORKS, "ZeroDivisionError"),
    "closed": (HEAD + "os.closerange(0, 100)\n", "+"),
    "write_1": (HEAD + "os.write(1, b'spoilt')\n", "+"),
    "stdout": (HEAD + "sys.__stdout__.write('spoilt'); sys.__stdout__.flush()\n", "+"),
    "subprocess": (HEAD + "subprocess.run(['echo', 'spoilt'])\n", "+"),
    "printf": (HEAD + "c = ctypes.CDLL(None); c.printf(b'spoilt'); c.fflush(None)\n", "+"),
    "atexit": (HEAD + "import atexit; atexit.register(print, 'spoilt')\n", "+"),
    "dumps": (HEAD + "import json; json.dumps = lambda *a, **k: 'spoilt'\n", "+"),
    "echo": (HEAD + "import click; click.echo = print\n", "+"),
    "exit_gone": (HEAD + "os._exit = sys.exit = None\n", "+"),
    # What its hooks return
    "endless": (CARDS + "import itertools; return list(itertools.repeat(card()))", ""),
    "iterator": (CARDS + "import itertools; return itertools.repeat(card())", "not a list"),
    "own_list": (CARDS + "class L(list): pass\n    return L([card()])", "not a list of"),
    "own_card": (
        CARDS + "class C(BackendCard): pass\n"
        "    return [C(name='b', summary='', clauses=(), factory='a:b')]",
        "not a list of BackendCard",
    ),
    "clauses": (
        CARDS + "return [BackendCard(name='b', summary='', clauses=(Clause.when(),) * 100_000,"
        " factory='a:b')]",
        "a tuple of Clause, at most 1000",
    ),
    "page_negative": (CARDS + "Clause.when(page_size=one_of(-5, 0))", "clause, page_size"),
    "page_huge": (CARDS + "Clause.when(page_size=one_of(10**40))", "clause, page_size"),
    "page_text": (CARDS + "Clause.when(page_size=one_of('16'))", "clause, page_size"),
    "page_flag": (CARDS + "Clause.when(page_size=one_of(True))", "clause, page_size"),
    "most_huge": (CARDS + "Clause.when(head_dim=at_most(10**40))", "clause, head_dim"),
    "vendor_number": (CARDS + "Clause.when(vendor=one_of(3))", "clause, vendor"),
    "condition": (
        CARDS + "class Slow(Condition):\n"
        "        def admits(self, value): time.sleep(600)\n"
        "        def __str__(self): raise SystemExit(3)\n"
        "    Clause.when(page_size=Slow())",
        "clause, page_size",
    ),
    "rank_flag": (CARDS + "Prior(rank=True, source='')", "prior, rank"),
    "rank_huge": (CARDS + "Prior(rank=-10**40, source='')", "prior, rank"),
    "escape": (CARDS + "return [card(aliases=('x\\x1b',))]", "name: expected letters"),
    "escape_source": (CARDS + "return [card(sources={'dtype': '\\x1b[2J'})]", "control characters"),
    "source_object": (
        CARDS + "return [card(priors=(Prior(rank=1, source=object()),))]",
        "prior, source: expected text",
    ),
    "excludes": (CARDS + "return [card(excludes=('b', 'a'), companions=('b',))]", "+"),
    "altered": (
        CARDS + "c = card()\n    object.__setattr__(c, 'clauses', 'none')\n    return [c]",
        "",
    ),
    "cards_exit": (CARDS + "os._exit(0)", "ended with 0"),
    "cards_raise": (CARDS + "raise GeneratorExit", "GeneratorExit"),
    # Probes
    "probe_loop": (PROBE + "while True: pass", TIMEOUT),
    "probe_exit": (PROBE + "os._exit(0)", "ended with 0"),
    "probe_segfault": (PROBE + "ctypes.string_at(0)", "killed by SIGSEGV"),
    "probe_none": (PROBE + "return None", "attnmux_platforms returned None"),
    "probe_text": (PROBE + "return ['sm90']", "not a list of Platform"),
    "probe_escape": (
        PROBE + "return [Platform(vendor='x\\x1b', device_type='cpu', arch='y')]",
        "control characters",
    ),
    "probe_cpu": (
        PROBE + "return [Platform(vendor='cpu', device_type='cpu', arch='z80')]",
        "platform, vendor: expected the plugin's own: attnmux-cpu reports devices of cpu",
    ),
    "probe_foreign": (
        PROBE + "return [Platform(vendor='nvidia', device_type='cuda', arch='sm90')]",
        "attnmux-nvidia reports devices of nvidia",
    ),
    "probe_count": (
        PROBE + "return [Platform(vendor='x', device_type='x', arch='y', count=10**9)]",
        "platform, count: expected at most 1024",
    ),
    "probe_memory": (
        PROBE + "return [Platform(vendor='x', device_type='x', arch='y', memory_bytes=2**60)]",
        "platform, memory_bytes: expected at most",
    ),
}


def install(folder: Path, plugin: str, source: str, entry_points: str = "") -> Path:
    (folder / f"{plugin}_module.py").write_text(source)
    info = folder / f"dist_{plugin}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: dist-{plugin}\nVersion: 0.3\n")
    (info / "RECORD").write_text(f"{plugin}_module.py,,\n")
    (info / "entry_points.txt").write_text(f"[attnmux]\n{plugin} = {plugin}_module\n")
    return info


def selected(folder: Path, *args: str, allow: str = "dist-bad,dist-good") -> dict:
    """The answer in JSON. The command exits with 0."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "select", "--json", *args],
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "ATTNMUX_ALLOW_PLUGINS": allow,
            "ATTNMUX_PLUGIN_SECONDS": SECONDS,
        },
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"\x1b" not in done.stdout + done.stderr
    return json.loads(done.stdout)


def rows_of(answer: dict) -> list[str]:
    return [text for text in answer["warnings"] if text.startswith("plugin ")]


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> dict:
    """Of a command with all of them but one, which ends the process of all."""
    folder = tmp_path_factory.mktemp("hostile")
    install(folder, "good", GOOD)
    for name in ALIKE:
        install(folder, name, source_of(name))
    allow = ",".join(f"dist-{name}" for name in ("good", *ALIKE))
    first = selected(folder, allow=allow)
    assert selected(folder, allow=allow) == first
    return first


ALIKE = [name for name in HOSTILE if name != "kills_parent"]


def source_of(name: str) -> str:
    source, said = HOSTILE[name]
    return source + WORKS if said == "+" and "attnmux_cards" not in source else source


@pytest.mark.parametrize("name", ALIKE)
def test_a_plugin_that_misbehaves_is_a_row_at_most(answer, name) -> None:
    check_row(answer, name)


def check_row(answer: dict, name: str) -> None:
    source, said = HOSTILE[name]
    offered = {(verdict["plugin"], verdict["backend"]) for verdict in answer["candidates"]}
    rows = [row for row in answer["warnings"] if row.startswith(f"plugin {name} (dist-{name} 0.3)")]
    assert ("good", "a") in offered
    assert len(rows) == (said != "+")
    assert ((name, "b") in offered) is (said == "+" or "attnmux_platforms" in source)
    assert said == "+" or said in rows[0]
    assert not rows or len(rows[0]) < 1200


def test_each_plugin_is_examined_alone_where_one_ends_the_process_of_all(tmp_path) -> None:
    names = ("exit_7", "kills_parent", "printf", "probe_exit")
    install(tmp_path, "good", GOOD)
    for name in names:
        install(tmp_path, name, source_of(name))
    answer = selected(tmp_path, allow=",".join(f"dist-{name}" for name in ("good", *names)))
    for name in names:
        check_row(answer, name)


def test_a_row_stays_until_the_plugin_changes(tmp_path) -> None:
    install(tmp_path, "good", GOOD)
    trace = tmp_path / "trace"
    noted = HEAD + f"open({str(trace)!r}, 'a').write('.')\n"
    info = install(tmp_path, "bad", noted + "os._exit(0)")
    for imports in (1, 1, 1):
        (row,) = rows_of(selected(tmp_path, "--platform", "cpu:x86_64"))
        assert "ended with 0" in row
        assert len(trace.read_text()) == imports
    (tmp_path / "bad_module.py").write_text(noted + WORKS)
    assert rows_of(selected(tmp_path, "--platform", "cpu:x86_64")) == []
    (info / "RECORD").write_text("")
    for imports in (3, 3):
        assert rows_of(selected(tmp_path, "--platform", "cpu:x86_64")) == []
        assert len(trace.read_text()) == imports


@pytest.mark.parametrize("content", ["", "[", "[]", '{"plugins": 3}', "[" * 100_000, None])
def test_a_damaged_cache_is_an_empty_one(tmp_path, content) -> None:
    install(tmp_path, "good", GOOD)
    first = selected(tmp_path)
    for file in (tmp_path / "cache/attnmux").iterdir():
        # None: the values alone are damaged
        values = dict.fromkeys(json.loads(file.read_text()), 3)
        values |= {"environment": json.loads(file.read_text()).get("environment")}
        file.write_text(json.dumps(values) if content is None else content)
    assert selected(tmp_path) == first


def test_a_cache_that_another_user_could_write_is_not_read(tmp_path) -> None:
    install(tmp_path, "good", GOOD)
    selected(tmp_path)
    (file,) = (tmp_path / "cache/attnmux").glob("offers-*")
    forged = file.read_text().replace('"a:b"', '"os:system"')
    file.write_text(forged)
    assert selected(tmp_path)["phases"]["decode"]["factory"] == "os:system"
    file.chmod(0o666)
    assert selected(tmp_path)["phases"]["decode"]["factory"] == "a:b"


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "bytes", "syntax"])
def test_entry_points_that_cannot_be_read(tmp_path, kind) -> None:
    install(tmp_path, "good", GOOD)
    path = install(tmp_path, "bad", GOOD) / "entry_points.txt"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"[attnmux]\nbad = " + (b"\xff" if kind == "bytes" else b"a b c"))
    (row,) = rows_of(selected(tmp_path))
    assert row.startswith("plugin dist-bad (dist-bad): ")
