"""Installed distributions, and the ranges of their versions."""

from __future__ import annotations

import pytest

from attnmux.core.facts.libraries import (
    distributions,
    identity,
    parsed_requirement,
    printable,
    within,
)
from attnmux.core.plugin import installed_version


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.14.1+cu130", ">=2.11", True),
        ("2.11rc1", ">=2.11", False),
        ("2.12.dev3", ">=2.11", True),
        ("nightly", ">=2.11", False),
        ("nightly", "", True),
    ],
)
def test_a_range_contains_pre_releases_and_no_unreadable_version(
    version, specifier, expected
) -> None:
    assert within(version, specifier) is expected


@pytest.mark.parametrize("text", ["", "-a", "a-", "a b", "a; nonsense", "a[", "3.1 >"])
def test_what_is_no_requirement(text) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed_requirement(text)


def test_control_characters_are_escaped() -> None:
    assert printable("plain é") == "plain é"
    assert printable("\x1b[2J\n\x9b") == "\\x1b[2J\\n\\x9b"


def test_the_first_on_the_path_hides_the_others(tmp_path, monkeypatch) -> None:
    for folder, name, version in (
        ("one", "Acme_Lib-1.0.dist-info", "1.0"),
        ("two", "acme.lib-2.0.dist-info", "2.0"),
        ("two", "old.egg-info", "3"),
        ("two", "damaged-1.dist-info", "\xff"),
    ):
        file = tmp_path / folder / name / ("PKG-INFO" if name[0] == "o" else "METADATA")
        file.parent.mkdir(parents=True)
        text = f"Name: {name.partition('-')[0]}\nVersion: {version}\n"
        file.write_bytes(text.encode("latin-1"))
    path = [str(tmp_path / name) for name in ("absent", "one", "two")]
    monkeypatch.setattr("sys.path", path)
    assert installed_version("acme-lib") == "1.0"
    assert installed_version("old") == "3"
    assert installed_version("absent") is None
    assert installed_version("damaged") == "unknown"
    assert identity(distributions()["acme-lib"]) == ("Acme_Lib", "1.0")
    assert {"acme-lib", "old-egg"} <= distributions().keys()
