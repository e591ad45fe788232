"""The forms of `attnmux select`'s answer that are more than the decision itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.verified import doubt
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.choosing.tell.outcomes import outcomes, outcomes_of_refusal
from attnmux.core.cli import select
from attnmux.core.cli.run import Run, echo_json
from attnmux.core.cli.select_origins import Asked, stated
from attnmux.core.errors import NoBackend

__all__ = ["Asked", "show"]


def show(
    run: Run,
    asked: Asked,
    answer: Decision | NoBackend,
    *,
    as_json: bool,
    explain: bool,
    every: bool,
) -> None:
    """Print the answer as a table, or its explanation as tables or in JSON.

    Where nothing fits, stderr has the message: without `explain` there is nothing more to print.
    """
    decision = None if isinstance(answer, NoBackend) else answer
    if isinstance(answer, NoBackend):
        told = outcomes_of_refusal(asked.request, answer.candidates, asked.offers, asked.policy)
    else:
        told = outcomes(answer, asked.offers, asked.policy)
    values = stated(asked, decision) if explain else []
    doubts = [] if decision is None else doubted(decision, asked.offers)
    if as_json:
        explanation = {
            "outcomes": [outcome.to_dict() for outcome in told],
            "values": [asdict(value) for value in values],
            "doubts": doubts,
        }
        plain = select.answered(answer, asked.request, asked.device)
        echo_json({**plain, "warnings": run.warnings, "explanation": explanation})
        return
    from attnmux.core.cli import render  # noqa: PLC0415  # rich, off the JSON path

    if decision is None:
        if explain:
            render.render_refusal(told, values, len(asked.request.phases), every=every)
    elif explain:
        render.render_explanation(decision, told, values, doubts, every=every)
    else:
        render.render_decision(decision, told)


def doubted(decision: Decision, offers: Sequence[Offer]) -> list[str]:
    """A line for each chosen backend that was never run on hardware of the platform's kind.

    A planned one never ran at all, which is said beside its name.
    """
    chosen = {(choice.plugin, choice.backend) for choice in decision.phases.values()}
    found = (
        (offer.card.name, doubt(offer.card.verified_on, decision.platform))
        for offer in offers
        if (offer.plugin, offer.card.name) in chosen and offer.card.status == "available"
    )
    return [f"{name}: {said}" for name, said in found if said]
