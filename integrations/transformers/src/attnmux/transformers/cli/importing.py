"""Imports torch and transformers in less time: transformers finds only packages that are used.

Importing this module imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module, metadata
from threading import Event
from typing import Any

UNUSED = ("sklearn", "scipy")
"""transformers imports them where they are installed, with pandas, for losses and for assisted
generation, which nothing here calls: a second of imports."""
WAIT = 60.0
"""Seconds in which torch is imported, at most, for a device to be woken."""


@contextmanager
def quick_imports(has_torch: Event) -> Iterator[None]:
    """Import torch, and let the block import transformers in less time.

    has_torch: set once torch is imported or cannot be, for `wake`.
    """
    try:
        import_module("torch")
    finally:
        has_torch.set()
    with _without(UNUSED), _asked_late():
        utils = import_module("transformers.utils")
        yield
    # Image processors that need it are imported later
    utils.is_scipy_available.cache_clear()


def wake(has_torch: Event, device: str) -> None:
    """Make a first tensor on a device that torch names so, for which a driver takes tenths of a
    second: call it in another thread than the one that imports. Raises what torch raises."""
    if device != "cpu" and has_torch.wait(WAIT):
        sys.modules["torch"].zeros(1, device=device)


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """Hide packages that are not imported."""
    hidden: Any = dict.fromkeys(name for name in names if name not in sys.modules)
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextmanager
def _asked_late() -> Iterator[None]:
    """Let `metadata.packages_distributions` answer as `Packages`: transformers calls it at its
    import."""
    found = metadata.packages_distributions
    setattr(metadata, found.__name__, lambda: Packages(found))
    try:
        yield
    finally:
        setattr(metadata, found.__name__, found)


class Packages(Mapping[str, list[str]]):
    """`metadata.packages_distributions()`, which takes up to a second, made once it is needed: not
    for a package of a distribution with its name."""

    def __init__(self, find: Callable[[], Mapping[str, list[str]]]) -> None:
        self._find = find

    def __getitem__(self, package: str) -> list[str]:
        with suppress(metadata.PackageNotFoundError, KeyError):
            return [metadata.metadata(package)["Name"]]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return self._find()
