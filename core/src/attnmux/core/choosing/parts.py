"""Which parts a request demands, and where they are found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint
from types import MappingProxyType

from attnmux.core.choosing.part import Part
from attnmux.core.facts.errors import AttnmuxError
from attnmux.core.facts.libraries import entry_points, identity
from attnmux.core.facts.request import Request
from attnmux.core.find.plugins import is_admitted
from attnmux.core.find.settings import Settings

GROUP = "attnmux.parts"
"""The entry-point group; an entry point's name is the part's, its value an instance of `Part`."""

DISTRIBUTION = "attnmux-parts"
"""It has the parts that fields of a request demand."""

OWN_DEMANDS: Mapping[str, Callable[[Request], bool]] = MappingProxyType(
    {
        "chosen_pages": lambda request: request.sparse is not None,
        "draft_trees": lambda request: request.has_trees,
        "expanded_prompts": lambda request: request.chunked_prefix,
        "linear_layers": lambda request: bool(request.linear_layers),
        "picked_blocks": lambda request: request.index_block_size is not None,
        "two_batches": lambda request: request.two_batches,
    }
)
"""By part, whether the fields of a request demand it."""

DISPENSABLE: Mapping[str, bool] = MappingProxyType({"draft_trees": True, "expanded_prompts": False})
"""Optional parts: other backends may serve the whole request, with the masks of trees or absorbed.
The value says whether the part may serve requests that they refuse."""

Parts = Callable[[str], "Part | None"]
"""A part's name → the part, None if no installed package brings it."""


def demanded(request: Request) -> tuple[str, ...]:
    """The parts that a request demands, in the order of their names."""
    names = [name for name, demands in OWN_DEMANDS.items() if demands(request)]
    return tuple(sorted({*names, *(name for name, _ in request.parts)}))


def installed_part(name: str) -> Part | None:
    """The part of that name of the installed packages that the configuration admits.

    It is looked for once for each `sys.path`, and imported on first use. Raises AttnmuxError for a
    part that cannot be imported, something else in its place, and a name that two packages use;
    SettingsError as `Settings.load` does.
    """
    return _found(name, tuple(sys.path))


@cache
def _found(name: str, path: tuple[str, ...]) -> Part | None:
    points = [point for point in entry_points(GROUP)[0] if point.name == name]
    if not points:
        return None
    allow, deny = Settings.load().plugin_filter()
    # Parts have no kernels of their own: a list of the admitted plugins does not mean them
    allow = None if allow is None else (*allow, DISTRIBUTION)
    owners = {identity(point.dist)[0]: point for point in points}
    admitted = {owner: point for owner, point in owners.items() if is_admitted(owner, allow, deny)}
    if len(admitted) > 1:
        both = " and ".join(sorted(admitted))
        raise AttnmuxError(f"the part {name} belongs to {both}: deny one (deny_plugins)")
    return next(map(_loaded, admitted.values()), None)


def _loaded(point: EntryPoint) -> Part:
    try:
        part: object = point.load()
    except Exception as error:  # a plugin's module may raise anything
        raise AttnmuxError(
            f"the part {point.name} cannot be imported: {AttnmuxError.in_brief(error)}"
        ) from error
    if not isinstance(part, Part):
        raise AttnmuxError(f"{point.value} is no Part but of type {type(part).__name__}")
    return part


def absence(name: str) -> str:
    """A sentence that says how to install a part that this process lacks."""
    if name in OWN_DEMANDS:
        hint = f"pip install {DISTRIBUTION}"
        return f"the part {name} of {DISTRIBUTION} is not installed or not admitted: {hint}"
    offered = f"expected a package that offers it in {GROUP}"
    return f"the part {name} is not installed, or not admitted: {offered}"
