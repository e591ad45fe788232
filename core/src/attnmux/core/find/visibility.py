"""The devices that variables such as CUDA_VISIBLE_DEVICES leave visible."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

ID_PREFIXES = ("GPU-", "MIG-")


def visible_devices(
    text: str | None, devices: Sequence[T], ids: Callable[[T], Iterable[str]] = lambda _: ()
) -> list[T]:
    """The devices that a variable leaves visible, in its order, as torch.cuda counts them.

    text: the variable's value; None if it is not set. An entry is a number from 0, or the beginning
    of one device's id (GPU-…, MIG-…), and all entries are of the first one's kind. The first entry
    that is no device hides itself and all after it. A device that is named twice hides all.
    ids: the ids of one device; asked only if an entry is one.
    """
    if text is None:
        return list(devices)
    prefix = text[:4] if text.startswith(ID_PREFIXES) else ""
    places: list[int] = []
    for entry in text.split(","):
        place = _named(entry, prefix, devices, ids) if prefix else _numbered(entry)
        if place is None or place >= len(devices):
            break
        if place in places:
            return []
        places.append(place)
    return [devices[place] for place in places]


def _numbered(entry: str) -> int | None:
    """CUDA reads digits and ignores the rest, as strtoul does."""
    match = re.match(r"\s*\+?(\d+)", entry, re.ASCII)
    return int(match[1]) if match else None


def _named(
    entry: str, prefix: str, devices: Sequence[T], ids: Callable[[T], Iterable[str]]
) -> int | None:
    """The only device with an id that begins so."""
    if not entry.startswith(prefix):
        return None
    matching = [
        place
        for place, device in enumerate(devices)
        if any(name.startswith(entry.rstrip()) for name in ids(device))
    ]
    return matching[0] if len(matching) == 1 else None
