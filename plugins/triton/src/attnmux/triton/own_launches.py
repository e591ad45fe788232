"""Launches that were tuned on this machine, as entries of the tables."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from attnmux.core.choosing.launches import TunedLaunch, current_launches
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import InvalidInput, SettingsError
from attnmux.core.settings import Settings
from attnmux.triton.launch import Launches
from attnmux.triton.launch_types import PORTABLE, Entry, L, ShareLaunch, TileLaunch, tuned_fields

ADDRESS = "triton/triton"
SUBJECT = ("kind", "k_dim", "v_dim", "rows", "page")
"""What a tuned launch says of the layers that it is for."""


def own_launches(platform: Platform) -> Launches:
    """Those of this device and of what is installed now. What cannot be read is warned of."""
    try:
        path = Settings.load().launches_file()
    except SettingsError as error:
        warnings.warn(f"launches that were tuned here are left out: {error}", stacklevel=2)
        return Launches()
    records = current_launches(path, ADDRESS, platform)
    problems = [*records.problems]
    launches = entries_of(records.found, platform.arch, problems)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return launches


def entries_of(tuned: Iterable[TunedLaunch], arch: str, problems: list[str]) -> Launches:
    """problems: where what is none of the kernels' launches is noted, and left out."""
    tiles: list[Entry[TileLaunch]] = []
    shares: list[Entry[ShareLaunch]] = []
    for each in tuned:
        try:
            if each.subject.get("kind") == "tiles":
                tiles.append(_entry(each, arch, TileLaunch))
            else:
                shares.append(_entry(each, arch, ShareLaunch))
        except InvalidInput as error:
            problems.append(f"a tuned launch is left out: {error}")
    return Launches(own_tiles=tuple(tiles), own_shares=tuple(shares))


def _entry(tuned: TunedLaunch, arch: str, kind: type[L]) -> Entry[L]:
    subject = dict(tuned.subject)
    values: dict[str, Any] = dict(tuned.values)
    numbers = [subject.get(name) for name in SUBJECT[1:]]
    named = "tiles" if kind is TileLaunch else "shares"
    if subject.pop("kind", None) != named or not all(type(n) is int and n > 0 for n in numbers):
        raise InvalidInput("launch, subject", came=dict(tuned.subject), expected=f"{SUBJECT}")
    known = tuned_fields(kind)
    sizes = {name: value for name, value in values.items() if name != "kernel"}
    is_ours = values.get("kernel", PORTABLE) == PORTABLE and sizes.keys() == known
    if not is_ours or not all(type(n) is int and n > 0 for n in sizes.values()):
        raise InvalidInput("launch, values", came=values, expected=f"numbers: {sorted(known)}")
    k_dim, v_dim, rows, page = (int(n) for n in numbers if n is not None)
    return Entry(
        arch=arch,
        dims=(k_dim, v_dim),
        least_rows=rows,
        page=page,
        launch=kind(**values),
        measured=f"{tuned.device.name or tuned.device.arch}, {tuned.date:%Y-%m-%d}",
    )
