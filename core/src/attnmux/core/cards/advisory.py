"""A finding about the kernels of a library: which releases give wrong numbers, fault or hang."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from attnmux.core.cards.clause import Clause
from attnmux.core.cards.conditions import (
    Condition,
    anything_but,
    at_least,
    at_most,
    between,
    includes,
    multiple_of,
    one_of,
    runtimes,
    versions,
)
from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import Check, read_fields
from attnmux.core.facts.files import Files
from attnmux.core.facts.frozen import FrozenMapping, Plain
from attnmux.core.facts.libraries import (
    Requirement,
    canonical,
    parsed_requirement,
    specifiers,
    within,
)

MOST_BYTES = 100_000
MADE_BY: Mapping[str, Callable[..., Condition]] = {
    made.__name__: made
    for made in (
        *(one_of, anything_but, at_least, at_most, between, multiple_of),
        *(includes, versions, runtimes),
    )
}
"""The functions of conditions that a file may name."""
FIRST = (">=", "~=", "==")
LAST = ("<", "<=", "!=")
ABOUT_MACHINE = ("vendor", "arch", "version", "features", "runtime")

Text = Annotated[str, Check("text of a character or more", bool)]


def _range(name: str, value: Any) -> str:  # noqa: ANN401  # reads any value
    expected = "a PEP 440 range, such as >=1.2,<1.4"
    if not isinstance(value, str):
        raise refusal(name, value, expected)
    try:
        specifiers(value)
    except ValueError:
        raise refusal(name, value, expected) from None
    return value


def _unaffected(name: str, value: Any) -> Mapping[str, str]:  # noqa: ANN401  # reads any value
    if not isinstance(value, Mapping) or not all(isinstance(why, str) for why in value.values()):
        raise refusal(name, value, "a mapping from backends to reasons")
    return FrozenMapping(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advisory(Plain):
    """A finding: in some releases, calls in a clause give wrong numbers, fault, hang or are slow.

    It holds for every backend whose card requires the library, unless `unaffected` names it.

    Raises InvalidInput for fields of other types, a range that cannot be parsed and a clause
    without limits.
    """

    id: Text
    library: Text
    """The distribution."""
    affected: Annotated[str, _range]
    """A PEP 440 range; empty: every release."""
    effect: Literal["wrong", "fault", "hang", "slow"]
    """A slow finding refuses nothing: the decision notes it."""
    summary: Text
    source: Annotated[str, Check("an address", lambda text: text.startswith("https://"))]
    clause: Clause
    """A call falls into it if it makes a demand on each of `limits`, and all are met."""
    limits: Annotated[tuple[str, ...], Check("one axis or more", bool)]
    """The axes that the clause names."""
    fixed: str = ""
    """The first release without it; empty if the source names none."""
    unaffected: Annotated[Mapping[str, str], _unaffected] = field(default_factory=FrozenMapping)
    """By backend, as its card's name: why its calls do not reach the fault."""
    case: str = ""
    """Pattern of the suite's cases that show it, for `attnmux verify BACKEND -k CASE`."""

    def __post_init__(self) -> None:
        read_fields(self, f"advisory {self.id!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Advisory:
        """The fields as a file has them. A clause is a table by axis: a value, a list of values, or
        the name of a condition's function with its arguments, {at_least = 2}.

        Raises InvalidInput for other fields or values.
        """
        owner = f"advisory {data.get('id', '')!r}"
        rest, clause = dict(data), data.get("clause")
        if not isinstance(clause, Mapping):
            raise refusal(f"{owner}, clause", clause, "a table of axes")
        rest["limits"] = tuple(clause)
        conditions = {
            axis: _condition(f"{owner}, clause, {axis}", limit) for axis, limit in clause.items()
        }
        try:
            rest["clause"] = Clause.when(**conditions)
            return cls(**rest)
        except TypeError:
            known = [*cls.__slots__, *Clause.__slots__]
            unknown = [name for name in (*data, *clause) if name not in known]
            missing = [name for name in REQUIRED if name not in data]
            got = ", ".join([*unknown, *(f"no {name}" for name in missing)])
            expected = f"{', '.join(cls.__slots__)}; axes of a clause"
            raise InvalidInput(owner, got=got, expected=expected) from None

    @classmethod
    def in_folder(cls, folder: Path) -> list[Advisory]:
        """A plugin's answer to `attnmux_advisories`: the folder's TOML files, in the order of their
        names. Raises InvalidInput for a file that is no advisory or is not named after its id."""
        if sys.version_info >= (3, 11):
            import tomllib  # noqa: PLC0415  # only for findings
        else:
            import tomli as tomllib  # noqa: PLC0415  # the same, older than the standard library's
        found = []
        for file in sorted(folder.glob("*.toml")):
            try:
                data = tomllib.loads(Files.read(str(file), MOST_BYTES).decode())
            except ValueError as error:
                raise refusal(file.name, str(error), "TOML") from error
            try:
                found.append(cls.from_dict(data))
            except InvalidInput as error:
                argument = f"{file.name}, {error.argument}"
                raise InvalidInput(argument, got=error.got, expected=error.expected) from None
            if found[-1].id != file.stem:
                raise refusal(f"{file.name}, id", found[-1].id, file.stem)
        return found

    def affects(self, version: str | None) -> bool:
        """Whether a release of the library is affected; none is if its version is unknown ("") or
        it is not installed (None)."""
        return bool(version) and within(str(version), self.affected)

    def is_about(self, library: str) -> bool:
        """Whether a distribution is the library."""
        return canonical(library) == canonical(self.library)

    def remedy(self, requirements: Iterable[Iterable[str]], others: Iterable[Advisory] = ()) -> str:
        """The pip line of a release that neither this finding nor one of `others` is about; empty
        if none is known. requirements: those of a card, which takes the release."""
        texts = (text for alternatives in requirements for text in alternatives)
        own = [one for one in map(parsed_requirement, texts) if self.is_about(one.name)]
        same = {each.id: each for each in (self, *others) if each.is_about(self.library)}
        for version in filter(None, (self.fixed, *(v for one in own for v in _firsts(one)))):
            taken = all(within(version, one.specifier) for one in own)
            if taken and not any(each.affects(version) for each in same.values()):
                bounds = [bound for one in own for bound in specifiers(one.specifier)]
                ends = [str(bound) for bound in bounds if bound.operator in LAST]
                later = version == self.fixed and len(same) == 1
                wanted = ",".join([f">={version}", *ends]) if later else f"=={version}"
                return f"pip install '{self.library}{wanted}'"
        return ""

    def shape(self) -> str:
        """The clause in words, without the machine: "kind mla, num_q_heads 64"."""
        return ", ".join(self._said(name) for name in self.limits if name not in ABOUT_MACHINE)

    def machine(self) -> str:
        """The machine of the clause, in words; "any" if it names none."""
        said = [self._said(name) for name in self.limits if name in ABOUT_MACHINE]
        return ", ".join(said) or "any"

    def _said(self, name: str) -> str:
        return f"{name} {getattr(self.clause, name)}"


REQUIRED = ("id", "library", "affected", "effect", "summary", "source", "clause")


def _firsts(requirement: Requirement) -> Iterator[str]:
    for bound in specifiers(requirement.specifier):
        if bound.operator in FIRST:
            yield bound.version.removesuffix(".*")


def _condition(where: str, value: Any) -> Condition:  # noqa: ANN401  # reads any value
    if isinstance(value, Mapping):
        (name, given), *more = value.items() or [("", None)]
        if more or name not in MADE_BY:
            raise refusal(where, dict(value), f"one of {', '.join(MADE_BY)}, with its arguments")
        try:
            return MADE_BY[name](*(given if isinstance(given, list) else [given]))
        except TypeError:
            raise refusal(where, given, f"the arguments of {name}") from None
    return one_of(*(value if isinstance(value, list) else [value]))
