"""A hash of all that a backend runs on: the installed distributions, and the files of its plugin.

RECORD has the hashes of the files that an installer wrote. It says nothing of a file that was
edited afterwards, nor of the sources of an editable install.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnmux.core.facts.libraries import canonical, distributions, identity

if TYPE_CHECKING:
    from attnmux.core.cards.card import BackendCard

SUITE = ("attnmux-core", "attnmux-parts", "attnmux-testing")
OTHERS = (*SUITE, "torch", "triton")
"""Further distributions on which an outcome depends, next to a plugin and its libraries."""


def digest(card: BackendCard, distribution: str, *facts: object) -> str:
    """Changes with the facts, with the files of the plugin, core, parts and the suite, and with the
    versions and RECORDs of the libraries.

    distribution: the plugin's; empty for a backend that no plugin offers.
    """
    known = distributions()
    names = sorted({distribution, *card.libraries(), *OTHERS})
    files = set(_of_module(card.factory.partition(":")[0]))
    for name in {canonical(distribution), *SUITE} & known.keys():
        files.update(_of_distribution(known[name]))
    parts = [*facts, installed(names), sorted((path, *_stamp(path)) for path in files)]
    return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def installed(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The version and the hash of RECORD of each distribution that is installed, by canonical
    name."""
    known = distributions()
    return {
        name: (identity(known[name])[1], record_hash(known[name]))
        for name in map(canonical, names)
        if name in known
    }


def record_hash(distribution: Distribution) -> str:
    """The SHA-256 of RECORD, which lists the hash of every installed file; empty without it."""
    try:
        content = distribution.read_text("RECORD")
    except (OSError, ValueError):
        return ""
    return sha256(content.encode()).hexdigest() if content else ""


def _of_distribution(distribution: Distribution) -> Iterator[str]:
    """The files that RECORD lists, those of the modules of entry points, and all in the folder of
    an editable install."""
    with suppress(OSError, ValueError):
        for file in distribution.files or ():
            if _is_source(str(file)):
                yield os.path.normpath(str(distribution.locate_file(file)))
    with suppress(OSError, ValueError, TypeError):
        for point in distribution.entry_points:
            yield from _of_module(point.value.partition(":")[0].strip())
    with suppress(OSError, ValueError, AttributeError):
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
        if direct.get("dir_info", {}).get("editable"):
            from urllib.parse import urlparse  # noqa: PLC0415  # slow to import
            from urllib.request import url2pathname  # noqa: PLC0415  # as above

            yield from _below(url2pathname(urlparse(direct["url"]).path))


def _of_module(name: str) -> Iterator[str]:
    """The file of a module, or all files of the package that it is in. Nothing is imported."""
    top, *below = name.split(".")
    spec: ModuleSpec | None = None
    with suppress(ImportError, ValueError):
        spec = find_spec(top)
    # A package without an `__init__`, as `attnmux`, is of several distributions
    while spec is not None and spec.origin is None and below:
        top = f"{top}.{below.pop(0)}"
        spec = PathFinder.find_spec(top, [*(spec.submodule_search_locations or ())])
    if spec is None or spec.origin is None:
        return
    if spec.submodule_search_locations is None:
        yield spec.origin
    for folder in spec.submodule_search_locations or ():
        yield from _below(folder)


def _below(folder: str) -> Iterator[str]:
    """The files below a folder. Hidden folders, caches and virtual environments are left out."""
    for path, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and _is_source(name)]
        yield from (os.path.join(path, file) for file in files if _is_source(file))


def _is_source(path: str) -> bool:
    """Whether the interpreter did not write it."""
    return "__pycache__" not in path and not path.endswith(".pyc")


def _stamp(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_size
