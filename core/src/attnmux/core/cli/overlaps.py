"""Installed distributions that own the same package: which files are there depends on the order of
installation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution

from attnmux.core.cards.card import BackendCard
from attnmux.core.facts.libraries import canonical, distributions, identity, release

INIT = "/__init__.py"


def overlapping(cards: Iterable[BackendCard]) -> Iterator[str]:
    """A line for each package that a library of the cards shares with another distribution."""
    libraries = {canonical(name) for card in cards for name in card.libraries()}
    owners: dict[str, dict[str, str]] = {}
    installed = distributions()
    for name, distribution in installed.items():
        for package, digest in _packages(distribution):
            owners.setdefault(package, {})[name] = digest
    for package, digests in sorted(owners.items()):
        # Namespaces that several distributions fill have one content.
        if len(set(digests.values())) < 2 or libraries.isdisjoint(digests):
            continue
        names = sorted(digests)
        versions = [release(name, identity(installed[name])[1]) for name in names]
        yield (
            f"{' and '.join(versions)} own one package, {package}, and overwrite each other's "
            f"files: pip uninstall {' '.join(names)}, then pip install the one that you need"
        )


def _packages(distribution: Distribution) -> Iterator[tuple[str, str]]:
    """Top-level packages, and the hash of each one's first file."""
    try:
        record = distribution.read_text("RECORD") or ""
    except (OSError, ValueError):
        return
    for line in record.splitlines():
        path, _, rest = line.partition(",")
        package, init, _ = path.partition(INIT)
        if init and path.endswith(INIT) and "/" not in package:
            yield package, rest.partition(",")[0]
