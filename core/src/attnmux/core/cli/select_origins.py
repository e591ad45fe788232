"""Where each value behind a decision came from: for `attnmux select --explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.named import read_options
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.settings import PREFIX, Settings

COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """A value that was in force, and who set it."""

    name: str
    value: str
    origin: str
    """user, env, config, model, platform or default."""
    source: str = ""
    """The variable, the file, or how a default was found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one invocation of `select` was asked, and what it read."""

    request: Request
    device: Platform
    policy: Policy
    offers: tuple[Offer, ...]
    settings: Settings
    given: Mapping[str, Any]
    """The fields of the policy that the command line sets."""
    platform: str | None
    """As the command line names it."""
    model: str | None
    tp: int = 1


def stated(asked: Asked, decision: Decision | None) -> list[Stated]:
    """Every value in force: of the platform, the request, the policy, the chosen options."""
    request = asked.request if decision is None else decision.request
    return [
        _platform(asked),
        *_request(asked, request),
        *_policy(asked),
        *(() if decision is None else _options(asked, decision)),
    ]


def _platform(asked: Asked) -> Stated:
    if asked.platform is not None:
        origin, source = "user", COMMAND_LINE
    elif "platform" in asked.settings.sources:
        origin, source = _configured(asked.settings, "platform")
    else:
        origin, source = "platform", "found on this machine"
    return Stated(name="platform", value=str(asked.device), origin=origin, source=source)


def _request(asked: Asked, request: Request) -> Iterator[Stated]:
    model = asked.model or ""
    sources = {"user": COMMAND_LINE, "model": model}
    for name in request.__dataclass_fields__:
        origin = request.origins.get(name)
        if origin is None:
            continue
        source = sources.get(origin, "")
        if origin == "model" and asked.tp > 1 and name in ("num_q_heads", "num_kv_heads"):
            source = f"{model}, over {asked.tp} ranks"
        if origin == "default" and getattr(asked.request, name) != getattr(request, name):
            follows = name == "kv_dtype" and request.dtype is not None
            source = "as dtype" if follows else "decided with the backends"
        yield Stated(name=name, value=_said(getattr(request, name)), origin=origin, source=source)


def _policy(asked: Asked) -> Iterator[Stated]:
    """Only what somebody set: an empty policy says nothing."""
    names = {"allow": "allow_backends", "deny": "deny_backends", "prefer": "prefer_backends"}
    for field in Policy.__dataclass_fields__:
        value = getattr(asked.policy, field)
        setting = names.get(field, field)
        if field in ("options", "failed", "origins", "hypothetical") or not value:
            continue
        if asked.given.get(field):
            origin, source = "user", COMMAND_LINE
        else:
            origin, source = _configured(asked.settings, setting)
        yield Stated(name=setting, value=_said(value), origin=origin, source=source)


def _options(asked: Asked, decision: Decision) -> Iterator[Stated]:
    """The options of the chosen backends, each once."""
    user = read_options(asked.given["options"], asked.offers)
    file = read_options(asked.settings.options, asked.offers)
    chosen = {(choice.plugin, choice.backend): choice for choice in decision.phases.values()}
    for (plugin, backend), choice in chosen.items():
        address = f"{plugin}/{backend}"
        for name, value in choice.options.items():
            origin, source = "default", "the card's"
            if name in user.get(address, {}):
                origin, source = "user", COMMAND_LINE
            elif name in file.get(address, {}):
                origin, source = _configured(asked.settings, "options")
            yield Stated(name=f"{backend}.{name}", value=_said(value), origin=origin, source=source)


def _configured(settings: Settings, name: str) -> tuple[str, str]:
    """(origin, source) of what the environment or the file says; else it is a default."""
    source = settings.sources.get(name, "")
    if not source:
        return "default", ""
    return "env" if source.startswith(PREFIX) else "config", source


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value)))
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
