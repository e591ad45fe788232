"""One plugin loaded and asked in a process of its own, which may hang, crash or exit."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.find.plugins import Plugins, find_entries, load_entries
from attnmux.core.choosing.judge.checking import install_hint, standing
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import BackendCard, Offer
from attnmux.core.choosing.offer.libraries import installed_version, parsed_requirement, within

LOWER_BOUNDS = (">=", ">", "~=", "==")


def main(request: str) -> None:
    """Answer `request` (JSON) in the file that it names, anew after each stage.

    What was answered before the plugin hung or crashed is kept. The process ends here, without
    waiting for threads that the plugin started.
    """
    asked = json.loads(request)
    answer = Path(asked["answer"])
    # Where it is when it crashes, and where it hangs, goes to stderr, which is a file
    faulthandler.enable()
    faulthandler.dump_traceback_later(asked["seconds"])
    told: dict[str, Any] = {}

    def tell(stage: str, **facts: object) -> None:
        told.update(facts, stage=stage)
        draft = answer.with_suffix(".draft")
        draft.write_text(json.dumps(told), encoding="utf-8")
        draft.replace(answer)

    tell("load")
    among, _ = find_entries(asked["allow"], asked["deny"])
    mine = [entry for entry in among if entry.identity == tuple(asked["identity"])]
    plugins = load_entries(mine, among=among)
    tell("cards", failures=_failures(plugins))
    allowed, denied = asked["backends"]
    policy = Policy(allow=None if allowed is None else tuple(allowed), deny=tuple(denied))
    backends = [_backend(offer, policy) for offer in plugins.offers()]
    tell("platforms", failures=_failures(plugins), backends=backends)
    platforms = _platforms(plugins)
    tell(
        "done",
        failures=_failures(plugins),
        platforms=[platform.to_dict() for platform in platforms],
    )
    sys.stderr.flush()
    os._exit(0)


def _failures(plugins: Plugins) -> list[dict[str, Any]]:
    return [asdict(failure) for failure in plugins.failures]


def _platforms(plugins: Plugins) -> list[Platform]:
    found: list[Platform] = []
    for plugin in plugins.loaded:
        try:
            found += plugins.platforms_of(plugin)
        except BaseException as error:
            plugins.record(plugin, error)
    return found


def _backend(offer: Offer, policy: Policy) -> dict[str, Any]:
    reasons = standing(offer, policy, installed_version)
    return {
        "name": offer.card.name,
        "address": offer.address,
        "status": offer.card.status,
        "vendors": _vendors(offer.card),
        "reasons": [asdict(reason) for reason in reasons],
        "libraries": libraries(offer.card, offer.distribution),
    }


def _vendors(card: BackendCard) -> list[str]:
    """Whose devices the card is for; empty where a clause admits more than it can list."""
    listed = [clause.vendor.examples() for clause in card.clauses]
    return sorted({str(name) for names in listed for name in names}) if all(listed) else []


def libraries(card: BackendCard, distribution: str) -> list[dict[str, str]]:
    """Each requirement of the card: wanted, installed, state, and the line that mends it.

    The state is that of the alternative which comes closest: "present", "too old", "too new",
    "missing". A requirement whose marker does not hold here is left out.
    """
    rows = []
    for alternatives in card.requirements():
        parsed = [parsed_requirement(text) for text in alternatives]
        here = [one for one in parsed if one.marker is None or one.marker.evaluate()]
        if len(here) < len(parsed):
            continue
        states = [(*_state(one), one) for one in here]
        order = ("present", "too old", "too new", "missing")
        state, version, closest = min(states, key=lambda row: order.index(row[0]))
        hint = "" if state == "present" else install_hint(card, distribution, alternatives[0])
        rows.append(
            {
                "wanted": " or ".join(alternatives),
                "installed": f"{closest.name} {version}".strip() if version else "",
                "state": state,
                "hint": hint,
            }
        )
    return rows


def _state(requirement: Requirement) -> tuple[str, str]:
    version = installed_version(requirement.name)
    if version is None:
        return "missing", ""
    if within(version, str(requirement.specifier)):
        return "present", version
    try:
        older = any(
            spec.operator in LOWER_BOUNDS
            and Version(version) < Version(spec.version.removesuffix(".*"))
            for spec in requirement.specifier
        )
    except InvalidVersion:
        older = True
    return ("too old" if older else "too new"), version
