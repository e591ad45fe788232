"""The explanation of `attnmux select`: every candidate's outcome, and who set each value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnmux.core.cards.card import Offer
from attnmux.core.cards.named import read_options
from attnmux.core.choosing.decision import Decision
from attnmux.core.cli.asking import Asked
from attnmux.core.cli.here import lacking_compiler
from attnmux.core.cli.outcomes import Outcome, outcomes, outcomes_of_refusal
from attnmux.core.facts.errors import NoBackend
from attnmux.core.facts.frozen import Plain, plain, plain_fields
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.questions import Question
from attnmux.core.facts.request import Request
from attnmux.core.find.settings import PREFIX
from attnmux.core.measured.unverified import doubtful

COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated(Plain):
    """A value in force, and who set it."""

    name: str
    value: str
    origin: str
    """user, env, config, model, platform or default."""
    source: str = ""
    """The variable, the file, or how a default was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figured(Plain):
    """The figures that a phase's ranks follow."""

    phase: str
    source: str
    """Source of the figures: who measured, where and on which shape."""
    times: Mapping[str, Mapping[str, float]]
    """By workload and backend (`plugin/name`), microseconds of one layer's call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The reasons of an answer."""

    outcomes: tuple[Outcome, ...]
    values: tuple[Stated, ...]
    doubts: tuple[str, ...]
    """A line for each chosen backend that was never run on hardware of the platform's kind, and
    one for those that lack a C++ compiler."""
    others: tuple[tuple[str, tuple[Outcome, ...]], ...] = ()
    """The outcomes for each group of other layers, which the text describes."""
    figures: tuple[Figured, ...] = ()
    """Figures of the first group's layers; empty if priors decided."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **plain_fields(self),
            "others": [
                {"layers": one, "outcomes": plain(group_outcomes)}
                for one, group_outcomes in self.others
            ],
        }

    def of(self, offers: Iterable[Offer]) -> Explanation:
        """The explanation of some backends alone."""
        addresses = {offer.address for offer in offers}

        def kept(told: Iterable[Outcome]) -> tuple[Outcome, ...]:
            return tuple(
                warning for warning in told if f"{warning.plugin}/{warning.backend}" in addresses
            )

        others = tuple((layers, kept(told)) for layers, told in self.others)
        return replace(self, outcomes=kept(self.outcomes), others=others)


def explained(asked: Asked, *, model: str, tp: int, skip: str | None = None) -> Explanation:
    """Explain a decision or a refusal. model: the one whose config.json was read for `tp` ranks.
    skip: its layers that keep the model's dtype."""
    answer = asked.answer
    request = asked.request if isinstance(answer, NoBackend) else answer.request
    values = [_platform(asked), *_request(asked, request, model, tp), *_policy(asked)]
    if skip is not None:
        values.append(_stated("kv_dtype_skip", skip, "user", COMMAND_LINE))
    if isinstance(answer, NoBackend):
        chosen_outcomes = outcomes_of_refusal(
            asked.request, asked.device, answer.candidates, asked.offers, asked.policy
        )
        return Explanation(outcomes=chosen_outcomes, values=tuple(values), doubts=())
    chosen_outcomes, *others = (
        outcomes(group, asked.offers, asked.policy) for group in answer.groups
    )
    doubts = [
        f"{doubt.offer.card.name}: {doubt.reason}" for doubt in doubtful(answer, asked.offers)
    ]
    return Explanation(
        outcomes=chosen_outcomes,
        values=(*values, *_options(asked, answer)),
        doubts=(
            *dict.fromkeys(doubts),
            *lacking_compiler((offer.card for offer in asked.offers), asked.device),
        ),
        others=tuple(zip(map(str, answer.request.other_layers), others, strict=True)),
        figures=tuple(_figures(asked, answer)) if asked.is_measured else (),
    )


def _figures(asked: Asked, decision: Decision) -> Iterator[Figured]:
    from attnmux.core.measured.evidence import evidence_of  # noqa: PLC0415  # few choices are measured

    evidence = evidence_of(asked.measurements, asked.device, asked.offers, asked.policy)
    for phase in decision.phases:
        question = Question(request=decision.request, platform=asked.device, phase=phase)
        timed = evidence.timed(question)
        by_workload: dict[str, dict[str, float]] = {}
        for address, times in timed.times.items():
            for workload, us in times.items():
                by_workload.setdefault(workload, {})[address] = us
        if by_workload:
            yield Figured(phase=phase, source=timed.source, times=by_workload)


def _stated(name: str, value: object, origin: str, source: str) -> Stated:
    return Stated(name=name, value=_said(value), origin=origin, source=source)


def _platform(asked: Asked) -> Stated:
    named = asked.platform is not None
    origin, source = _set_by(asked, named, "platform", ("platform", "found on this machine"))
    return _stated("platform", asked.device, origin, source)


def _request(asked: Asked, request: Request, model: str, tp: int) -> Iterator[Stated]:
    sources = {"user": COMMAND_LINE, "model": model}
    for name in request.__dataclass_fields__:
        origin = request.origins.get(name)
        if origin is None:
            continue
        source = sources.get(origin, "")
        if origin == "model" and tp > 1 and name in ("num_q_heads", "num_kv_heads"):
            source = f"{model}, over {tp} ranks"
        if origin == "default" and getattr(asked.request, name) != getattr(request, name):
            follows = name == "kv_dtype" and request.dtype is not None
            source = "as dtype" if follows else "decided with the backends"
        yield _stated(name, getattr(request, name), origin, source)


def _policy(asked: Asked) -> Iterator[Stated]:
    """Only fields that are set."""
    names = {"allow": "allow_backends", "deny": "deny_backends", "prefer": "prefer_backends"}
    for field in Policy.__dataclass_fields__:
        value = getattr(asked.policy, field)
        if value and field not in ("options", "failed", "origins"):
            setting = names.get(field, field)
            yield _stated(setting, value, *_set_by(asked, asked.given.get(field), setting))


def _options(asked: Asked, decision: Decision) -> Iterator[Stated]:
    """The options of the chosen backends, each once."""
    user = read_options(asked.given["options"], asked.offers)
    file = read_options(asked.settings.options, asked.offers)
    chosen = {choice.address: choice for _, choice in decision.choices}
    for address, choice in chosen.items():
        for name, value in choice.options.items():
            is_users, is_set = (name in settings.get(address, {}) for settings in (user, file))
            setting = "options" if is_set else ""
            origin, source = _set_by(asked, is_users, setting, ("default", "the card's"))
            yield _stated(f"{choice.backend}.{name}", value, origin, source)


def _set_by(
    asked: Asked, by_user: object, setting: str, unset: tuple[str, str] = ("default", "")
) -> tuple[str, str]:
    """(origin, source) of a value: the user, a setting of the environment or the file, or neither,
    which is `unset`."""
    source = asked.settings.sources.get(setting, "")
    if by_user:
        return "user", COMMAND_LINE
    if not source:
        return unset
    return "env" if source.startswith(PREFIX) else "config", source


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value)))
    if isinstance(value, tuple):
        return ", ".join(" ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value)
    return str(value)
