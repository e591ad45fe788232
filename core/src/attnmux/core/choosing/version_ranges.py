"""Version ranges and requirements, each read once: parsing dominates a check."""

from __future__ import annotations

from functools import cache

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion


@cache
def specifiers(text: str) -> SpecifierSet:
    """A version range in PEP 440's words. Raises packaging's InvalidSpecifier."""
    return SpecifierSet(text)


@cache
def within(version: str, specifier: str) -> bool:
    """Whether a version, a pre-release too, is in a range; one that cannot be read is in none."""
    try:
        return specifiers(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return not specifier


@cache
def satisfies(requirements: tuple[str, ...], stated: str) -> bool:
    """Whether what is stated, "name 1.2", meets any of the requirements, "name>=1"."""
    name, _, version = stated.partition(" ")
    parsed = (parsed_requirement(requirement) for requirement in requirements)
    return bool(version) and any(
        one.name == name and within(version, str(one.specifier)) for one in parsed
    )


@cache
def parsed_requirement(text: str) -> Requirement:
    """A PEP 508 requirement. Raises packaging's InvalidRequirement."""
    return Requirement(text)
