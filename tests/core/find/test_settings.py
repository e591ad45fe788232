from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from attnmux.core import Settings, SettingsError
from attnmux.core.find import settings as module


def load(folder: Path, **environ: str) -> Settings:
    return Settings.load(environ=environ, directory=folder)


def test_nothing_configured(tmp_path) -> None:
    assert load(tmp_path) == Settings()


def test_every_setting_can_be_read() -> None:
    assert {item.name for item in fields(Settings)} == {*module.READERS, "sources"}


def test_the_environment(tmp_path) -> None:
    settings = load(
        tmp_path,
        ATTNMUX_BACKEND="triton",
        ATTNMUX_DENY_PLUGINS="a, b",
        ATTNMUX_NO_PLUGINS="1",
        ATTNMUX_DEBUG="",
        HOME="/",
    )
    assert (settings.backend, settings.deny_plugins) == ("triton", ("a", "b"))
    assert (settings.no_plugins, settings.debug) == (True, False)
    assert settings.sources["backend"] == "ATTNMUX_BACKEND"
    assert settings.plugin_filter() == ((), ("a", "b"))


FILE = """
backend = "triton"
prefer_backends = ["a", "b"]
[options.triton]
splits = 4
"""


def test_the_nearest_file_upwards(tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_text(FILE)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    settings = load(inner)
    assert (settings.backend, settings.prefer_backends) == ("triton", ("a", "b"))
    assert settings.options == {"triton": {"splits": 4}}
    assert settings.sources["backend"] == str(tmp_path / "attnmux.toml")
    (tmp_path / "a" / "pyproject.toml").write_text('[tool.attnmux]\nbackend = "fa3"\n')
    assert load(inner).backend == "fa3"
    assert load(inner).prefer_backends == ()
    (inner / "pyproject.toml").write_text('[project]\nname = "attnmux-user"\n')
    assert load(inner).backend == "fa3"


@pytest.mark.parametrize(
    "table",
    [
        '[tool]\nattnmux.backend = "fa3"',
        'tool = {"attnmux" = {backend = "fa3"}}',
        "[tool.'attnmux' ]\nbackend = \"fa3\"",
    ],
)
def test_another_way_to_write_the_table(tmp_path, table) -> None:
    (tmp_path / "pyproject.toml").write_text(table)
    assert load(tmp_path).backend == "fa3"


def test_the_environment_wins(tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_text(FILE)
    settings = load(tmp_path, ATTNMUX_BACKEND="fa3")
    assert settings.backend == "fa3"
    assert settings.prefer_backends == ("a", "b")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ATTNMUX_DEBUG": "perhaps"}, "ATTNMUX_DEBUG: expected true or false, got 'perhaps'"),
        ({"ATTNMUX_BACKND": "x"}, "did you mean backend?"),
        ({"ATTNMUX_ZZZ": "x"}, "known: platform, backend"),
        ({"ATTNMUX_OPTIONS": "x"}, "expected BACKEND.OPTION=VALUE"),
        ({"ATTNMUX_DENY_PLUGINS": "a,,b"}, "expected a name"),
    ],
)
def test_a_bad_variable_is_named(tmp_path, environ, said) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, **environ)
    assert said in str(caught.value)
    assert next(iter(environ)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backend =", "is not TOML"),
        ("backend = 3", "backend: expected a name, got 3"),
        ('allow_plugins = { a = "b" }', "expected a list of names"),
        ("debug = 1", "expected true or false"),
        ("options = 3", "a table for each backend"),
        ("[options.a]\nx = [1]", "a table for each backend"),
        ('backnd = "x"', "did you mean backend?"),
        ('[tool.attnmux]\nbackend = "x"', "without [tool.attnmux], a table of pyproject.toml"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, said) -> None:
    (tmp_path / "attnmux.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(tmp_path)
    assert said in str(caught.value)
    assert str(tmp_path / "attnmux.toml") in str(caught.value)


def test_bytes_that_are_no_text(tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="cannot be read"):
        load(tmp_path)


def test_a_tool_table_that_is_none(tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\nattnmux = 3\n")
    with pytest.raises(SettingsError, match="is no table"):
        load(tmp_path)


def test_a_policy_of_what_was_configured(tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_text(f'deny_backends = ["x"]\n{FILE}')
    policy = load(tmp_path, ATTNMUX_DECODE_BACKEND="fa3").policy()
    assert (policy.backend, policy.decode_backend) == ("triton", "fa3")
    assert (policy.deny, policy.prefer) == (("x",), ("a", "b"))
    assert policy.options == {"triton": {"splits": 4}}
    assert policy.origins == {"backend": "config", "decode_backend": "env"}


def test_the_user_wins_and_a_base_name_wins_over_configured_phases(tmp_path) -> None:
    settings = load(tmp_path, ATTNMUX_DECODE_BACKEND="fa3", ATTNMUX_BACKEND="triton")
    policy = settings.policy(backend="flashinfer", allow_coercion=True, mm_backend=None)
    assert (policy.backend, policy.decode_backend) == ("flashinfer", None)
    assert policy.allow_coercion
    assert policy.origins == {"backend": "user"}
    policy = settings.policy(prefill_backend="x")
    assert (policy.backend, policy.prefill_backend, policy.decode_backend) == ("triton", "x", "fa3")


def test_a_base_name_of_the_environment_wins_over_the_phases_of_the_file(tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_text('prefill_backend = "x"\nmm_backend = "y"\n')
    policy = load(tmp_path, ATTNMUX_BACKEND="fa3").policy()
    assert (policy.backend, policy.prefill_backend, policy.mm_backend) == ("fa3", None, "y")
    assert policy.origins == {"backend": "env", "mm_backend": "config"}
    policy = load(tmp_path, ATTNMUX_PREFILL_BACKEND="fa3").policy()
    assert (policy.backend, policy.prefill_backend) == (None, "fa3")


def test_options_of_the_user_are_laid_over_those_of_the_file(tmp_path) -> None:
    (tmp_path / "attnmux.toml").write_text(FILE + "mode = 'x'\n")
    policy = load(tmp_path).policy(options={"triton": {"splits": "8"}, "a": {"b": "1"}})
    assert policy.options == {"triton": {"splits": "8", "mode": "x"}, "a": {"b": "1"}}


def test_without_a_home_directory_nothing_is_kept_that_is_not_named(tmp_path, monkeypatch) -> None:
    def homeless(*_: object, **__: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("platformdirs.user_cache_path", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    settings = load(tmp_path)
    assert (settings.measurements_file(), settings.launches_file()) == (None, None)
    settings = load(tmp_path, ATTNMUX_LAUNCHES="~nobody/launches.json")
    with pytest.raises(SettingsError, match=r"ATTNMUX_LAUNCHES.*~nobody.*whole path"):
        settings.launches_file()


def _deep(path: Path) -> None:
    path.write_text(f"debug = {'[' * 100_000}")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "it is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
        (lambda path: path.symlink_to(path), "cannot be read"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.write_text("#" * 2_000_000), "it has more than"),
        (_deep, "is not TOML"),
        (lambda path: path.write_text(f"debug = {'9' * 10_000}"), "is not TOML"),
        (lambda path: path.write_text("platform = " + "9" * 1000), "expected a name"),
    ],
)
def test_an_odd_file_is_a_sentence(tmp_path, make, said) -> None:
    make(tmp_path / "attnmux.toml")
    with pytest.raises(SettingsError, match=said) as caught:
        Settings.load(environ={}, directory=tmp_path)
    assert str(tmp_path / "attnmux.toml") in str(caught.value)


def test_a_tool_that_is_no_table(tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text('tool = "x" # attnmux =\n')
    with pytest.raises(SettingsError, match="tool is no table"):
        Settings.load(environ={}, directory=tmp_path)


def test_a_deleted_working_directory(tmp_path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(SettingsError, match="change to another"):
        Settings.load(environ={})


@pytest.mark.parametrize("name", ["attnmux.toml", "pyproject.toml"])
def test_a_file_that_another_user_could_write_is_refused(tmp_path, monkeypatch, name) -> None:
    inner = tmp_path / "shared" / "inner"
    inner.mkdir(parents=True)
    path = tmp_path / "shared" / name
    path.write_text('[tool.attnmux]\nbackend = "x"\n' if name[0] == "p" else 'backend = "x"\n')

    def load(**environ: str) -> str | None:
        return Settings.load(environ=environ, directory=inner).backend

    assert load() == "x"
    for place, mode in ((path, 0o666), (path, 0o620), (path.parent, 0o777), (path.parent, 0o730)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(SettingsError, match=f"as {place} can be written by a group") as caught:
            load()
        assert f"ATTNMUX_CONFIG={path}" in str(caught.value)
        assert load(ATTNMUX_CONFIG=str(path)) == "x"
        place.chmod(before)
    path.parent.chmod(0o1777)
    assert load() == "x"
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid:
        with pytest.raises(SettingsError, match="belongs to another user"):
            load()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a link to another user")
def test_a_link_of_another_user_is_refused(tmp_path) -> None:
    target, path = tmp_path / "target", tmp_path / "attnmux.toml"
    target.write_text('backend = "x"')
    path.symlink_to(target)
    assert Settings.load(environ={}, directory=tmp_path).backend == "x"
    os.lchown(path, 12345, -1)
    with pytest.raises(SettingsError, match=f"{path} belongs to another user"):
        Settings.load(environ={}, directory=tmp_path)
    assert Settings.load(environ={"ATTNMUX_CONFIG": str(path)}).backend == "x"


def test_a_file_without_our_settings_may_be_shared(tmp_path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("[tool.other]\n")
    path.chmod(0o666)
    assert Settings.load(environ={}, directory=tmp_path) == Settings()


def test_a_named_file_must_hold_settings(tmp_path) -> None:
    path = tmp_path / "pyproject.toml"
    for problem in ("does not exist", "holds no settings"):
        with pytest.raises(SettingsError, match=problem):
            Settings.load(environ={"ATTNMUX_CONFIG": str(path)})
        path.touch()


@pytest.mark.parametrize(("text", "seconds"), [("0.5", 0.5), ("20", 20.0)])
def test_seconds_for_plugins(text, seconds) -> None:
    assert Settings.load(environ={"ATTNMUX_PLUGIN_SECONDS": text}).plugin_seconds == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "4000"])
def test_seconds_that_no_plugin_can_have(text) -> None:
    with pytest.raises(SettingsError, match="a number of seconds"):
        Settings.load(environ={"ATTNMUX_PLUGIN_SECONDS": text})


def test_options_are_a_variable_too() -> None:
    said = {"ATTNMUX_OPTIONS": "triton.num_kv_splits=8,nvidia/fa3.num_splits=2,triton.x=a=b"}
    options = Settings.load(environ=said).options
    expected = {"triton": {"num_kv_splits": "8", "x": "a=b"}, "nvidia/fa3": {"num_splits": "2"}}
    assert {name: dict(values) for name, values in options.items()} == expected
    with pytest.raises(SettingsError, match=r"ATTNMUX_OPTIONS: expected BACKEND.OPTION=VALUE"):
        Settings.load(environ={"ATTNMUX_OPTIONS": "triton"})
