"""Odd plugins: whatever one raises, returns or prints is a row at most, and the others go on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from attnmux.core import InvalidInput, Plugins, Settings
from attnmux.core.find.manager import manager
from attnmux.core.find.plugin import Plugin
from attnmux.core.find.probes import probe

pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning"
)

HEAD = """
import asyncio, ctypes, itertools, os, signal, subprocess, sys, threading, time, types
from attnmux.core import Platform
from attnmux.core.plugin import (
    ANY, BackendCard, Clause, Condition, Option, Prior, at_most, hookimpl, one_of
)

def card(name="b", **more):
    plain = {"summary": "", "clauses": (Clause.when(),), "factory": "a:b"}
    return BackendCard(**{**plain, **more}, name=name)

def device(vendor="acme", device_type="cpu", arch="v1", **more):
    return Platform(vendor=vendor, device_type=device_type, arch=arch, **more)

"""
CARDS = "@hookimpl\ndef attnmux_cards():\n    "
WORKS = f"{CARDS}return [card()]\n"
PROBE = f"{WORKS}@hookimpl\ndef attnmux_platforms():\n    "
STAGES = {"load": "", "cards": CARDS, "platforms": PROBE}

RAISED = {
    "RuntimeError('no driver')": "RuntimeError: no driver",
    "SystemExit(3)": "SystemExit: 3",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "GeneratorExit('a panic')": "GeneratorExit: a panic",
    "StopIteration": "StopIteration",
    "MemoryError": "MemoryError",
    "RecursionError": "RecursionError",
    "type('Panic', (BaseException,), {})('of Rust')": "Panic: of Rust",
    "ValueError('x' * 10**7)": "ValueError: xxx",
    "ValueError('\\x1b[31mred\\x07')": "\\x1b[31mred\\x07",
    "ValueError('one\\ntwo')": "ValueError: one two",
    "type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})": "its message cannot be read",
    "type('Mute', (Exception,), {'__str__': lambda self: sys.exit()})": "its message cannot be",
}
RETURNED = {
    **{
        each: f"returned {each}" for each in ("None", "3", "True", "'text'", "b'bytes'", "{}", "()")
    },
    **{"[None]": "[None]", "['a']": "['a']", "[[]]": "[[]]", "object()": "<object obj"},
    "{card(): 1}": "{BackendCard(",
    "(card(), 1)": "returned (BackendCard(",
    "[card(), 1]": "returned [BackendCard(",
    "iter([])": "returned <list_iter",
    "itertools.repeat(card())": "returned repeat(",
    "(card() for _ in [1])": "returned <generator",
    "type('L', (list,), {})([card()])": "returned [BackendCard(",
    "[type('C', (BackendCard,), {})(name='b', summary='', clauses=(), factory='a:b')]": "d [C(",
    "[type(card())]": "returned [<class",
    "sys": "returned <module 'sys'",
    "hookimpl": "returned <pluggy._",
}
CARDS_REFUSED = {
    "card(aliases=('x\\x1b',))": "name: expected letters",
    "card(name='')": "name: expected letters",
    "card(clauses=3)": "clauses",
    "card(clauses=(Clause.when(),) * 100_000)": "a tuple of Clause, at most 1000",
    "card(contract='soon')": "contract: expected a range",
    "card(requires=('a b c',))": "requires: expected a PEP 508 requirement",
    "card(sources={'no_axis': 'text'})": "sources: expected axes of a clause",
    "card(priors=(Prior(rank=1, source=object()),))": "prior, source: expected text",
    "card(priors=(Prior(rank=True, source=''),))": "prior, rank",
    "card(priors=(Prior(rank=-10**40, source=''),))": "prior, rank",
    "card(nonsense=1)": "unexpected keyword argument 'nonsense'",
    "card(clauses=(Clause.when(page_size=one_of(-5, 0)),))": "clause, page_size",
    "card(clauses=(Clause.when(page_size=one_of(10**40)),))": "clause, page_size",
    "card(clauses=(Clause.when(page_size=one_of('16')),))": "clause, page_size",
    "card(clauses=(Clause.when(page_size=one_of(True)),))": "clause, page_size",
    "card(clauses=(Clause.when(head_dim=at_most(10**40)),))": "clause, head_dim",
    "card(clauses=(Clause.when(vendor=one_of(3)),))": "clause, vendor",
    "card(clauses=(Clause.when(page_size=type('Own', (Condition,), {})),))": "clause, page_size",
    "card(), card()": "two cards named b",
}
DEVICES_REFUSED = {
    "device('cpu', 'cpu', 'z80')": "attnmux-cpu reports devices of cpu",
    "device('nvidia', 'cuda', 'sm90')": "attnmux-nvidia reports devices of nvidia",
    "device('NVIDIA', 'cuda', 'sm90')": "attnmux-nvidia reports devices of nvidia",
    "device('')": "platform, vendor",
    "device(3)": "platform, vendor",
    "device(count=0)": "platform, count",
    "device(memory_bytes=-1)": "platform, memory_bytes",
    "device(version=[9, 0])": "platform, version",
    "device(features={'a'})": "platform, features",
    "card()": "not a list of Platform",
    "'sm90'": "not a list of Platform",
}
MODULES: dict[str, tuple[str, str, str]] = {
    "syntax": ("this is no Python", "load", "SyntaxError"),
    "absent": ("import absent_library", "load", "No module named 'absent_library'"),
    "recursion": ("def f(): f()\nf()", "load", "RecursionError"),
    "unknown_hook": (
        f"{CARDS}return []\n@hookimpl\ndef attnmux_crads(): pass",
        "load",
        "attnmux_crads is no hook",
    ),
    "argument": ("@hookimpl\ndef attnmux_cards(everything): return []", "load", "everything"),
    "unmarked": ("def attnmux_cards(): return []", "load", "is not marked with @hookimpl"),
    "number": ("@hookimpl\ndef attnmux_x(): pass\nattnmux_cards = 3", "load", "attnmux_x"),
    "wrapper": (
        "@hookimpl(wrapper=True)\ndef attnmux_cards():\n    yield\n    return 3",
        "cards",
        "returned 3",
    ),
    "wrapper_twice": (
        "@hookimpl(wrapper=True)\ndef attnmux_cards():\n    yield\n    yield",
        "cards",
        "RuntimeError",
    ),
    "wrapper_plain": (
        "@hookimpl(wrapper=True)\ndef attnmux_cards(): return []",
        "load",
        "generator",
    ),
    "async": ("@hookimpl\nasync def attnmux_cards(): return []", "cards", "returned <coroutine"),
    "generator": (f"{CARDS}yield card()", "cards", "returned <generator"),
    "getattr": ("def __getattr__(name): raise SystemExit(name)\n" + WORKS, "", ""),
    "replaced": ("sys.modules[__name__] = types.SimpleNamespace()", "load", "is no module"),
    "empty": ("", "", ""),
    "no_cards": (f"{CARDS}return []", "", ""),
    "no_devices": (f"{PROBE}return []", "", ""),
    "many": (f"{CARDS}return [card(f'b{{n}}') for n in range(200)]", "", ""),
    "print": ("print('spoilt')\n" + WORKS, "", ""),
    "print_in_hook": (f"{CARDS}print('spoilt')\n    return [card()]", "", ""),
    "print_in_probe": (f"{PROBE}print('spoilt')\n    return []", "", ""),
    "stdout": ("sys.stdout.write('spoilt')\n" + WORKS, "", ""),
    "no_stdout": ("sys.stdout = None\n" + WORKS, "", ""),
    "daemon": (
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n" + WORKS,
        "",
        "",
    ),
    "other_list": (
        "import plugin_keeps\n" + CARDS + "plugin_keeps.KEPT.clear()\n    return [card()]",
        "",
        "",
    ),
    "keeps": (f"KEPT = [card('kept')]\n{CARDS}return KEPT", "", ""),
}
ENDS: dict[str, tuple[str, str]] = {
    "exit_0": ("os._exit(0)", "its process ended with 0 after "),
    "exit_7": ("os._exit(7)", "its process ended with 7 after "),
    "c_exit": ("ctypes.CDLL(None).exit(0)", "its process ended with 0 after "),
    "segfault": ("ctypes.string_at(0)", "killed by SIGSEGV after "),
    "abort": ("os.abort()", "killed by SIGABRT after "),
    "group": ("os.kill(0, signal.SIGKILL)", "killed by SIGKILL after "),
    "unnamed": ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", "killed by signal "),
    "alarm": ("signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(60)", "killed by SIGALRM"),
    "loop": ("while True: pass", "no answer in 1 s"),
    "sleep": ("time.sleep(60)", "no answer in 1 s"),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)", "no answer in 1 s"),
    "gil": ("ctypes.PyDLL(None).sleep(60)", "no answer in 1 s"),
    "closed": ("os.closerange(0, 100); time.sleep(60)", "it closed the descriptors"),
    "deaf": ("signal.signal(15, signal.SIG_IGN); time.sleep(60)", "no answer in 1 s"),
}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(name, source, the stage at which it fails or "", what the row says)."""
    for stage, before in STAGES.items():
        for error, said in RAISED.items():
            yield f"{stage}_raise", f"{before}raise {error}", stage, said
    for stage in ("cards", "platforms"):
        for value, said in RETURNED.items():
            yield f"{stage}_return", f"{STAGES[stage]}return {value}", stage, said
    for value, said in CARDS_REFUSED.items():
        yield "card", f"{CARDS}return [{value}]", "cards", said
    for value, said in DEVICES_REFUSED.items():
        yield "device", f"{PROBE}return [{value}]", "platforms", said
    for name, row in MODULES.items():
        yield name, *row


TABLE = {
    f"{name}_{number}" if name not in MODULES else name: row
    for number, (name, *row) in enumerate(rows())
}


def install(
    folder: Path, plugin: str, source: str, distribution: str = "", value: str = ""
) -> Path:
    """A distribution that consists of one plugin module."""
    (folder / f"plugin_{plugin}.py").write_text(HEAD + source)
    distribution = distribution or f"dist-{plugin}"
    info = folder / f"{distribution.replace('-', '_')}-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(f"[attnmux]\n{plugin} = {value or f'plugin_{plugin}'}\n")
    return info


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Iterator[dict[str, Plugin]]:
    """All plugins of the table in one process, and one that works."""
    folder = tmp_path_factory.mktemp("odd")
    for name, (source, _, _) in {**TABLE, "fine": (WORKS, "", "")}.items():
        install(folder, name, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        manager.cache_clear()
        yield by_name(
            Plugins.load([f"dist-{name}" for name in (*TABLE, "fine")], settings=Settings())
        )
    manager.cache_clear()
    for name in (*TABLE, "fine"):
        sys.modules.pop(f"plugin_{name}", None)


def by_name(plugins: Plugins) -> dict[str, Plugin]:
    every = {plugin.name: plugin for plugin in plugins.loaded}
    for row in plugins.failures:
        point = EntryPoint(row.plugin, "", "")
        every[row.plugin] = Plugin(point, row.distribution, row.version, failures=(row,))
    return every


@pytest.mark.parametrize("name", TABLE)
def test_an_odd_plugin_is_a_row_at_most(found, name, capfd) -> None:
    _, stage, said = TABLE[name]
    plugin = found[name]
    if plugin.probes:
        plugin = manager().probe(plugin)
    assert [row.stage for row in plugin.failures] == [stage] * bool(stage)
    for row in plugin.failures:
        assert (row.distribution, row.version) == (f"dist-{name}", "0.3")
        assert said in row.error
        assert len(row.error) < 1100
        assert row.error.isprintable()
        assert row.traceback
    assert capfd.readouterr().out == ""


def test_the_others_lose_nothing(found) -> None:
    assert [card.name for card in found["fine"].cards] == ["b"]
    assert [card.name for card in found["keeps"].cards] == ["kept"]
    assert [card.name for card in found["other_list"].cards] == ["b"]
    assert len(found["many"].cards) == 200
    assert found.keys() == {*TABLE, "fine"}
    assert sys.stdout is not None


@pytest.fixture
def new(tmp_path, monkeypatch, fresh_plugins) -> Callable[..., Path]:
    """Installs a plugin."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *args, **given: install(tmp_path, *args, **given)


def loaded(*names: str, **lists: object) -> Plugins:
    return Plugins.load(list(names), **lists, settings=Settings())


@pytest.mark.turns(over="stage")
@pytest.mark.parametrize("stage", ["load", "cards", "platforms"])
def test_what_ends_or_stops_a_process_is_a_row_where_a_child_loads_it(new, tmp_path, stage) -> None:
    ends = ENDS if stage != "cards" else {"exit_7": ENDS["exit_7"]}
    plugins = []
    for name, (source, _) in {**ends, "good": ("pass", "")}.items():
        code = PROBE + "return [device()]" if name == "good" else STAGES[stage] + source
        new(name, code)
        plugins.append(Plugin(EntryPoint(name, f"plugin_{name}", "attnmux"), f"dist-{name}", "0.3"))
    *odd, good = probe(plugins, 3)
    for plugin, (_, said) in zip(odd, ends.values(), strict=True):
        (row,) = plugin.failures
        assert row.stage == ("platforms" if stage == "platforms" else "load")
        assert row.error.startswith(said.replace("in 1 s", "in 3 s"))
    assert [str(found) for found in good.platforms] == ["acme:v1,device=cpu"]
    assert good.seconds > 0
    assert not good.failures


def test_a_plugin_that_forks_answers_once(new) -> None:
    plugins = []
    for name, vendor in (("forks", "one"), ("good", "two")):
        new(name, "os.fork()\n" * (name == "forks") + PROBE + f"return [device('{vendor}')]")
        plugins.append(Plugin(EntryPoint(name, f"plugin_{name}", "attnmux"), f"dist-{name}"))
    assert [[each.vendor for each in plugin.platforms] for plugin in probe(plugins, 5)] == [
        ["one"],
        ["two"],
    ]


def test_a_child_that_does_not_start(new, monkeypatch) -> None:
    new("good", WORKS)
    plugin = Plugin(EntryPoint("good", "plugin_good", "attnmux"), "dist-good", "0.3")
    for executable, said in (
        ("/absent", "No such file"),
        ("/bin/false", "its process ended with 1 after "),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        ((row,),) = (each.failures for each in probe([plugin], 1))
        assert "no process could be started to load it: " in row.error
        assert said in row.error


def test_a_plugin_is_imported_once_in_a_process(new, tmp_path) -> None:
    trace = tmp_path / "trace"
    note = f"with open({str(trace)!r}, 'a') as file: file.write('.')\n"
    new("bad", f"{note}raise OSError")
    new("good", note + WORKS)
    for _ in range(3):
        plugins = loaded("dist-good", "dist-bad")
        assert [offer.address for offer in plugins.offers()] == ["good/b"]
        assert len(plugins.failures) == 1
    assert trace.read_text() == ".."


def test_a_plugin_that_is_not_admitted_is_not_imported(new, tmp_path) -> None:
    trace = tmp_path / "trace"
    new("bad", f"open({str(trace)!r}, 'w').close()\n")
    loaded("dist-good")
    loaded("dist-bad", deny=["bad"])
    assert not trace.exists()
    loaded("dist-bad")
    assert trace.exists()


def test_an_offer_tells_its_plugin(new) -> None:
    new("good", WORKS)
    (offer,) = loaded("dist-good").offers()
    assert (offer.card.name, offer.plugin, offer.address) == ("b", "good", "good/b")
    assert (offer.distribution, offer.version) == ("dist-good", "0.3")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("plugin_bad:value", "is no module but of type int"),
        ("plugin_bad:absent", "has no attribute 'absent'"),
        ("absent_module", "No module named 'absent_module'"),
        ("a b c", "Error: "),
    ],
)
def test_an_entry_point_that_is_no_module(new, value, said) -> None:
    new("bad", "value = 3", value=value)
    new("good", WORKS)
    plugins = loaded("dist-bad", "dist-good")
    assert [offer.address for offer in plugins.offers()] == ["good/b"]
    (failure,) = plugins.failures
    assert said in failure.error


def test_one_module_of_two_plugins(new) -> None:
    new("one", WORKS)
    new("two", WORKS, value="plugin_one")
    (failure,) = loaded("dist-one", "dist-two").failures
    assert failure.plugin == "two"


@pytest.mark.parametrize(
    ("file", "content", "loads"),
    [
        ("entry_points.txt", b"[attnmux]\nno equals sign\n", False),
        ("entry_points.txt", b"[attnmux]\nbad = \xff", False),
        ("entry_points.txt", None, True),
        ("METADATA", b"\xff\xfe", True),
        ("METADATA", b"", True),
        ("METADATA", None, True),
    ],
)
def test_damaged_metadata_of_one_plugin_leaves_the_others(
    new, tmp_path, monkeypatch, file, content, loads
) -> None:
    path = new("bad", WORKS) / file
    new("good", WORKS)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    monkeypatch.setattr(
        sys, "path", [str(tmp_path), *(p for p in sys.path if "-packages" not in p)]
    )
    plugins = Plugins.load(settings=Settings())
    assert {offer.plugin for offer in plugins.offers()} >= {"good"}
    rows = [row for row in plugins.failures if row.distribution == "dist-bad"]
    assert len(rows) == (not loads)


def test_one_plugin_name_in_two_distributions(new, tmp_path) -> None:
    new("same", WORKS, distribution="one")
    new("same", WORKS, distribution="two")
    plugins = loaded("one", "two")
    assert plugins.offers() == ()
    assert {failure.distribution for failure in plugins.failures} == {"one", "two"}
    assert all("belongs to one and two" in failure.error for failure in plugins.failures)
    assert len(loaded("one", "two", deny=["two"]).offers()) == 1


@pytest.mark.parametrize(
    ("allow", "deny", "names"),
    [
        (["dist-one"], [], ["one/b"]),
        (["one"], [], []),
        (["Dist.Two"], [], ["two/b"]),
        ([], [], []),
        (["dist-one", "dist-two"], ["two"], ["one/b"]),
        (["dist-one", "dist-two"], ["dist_one"], ["two/b"]),
    ],
)
def test_allow_and_deny(new, allow, deny, names) -> None:
    new("one", WORKS)
    new("two", WORKS)
    plugins = loaded(*allow, deny=deny)
    assert [offer.address for offer in plugins.offers()] == names
    assert not plugins.failures


@pytest.mark.parametrize("argument", ["allow", "deny"])
def test_a_bare_name_is_no_list_of_them(argument) -> None:
    with pytest.raises(InvalidInput, match=f"{argument}: expected several names, in a list, got"):
        Plugins.load(**{argument: "attnmux-cpu"})
