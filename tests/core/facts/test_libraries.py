"""Versions and requirements are read as `packaging` reads them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Theirs
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from attnmux.core.facts import libraries
from attnmux.core.facts.libraries import (
    Distribution,
    canonical,
    parsed_requirement,
    printable,
    within,
)
from attnmux.core.plugin import installed_version

RELEASES = st.lists(st.sampled_from(["0", "1", "2", "10", "00"]), min_size=1, max_size=4).map(
    ".".join
)
VERSIONS = st.builds(
    "".join,
    st.tuples(RELEASES, st.sampled_from(["", "", "rc1", ".dev3", ".post1", "+cpu", "+cu128.1"])),
)
BOUNDS = st.builds(
    "{}{}".format, st.sampled_from([">=", "<=", "==", "!=", ">", "<", "~="]), VERSIONS
)


@given(version=VERSIONS, specifier=st.lists(BOUNDS, max_size=3).map(", ".join))
def test_a_range_contains_what_packaging_says(version, specifier) -> None:
    try:
        expected = SpecifierSet(specifier).contains(version, prereleases=True)
    except ValueError:
        with pytest.raises(ValueError, match="specifier"):
            within(version, specifier)
    else:
        assert within(version, specifier) is expected


@pytest.mark.parametrize(
    "text",
    [
        "torch",
        "torch>=2.11",
        " torch >= 2.11 , < 3 ",
        "flash-attn-4>=4.0.0b18",
        "a.b_c==1.*",
        "a[x,y]>=1",
        "a>=1; python_version < '3'",
        "a~=1.2",
        "a (>=1)",
        "a @ https://example.org/a.whl",
    ],
)
def test_a_requirement_is_what_packaging_says(text) -> None:
    ours, theirs = parsed_requirement(text), Theirs(text)
    assert ours.name == theirs.name
    assert SpecifierSet(ours.specifier) == theirs.specifier
    assert str(ours.marker) == str(theirs.marker)


@pytest.mark.parametrize("text", ["", "-a", "a-", "a b", "a; nonsense", "a[", "3.1 >"])
def test_what_is_no_requirement(text) -> None:
    with pytest.raises(InvalidRequirement):
        Theirs(text)
    with pytest.raises(ValueError, match=r"."):
        libraries.check_range(parsed_requirement(text).specifier)


@given(name=st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True))
def test_names_are_normalised_as_packaging_does(name) -> None:
    assert canonical(name) == canonicalize_name(name)


def test_control_characters_are_escaped() -> None:
    assert printable("plain é") == "plain é"
    assert printable("\x1b[2J\n\x9b") == "\\x1b[2J\\n\\x9b"


def test_the_first_on_the_path_hides_the_others(tmp_path, monkeypatch) -> None:
    for folder, name, version in (
        ("one", "Acme_Lib-1.0.dist-info", "1.0"),
        ("two", "acme.lib-2.0.dist-info", "2.0"),
        ("two", "old.egg-info", "3"),
    ):
        file = tmp_path / folder / name / ("PKG-INFO" if name[0] == "o" else "METADATA")
        file.parent.mkdir(parents=True)
        file.write_text(f"Name: {name}\nVersion: {version}\n")
    path = [str(tmp_path / name) for name in ("absent", "one", "two")]
    monkeypatch.setattr("sys.path", path)
    assert installed_version("acme-lib") == "1.0"
    assert installed_version("old") == "3"
    assert installed_version("absent") is None
    (tmp_path / "one/Acme_Lib-1.0.dist-info/METADATA").write_bytes(b"\xff\n")
    assert installed_version("acme-lib") == "unknown"


def test_a_metadata_file_that_is_a_pipe(tmp_path) -> None:
    os.mkfifo(tmp_path / "METADATA")
    assert Distribution(str(tmp_path)).identity() == ("", "")
