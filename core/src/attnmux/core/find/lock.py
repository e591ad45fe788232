"""Locks: the exact distributions that decisions may use, with the hashes of their files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnmux.core.cards.card import Offer
from attnmux.core.facts.errors import InvalidInput, SettingsError, in_brief
from attnmux.core.facts.files import read_file, replacing
from attnmux.core.facts.libraries import canonical, distributions

FORMAT = 1
CONTENT = "sha256:"
"""Begins the revision of a folder."""
MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """Distributions by canonical name, each with its version and the SHA-256 of its RECORD, which
    lists the hash of every installed file. The hash is empty where there is no RECORD."""

    distributions: Mapping[str, tuple[str, str]]
    model: Mapping[str, str] = field(default_factory=dict)
    """`name` and `revision`, where a model was named. The revision of a folder is its
    `content_hash`."""

    @classmethod
    def of(cls, offers: Iterable[Offer], model: Mapping[str, str] | None = None) -> Lock:
        """Core, the plugins of the offers, and the installed libraries that their cards require."""
        names = {"attnmux-core"}
        for offer in offers:
            names |= {offer.distribution, *offer.card.libraries()}
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
            return cls(distributions=rows, model=model)
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{path} holds no lock: {in_brief(error)}"
            raise SettingsError(f"{why}; `attnmux lock` writes one") from error

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

    def model_revision(self, source: str, revision: str | None) -> str | None:
        """The revision to open a model at. A lock without a model permits every one.

        source: a folder or a hub id. revision: the user's; None takes the locked one.
        Raises InvalidInput for another model or revision, and for a folder with other content.
        """
        if not self.model:
            return revision
        name, locked = self.model.get("name", ""), self.model.get("revision", "")
        folder = Path(source).expanduser()
        if folder.is_dir():
            here = content_hash(folder)
            if here != locked:
                expected = f"the content of the locked {name}, {locked}"
                raise InvalidInput("model", got=f"{source}, {here}", expected=expected)
            return revision
        if source != name or locked.startswith(CONTENT):
            raise InvalidInput("model", got=source, expected=f"the locked {name} at {locked}")
        if revision not in (None, locked):
            raise InvalidInput("revision", got=revision, expected=f"the locked {locked}, or none")
        return locked


def content_hash(folder: Path) -> str:
    """ "sha256:" and a hash of the names and the content of all files of a folder, links followed.
    Files and folders whose name begins with a dot are left out. Raises InvalidInput for a file that
    cannot be read."""
    total = hashlib.sha256()
    try:
        for path in sorted(_files(folder)):
            with open(path, "rb") as file:
                each = hashlib.sha256()
                while block := file.read(1 << 20):
                    each.update(block)
            name = path.relative_to(folder).as_posix()
            total.update(json.dumps([name, each.hexdigest()]).encode())
    except OSError as error:
        raise InvalidInput("model", got=in_brief(error), expected="files to read") from error
    return f"{CONTENT}{total.hexdigest()}"


def _files(folder: Path) -> Iterator[Path]:
    """Raises OSError for a folder that cannot be listed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif entry.is_file():  # a pipe would hold up the reader
                yield Path(entry.path)


def installed(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The version and the hash of RECORD of each that is installed, by canonical name."""
    found = {}
    known = distributions()
    for name in map(canonical, names):
        if name in known:
            found[name] = (known[name].identity()[1], known[name].record_hash())
    return found
