"""`attnmux lock`, and what `--locked` refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.core import InvalidInput, Lock
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.lock import content_hash

SOURCE = """
from attnmux.core.plugin import Clause, BackendCard, hookimpl

@hookimpl
def attnmux_cards():
    return [
        BackendCard(name="plain", summary="", clauses=(Clause.when(),), factory="a:b"),
        BackendCard(
            name="needy", summary="", clauses=(Clause.when(),), factory="a:b",
            requires=("acme-lib>=1",),
        ),
    ]
"""


def installed(folder: Path, name: str, version: str = "1.0", record: str = "a,,\n") -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(record)
    if name == "acme-plugin":
        (info / "entry_points.txt").write_text("[attnmux]\nacme = acme_locked_plugin\n")


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "acme_locked_plugin.py").write_text(SOURCE)
    installed(tmp_path, "acme-plugin")
    installed(tmp_path, "acme-lib")
    monkeypatch.setattr(sys, "path", [*sys.path[:1], str(tmp_path), *sys.path[1:]])
    monkeypatch.setenv("ATTNMUX_ALLOW_PLUGINS", "acme-plugin")
    return lambda *args: CliRunner().invoke(verbs, args, prog_name="attnmux")


def offered(result) -> set[str]:
    assert result.exit_code == 0, result.output
    return {row["name"] for row in json.loads(result.stdout)["backends"]}


LOCKED = ("backends", "--json", "--locked", "attnmux.lock")


def test_what_is_as_locked_is_used(call, tmp_path) -> None:
    result = call("lock", "--model", "org/model@abc123")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "attnmux.lock").read_text())
    assert set(data["distributions"]) == {"attnmux-core", "acme-plugin", "acme-lib"}
    assert data["distributions"]["acme-lib"]["version"] == "1.0"
    assert len(data["distributions"]["acme-lib"]["record"]) == 64
    assert data["model"] == {"name": "org/model", "revision": "abc123"}
    assert offered(call(*LOCKED)) == {"plain", "needy"}


@pytest.mark.parametrize(
    ("name", "version", "record", "left", "said"),
    [
        ("acme-plugin", "1.1", "a,,\n", set(), "acme-plugin is 1.1, locked at 1.0"),
        ("acme-plugin", "1.0", "b,,\n", set(), "acme-plugin 1.0 has other files than the locked"),
        ("acme-lib", "2.0", "a,,\n", {"plain"}, "acme-lib is 2.0, locked at 1.0"),
        ("acme-lib", "1.0", "b,,\n", {"plain"}, "acme-lib 1.0 has other files than the locked"),
    ],
)
def test_what_differs_is_refused(call, tmp_path, name, version, record, left, said) -> None:
    assert call("lock").exit_code == 0
    installed(tmp_path, name, version, record)
    (tmp_path / "acme_locked_plugin.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n{SOURCE}"
    )
    result = call(*LOCKED)
    assert offered(result) == left
    assert said in result.stderr
    assert (tmp_path / "ran").exists() is bool(left)
    assert offered(call("backends", "--json")) == {"plain", "needy"}


def test_what_is_not_in_the_lock_is_refused(call, tmp_path, monkeypatch) -> None:
    assert call("lock").exit_code == 0
    file = tmp_path / "attnmux.lock"
    data = json.loads(file.read_text())
    del data["distributions"]["acme-plugin"]
    file.write_text(json.dumps(data))
    monkeypatch.setenv("ATTNMUX_LOCKED", str(file))
    result = call("backends", "--json")
    assert offered(result) == set()
    assert "acme-plugin 1.0 is not in the lock" in result.stderr
    data["distributions"]["attnmux-core"]["version"] = "0.0.1"
    file.write_text(json.dumps(data))
    result = call("select")
    assert result.exit_code == 2
    assert "attnmux-core is" in result.stderr


def test_a_branch_may_move(call) -> None:
    commit = "0123456789" * 4
    assert "can move" in call("lock", "--model", "org/model@main").stderr
    assert "can move" not in call("lock", "--model", f"org/model@{commit}").stderr


def test_the_hash_of_a_folder_covers_names_and_content(tmp_path) -> None:
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "part/weights").write_bytes(b"1")
    hashes = [content_hash(folder)]
    (folder / ".cache").mkdir()
    (folder / ".cache/when").write_text("now")
    assert content_hash(folder) == hashes[0]
    for change in (
        lambda: (folder / "part/weights").write_bytes(b"2"),
        lambda: (folder / "part/weights").rename(folder / "weights"),
        lambda: (folder / "more").write_text(""),
    ):
        change()
        hashes.append(content_hash(folder))
    assert len(set(hashes)) == 4
    (folder / "gone").symlink_to("nowhere")
    assert content_hash(folder) == hashes[-1]


@pytest.mark.parametrize(
    ("source", "revision", "expected"),
    [
        ("org/model", None, "abc"),
        ("org/model", "abc", "abc"),
        ("org/model", "def", "the locked abc"),
        ("org/other", "abc", "the locked org/model at abc"),
        (".", None, "the content of the locked org/model, abc"),
    ],
)
def test_another_model_is_refused(source, revision, expected) -> None:
    assert Lock(distributions={}).model_revision(source, revision) == revision
    lock = Lock(distributions={}, model={"name": "org/model", "revision": "abc"})
    if expected == "abc":
        assert lock.model_revision(source, revision) == "abc"
    else:
        with pytest.raises(InvalidInput, match=expected):
            lock.model_revision(source, revision)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', "[" * 100_000])
def test_a_lock_that_cannot_be_read(call, tmp_path, text) -> None:
    (tmp_path / "attnmux.lock").write_text(text)
    result = call(*LOCKED)
    assert result.exit_code == 2
    assert "holds no lock: " in result.stderr
    result = call("backends", "--locked", "absent")
    assert result.exit_code == 2
    assert "absent cannot be read: No such file or directory" in result.stderr


def test_a_link_is_replaced_and_not_followed(call, tmp_path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "attnmux.lock").symlink_to(tmp_path / "other")
    assert call("lock").exit_code == 0
    assert (tmp_path / "other").read_text() == "kept"


@pytest.mark.parametrize("args", [("--model", "org/model"), ("--output", "absent/attnmux.lock")])
def test_bad_arguments(call, args) -> None:
    assert call("lock", *args).exit_code == 2
