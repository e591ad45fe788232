"""Loading plugins that work, and every way in which one can be broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnmux.core import InvalidInput
from attnmux.core.facts import libraries
from attnmux.core.find import plugins as module
from attnmux.core.find.plugins import read_plugins

GOOD = """
from attnmux.core.plugin import BackendCard
from attnmux.core.plugin import hookimpl

@hookimpl
def attnmux_cards():
    return [BackendCard(name={name!r}, summary="", clauses=(), factory="a:b")]
"""
HOOK = "from attnmux.core.find.hooks import hookimpl\n@hookimpl\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution that consists of one plugin module; nothing else is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    everything = libraries.distributions

    def ours() -> dict[str, libraries.Distribution]:
        return {n: d for n, d in everything().items() if d.folder.startswith(str(tmp_path))}

    for user in (libraries, module):
        monkeypatch.setattr(user, "distributions", ours)

    def make(plugin: str, source: str, distribution: str = "", value: str = "") -> None:
        distribution = distribution or f"dist-{plugin}"
        module = f"{distribution.replace('-', '_')}_module"
        (Path(tmp_path) / f"{module}.py").write_text(source)
        info = Path(tmp_path) / f"{distribution.replace('-', '_')}-0.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.3\n"
        )
        (info / "entry_points.txt").write_text(f"[attnmux]\n{plugin} = {value or module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return make


def only_failure(loaded):
    (failure,) = loaded.failures
    return failure


def test_a_plugin_and_its_cards(install) -> None:
    install("good", GOOD.format(name="a"))
    loaded = read_plugins()
    (offer,) = loaded.offers()
    assert (offer.card.name, offer.plugin, offer.address) == ("a", "good", "good/a")
    assert (offer.distribution, offer.version) == ("dist-good", "0.3")
    assert loaded.failures == ()


@pytest.mark.parametrize(
    ("source", "stage", "said"),
    [
        ("raise RuntimeError('no driver')", "load", "RuntimeError: no driver"),
        ("raise SystemExit(3)", "load", "SystemExit: 3"),
        ("import sys; sys.exit('bye')", "load", "SystemExit: bye"),
        ("class Panic(BaseException): pass\nraise Panic('of Rust')", "load", "Panic: of Rust"),
        (
            "class Mute(Exception):\n def __str__(self): raise OSError\nraise Mute",
            "load",
            "Mute: its message cannot be read",
        ),
        ("import absent_library", "load", "No module named 'absent_library'"),
        ("this is no Python", "load", "SyntaxError"),
        (f"{HOOK}def attnmux_crads(): return []", "load", "attnmux_crads"),
        (f"{HOOK}def attnmux_cards(everything): return []", "load", "everything"),
        (f"{HOOK}def attnmux_cards(): raise OSError('gone')", "cards", "OSError: gone"),
        (f"{HOOK}def attnmux_cards(): raise SystemExit(1)", "cards", "SystemExit: 1"),
        (f"{HOOK}def attnmux_cards(): raise GeneratorExit", "cards", "GeneratorExit"),
        ("def attnmux_cards(): return []", "load", "attnmux_cards is not marked with @hookimpl"),
        (f"{HOOK}def attnmux_cards(): return 3", "cards", "attnmux_cards returned 3"),
        (f"{HOOK}def attnmux_cards(): [1]", "cards", "attnmux_cards returned None"),
        (f"{HOOK}def attnmux_cards(): return ['a']", "cards", "not a list of BackendCard"),
        (
            f"{GOOD.format(name='a').replace('return [', 'return 2 * [')}",
            "cards",
            "two cards named a",
        ),
    ],
)
def test_a_broken_plugin_is_a_row_and_the_others_go_on(install, source, stage, said) -> None:
    install("bad", source)
    install("good", GOOD.format(name="a"))
    install("zzz", GOOD.format(name="z"))
    loaded = read_plugins()
    assert [offer.address for offer in loaded.offers()] == ["good/a", "zzz/z"]
    failure = only_failure(loaded)
    assert (failure.plugin, failure.distribution, failure.version) == ("bad", "dist-bad", "0.3")
    assert failure.stage == stage
    assert said in failure.error
    assert "\n" not in failure.error
    assert "Traceback" in failure.traceback
    assert "dist-bad 0.3" in str(failure)


def test_what_a_hook_returned_is_told_in_short(install) -> None:
    source = GOOD.format(name="a").replace("return [", "return (").replace('b")]', 'b"), 1)')
    install("bad", source)
    loaded = read_plugins()
    assert loaded.offers() == ()
    error = only_failure(loaded).error
    assert "attnmux_cards returned (BackendCard(" in error
    assert len(error) < 120


def test_an_entry_point_that_is_no_module(install) -> None:
    install("bad", "value = 3", value="dist_bad_module:value")
    assert "is no module but of type int" in only_failure(read_plugins()).error


@pytest.mark.parametrize(
    ("file", "content", "loads"),
    [
        ("entry_points.txt", b"[attnmux]\nno equals sign\n", False),
        ("entry_points.txt", b"[attnmux]\nbad = \xff", False),
        ("METADATA", b"\xff\xfe", True),
        ("METADATA", b"", True),
    ],
)
def test_damaged_metadata_of_one_plugin_leaves_the_others(
    install, tmp_path, file, content, loads
) -> None:
    install("bad", GOOD.format(name="b"))
    install("good", GOOD.format(name="a"))
    (tmp_path / "dist_bad-0.3.dist-info" / file).write_bytes(content)
    loaded = read_plugins()
    assert [offer.address for offer in loaded.offers()] == ["bad/b"] * loads + ["good/a"]
    assert [row.distribution for row in loaded.failures] == ([] if loads else ["dist-bad"])


def test_damaged_metadata_of_somebody_else_is_not_our_business(install, tmp_path) -> None:
    install("good", GOOD.format(name="a"))
    install("other", "")
    (tmp_path / "dist_other-0.3.dist-info/entry_points.txt").write_text("[other]\nno equals\n")
    loaded = read_plugins()
    assert [offer.address for offer in loaded.offers()] == ["good/a"]
    assert not loaded.failures


def test_asking_twice_asks_the_plugin_once(install) -> None:
    install("bad", f"{HOOK}def attnmux_cards(): raise OSError('gone')")
    loaded = read_plugins()
    assert loaded.offers() == loaded.offers() == ()
    only_failure(loaded)


def test_one_plugin_name_in_two_distributions(install) -> None:
    install("same", GOOD.format(name="a"), distribution="one")
    install("same", GOOD.format(name="b"), distribution="two")
    loaded = read_plugins()
    assert loaded.offers() == ()
    assert {failure.distribution for failure in loaded.failures} == {"one", "two"}
    assert all("belongs to one and two" in failure.error for failure in loaded.failures)
    assert [offer.card.name for offer in read_plugins(deny=["two"]).offers()] == ["a"]


@pytest.mark.parametrize(
    ("allow", "deny", "names"),
    [
        (None, [], ["a", "b"]),
        (["dist-one"], [], ["a"]),
        (["one"], [], []),
        (["Dist.Two"], [], ["b"]),
        ([], [], []),
        (None, ["two"], ["a"]),
        (["dist-one", "dist-two"], ["dist_one"], ["b"]),
    ],
)
def test_allow_and_deny(install, allow, deny, names) -> None:
    install("one", GOOD.format(name="a"))
    install("two", GOOD.format(name="b"))
    loaded = read_plugins(allow, deny)
    assert [offer.card.name for offer in loaded.offers()] == names
    assert not loaded.failures


@pytest.mark.parametrize("argument", ["allow", "deny"])
def test_a_bare_name_is_no_list_of_them(argument) -> None:
    with pytest.raises(InvalidInput, match=f"{argument}: expected several names, in a list, got"):
        read_plugins(**{argument: "attnmux-cpu"})


def test_what_is_denied_is_not_imported(install, tmp_path) -> None:
    install("bad", f"import pathlib; pathlib.Path({str(tmp_path / 'trace')!r}).touch()")
    read_plugins(deny=["bad"])
    assert not (tmp_path / "trace").exists()
    read_plugins()
    assert (tmp_path / "trace").exists()
