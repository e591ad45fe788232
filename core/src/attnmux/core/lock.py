"""Locks: the exact distributions that decisions may use, with the hashes of their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnmux.core.choosing.common.files import read_file, replacing
from attnmux.core.choosing.offer.card import BackendCard, Offer
from attnmux.core.choosing.offer.libraries import (
    canonical,
    distributions,
    parsed_requirement,
)
from attnmux.core.errors import InvalidInput, SettingsError, in_brief

FORMAT = 1
MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """Distributions by canonical name, each with its version and the SHA-256 of its RECORD, which
    lists the hash of every installed file. The hash is empty where there is no RECORD."""

    distributions: Mapping[str, tuple[str, str]]
    model: Mapping[str, str] = field(default_factory=dict)
    """`name` and `revision`, where a model was named."""

    @classmethod
    def of(cls, offers: Iterable[Offer], model: Mapping[str, str] | None = None) -> Lock:
        """Core, the plugins of the offers, and the installed libraries that their cards require."""
        names = {"attnmux-core"}
        for offer in offers:
            names |= {offer.distribution, *libraries(offer.card)}
        return cls(distributions=installed(names), model=model or {})

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Raises SettingsError for a file that cannot be read or holds no lock."""
        try:
            data = json.loads(read_file(str(path), MOST_BYTES))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
            rows = {
                canonical(name): (str(row["version"]), str(row["record"]))
                for name, row in data["distributions"].items()
            }
            model = {str(name): str(value) for name, value in data.get("model", {}).items()}
            if model and not {"name", "revision"} <= model.keys():
                raise ValueError("its model has no name or no revision")
            return cls(distributions=rows, model=model)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SettingsError(f"{path} is no lock that can be read: {in_brief(error)}") from error

    def write(self, path: Path) -> None:
        """Replace the file as a whole. Raises OSError."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "distributions": {
                name: {"version": version, "record": record}
                for name, (version, record) in sorted(self.distributions.items())
            },
        }
        if self.model:
            data["model"] = dict(self.model)
        with replacing(path) as file:
            file.write(f"{json.dumps(data, indent=2)}\n")

    def difference(self, names: Iterable[str]) -> str:
        """How the installed distributions of these names differ, in words; empty where they are as
        locked. One that is not installed differs only where it is locked."""
        here = installed(names)
        found = []
        for name in sorted(set(map(canonical, names))):
            (version, record), locked = here.get(name, ("", "")), self.distributions.get(name)
            if locked is None and name in here:
                found.append(f"{name} {version} is not in the lock")
            elif locked is not None and version != locked[0]:
                found.append(f"{name} is {version or 'not installed'}, locked at {locked[0]}")
            elif locked is not None and record != locked[1]:
                found.append(f"{name} {version} has other files than the locked ones")
        return "; ".join(found)

    def revision(self, model: str | None, revision: str | None) -> str | None:
        """The revision of a model that is named with `revision`, or without one: the locked one.

        Any model may be used where none is locked. Raises InvalidInput for another model and for
        another revision; None names the default model.
        """
        if not self.model:
            return revision
        locked = f"{self.model['name']}@{self.model['revision']}"
        given = model if revision is None else f"{model}@{revision}"
        if model != self.model["name"] or revision not in (None, self.model["revision"]):
            raise InvalidInput(
                "--model", got=given or "the default", expected=f"{locked}, as locked"
            )
        return self.model["revision"]


def libraries(card: BackendCard) -> set[str]:
    """The distributions that a card requires, all alternatives."""
    return {
        parsed_requirement(text).name
        for alternatives in card.requirements()
        for text in alternatives
    }


def installed(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The version and the hash of RECORD of each that is installed, by canonical name."""
    found = {}
    known = distributions()
    for name in map(canonical, names):
        if name in known:
            found[name] = (known[name].identity()[1], known[name].record_hash())
    return found
