"""The versions of SGLang that this package was tried with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from attnmux.core import installed_version


class SglangVersionWarning(UserWarning):
    """SGLang in a version that this package was not tried with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A distribution, the range of its versions that has the interfaces used here, and the version
    that the tests install."""

    distribution: str
    versions: str
    """A specifier, such as ">=0.5.23,<0.5.24"."""
    pinned: str


TRIED = (Tried(distribution="sglang", versions=">=0.5.23,<0.5.24", pinned="0.5.23"),)


def check_version() -> bool:
    """Whether the installed SGLang has the interfaces that this package was written for.

    Warns, and returns False, where it has not.
    """
    for each in TRIED:
        found = installed_version(each.distribution)
        if found and SpecifierSet(each.versions).contains(found, prereleases=True):
            return True
    tried = ", ".join(f"{each.distribution}{each.versions}" for each in TRIED)
    found = installed_version("sglang")
    got = "an unknown version of SGLang" if found is None else f"sglang {found}"
    warnings.warn(
        f"attnmux-sglang was tried with {tried} and found {got}: --attention-backend attnmux is "
        f"not registered; install a tried version, or an attnmux-sglang for this one",
        SglangVersionWarning,
        stacklevel=2,
    )
    return False
