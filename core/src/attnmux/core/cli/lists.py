"""`attnmux backends` and `attnmux platforms`: installed backends, and this machine's devices."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click

from attnmux.core.choosing.common.plain import plain, plain_fields
from attnmux.core.choosing.common.verdict import Reason
from attnmux.core.choosing.find.devices import pick_platform
from attnmux.core.choosing.judge.checking import standing
from attnmux.core.choosing.offer.card import Offer, Option
from attnmux.core.choosing.offer.clause import Clause
from attnmux.core.choosing.offer.conditions import ANY, NONE
from attnmux.core.choosing.offer.libraries import installed_version
from attnmux.core.choosing.offer.proof import proven
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.errors import AmbiguousPlatform, InvalidInput

PLAIN = (
    *("name", "status", "summary", "factory", "tuner", "contract", "extra"),
    *("needs_cpu_seq_lens", "virtual_requests", "fp8_products"),
)
LISTED = ("aliases", "companions", "excludes", "tree_masks")


@click.command()
@common_options
@pass_run
def backends(run: Run, as_json: bool) -> None:
    """List the backends of the installed plugins, and what each lacks to run here."""
    settings = run.settings()
    plugins = run.plugins(settings)
    policy = settings.policy()
    rows = [(offer, standing(offer, policy, installed_version)) for offer in plugins.offers()]
    if as_json:
        echo_json(
            {
                "backends": [_described(offer, reasons) for offer, reasons in rows],
                "failures": plain(plugins.failures),
                "warnings": run.warnings,
            }
        )
        return
    from attnmux.core.cli.render import render_backends  # noqa: PLC0415  # rich is slow to import

    render_backends(rows)


def _described(offer: Offer, reasons: list[Reason]) -> dict[str, Any]:
    """A card as JSON. A clause lists only the axes that it limits or opens."""
    card = offer.card
    return {
        **{name: getattr(card, name) for name in PLAIN},
        **{name: list(getattr(card, name)) for name in LISTED},
        "plugin": offer.plugin,
        "distribution": offer.distribution,
        "version": offer.version,
        "requires": [list(alternatives) for alternatives in card.requirements()],
        "options": [_option(option) for option in card.options],
        "builds": [plain_fields(build) for build in card.builds],
        "clauses": [_conditions(clause) for clause in card.clauses],
        "sources": dict(card.sources),
        "priors": [
            {"rank": prior.rank, "when": _conditions(prior.when), "source": prior.source}
            for prior in card.priors
        ],
        "error_bounds": plain(card.error_bounds),
        "proof": proven(card.verified_on, card.clauses).word,
        "verified_on": plain(card.verified_on),
        "reasons": plain(reasons),
    }


def _option(option: Option) -> dict[str, Any]:
    return {**plain_fields(option), "type": option.type.__name__}


def _conditions(clause: Clause) -> dict[str, str]:
    """Each axis, except limits that admit anything and features that admit nothing."""
    return {
        item.name: str(condition)
        for item in fields(Clause)
        if (condition := getattr(clause, item.name)) not in (NONE,)
        and not (condition == ANY and item.default == ANY)
    }


@click.command()
@common_options
@pass_run
def platforms(run: Run, as_json: bool) -> None:
    """List the devices of this machine, and those that no plugin serves."""
    settings = run.settings()
    detection = run.detect(run.plugins(settings))
    try:
        picked = str(pick_platform(detection, settings.platform))
    except (AmbiguousPlatform, InvalidInput) as error:
        run.warn(str(error))
        picked = None
    if as_json:
        echo_json(
            {
                "platforms": plain(detection.platforms),
                "picked": picked,
                "unserved": plain(detection.unserved),
                "failures": plain(detection.failures),
                "warnings": run.warnings,
            }
        )
        return
    from attnmux.core.cli.render import render_platforms  # noqa: PLC0415  # rich is slow to import

    render_platforms(detection.platforms, picked)
