"""The answer: a backend for each phase, the coercions that led there, and every verdict."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from attnmux.core.cards.card import Offer, Prior
from attnmux.core.choosing.checking import Accuracy, by_card
from attnmux.core.choosing.choice import Choice, SizeRange, disagreements
from attnmux.core.choosing.part import Served
from attnmux.core.choosing.parts import DISPENSABLE, Parts, absence, demanded, installed_part
from attnmux.core.choosing.summary import summary
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import read_fields
from attnmux.core.facts.frozen import FrozenMapping, Plain, plain_fields
from attnmux.core.facts.libraries import Libraries, installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.reading import read_fact
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import LayerGroup
from attnmux.core.facts.verdicts import Coercion, Verdict

Here = tuple[Platform, Platform, tuple[Offer, ...], Libraries, Accuracy]
"""The decision's platform with this process's own facts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(Plain):
    """The answer of `solve`. It survives JSON unchanged, so that one process can decide for all."""

    platform: Platform
    request: Request
    """With page size and KV dtype set, and with coercions applied."""
    page_size: int
    kv_dtype: str
    phases: Mapping[str, Choice]
    """Only the requested phases, and those that parts leave to the main backends."""
    decode_sizes: tuple[SizeRange, ...] = ()
    """Batch sizes, ascending, at which another backend decodes faster than the one in `phases`,
    as measured on this machine. For a step replayed from a graph, the captured size counts."""
    parts: Mapping[str, Served] = field(default_factory=FrozenMapping)
    """The backends that answer each ask of each part, by phase. An optional ask without an answer
    is absent."""
    others: tuple[Decision, ...] = ()
    """For each of `Request.other_layers`, the decision about these layers. All share the page size,
    and the KV dtype except groups with their own."""
    coercions: tuple[Coercion, ...] = ()
    notes: tuple[str, ...] = ()
    """Facts that speak against a choice, such as a measured error. The hash leaves them out."""
    candidates: Sequence[Verdict] = ()
    """One for each backend and phase. Read-only; those of `solve` are made when first read."""
    is_checked: bool = field(default=False, repr=False, compare=False)
    """Whether this process decided it or has checked it. Text can name any code as a factory, so a
    decision that was read from text is unchecked, whatever the text says."""

    def __post_init__(self) -> None:
        read_fields(self, "decision")

    @classmethod
    def of_groups(
        cls, groups: Sequence[Decision], other_layers: tuple[LayerGroup, ...]
    ) -> Decision:
        """One decision of those for `Request.groups`."""
        first, *others = groups
        if not others:
            return first
        request = first.request.replace(origin="model", other_layers=other_layers)
        return replace(first, request=request, others=tuple(others))

    @property
    def groups(self) -> tuple[Decision, ...]:
        """The decision about each group of layers that are alike, as `Request.groups` has
        them: itself where all layers are."""
        if not self.others:
            return (self,)
        return replace(self, request=self.request.groups()[0], others=()), *self.others

    @property
    def choices(self) -> tuple[tuple[str, Choice], ...]:
        """(phase, choice) of every backend that may run: first `phases`, then `decode_sizes`, then
        those of other layers."""
        choices = (
            *self.phases.items(),
            *(("decode", decode_size.choice) for decode_size in self.decode_sizes),
        )
        return (*choices, *(pair for other in self.others for pair in other.choices))

    @property
    def part_choices(self) -> tuple[tuple[str, str, str, Choice], ...]:
        """(part, ask, phase, choice) of every backend that parts use, those of other layers too."""
        choices = (
            (part, ask, phase, choice)
            for part, served in self.parts.items()
            for ask, phases in served.items()
            for phase, choice in phases.items()
        )
        return (
            *choices,
            *(part_choice for other in self.others for part_choice in other.part_choices),
        )

    def answer(self, part: str, ask: str, phase: str) -> Choice | None:
        """The backend that answers a part's ask; None if nothing does."""
        return self.parts.get(part, {}).get(ask, {}).get(phase)

    def begin_ahead(self, offers: Iterable[Offer]) -> None:
        """Begin what the decided backends compile without layers: see `BackendCard.ahead`.

        It returns at once: call it before weights are loaded. `build` waits for what it began, and
        reports its errors.
        """
        addresses = {choice.address for _, choice in self.choices}
        for offer in offers:
            if offer.card.ahead is not None and offer.address in addresses:
                with suppress(Exception):
                    pkgutil.resolve_name(offer.card.ahead)(self.platform)

    @property
    def is_last_resort(self) -> bool:
        """Whether the backend of a phase is not made for the platform, by its rank."""
        winners = {(choice.address, phase) for phase, choice in self.phases.items()}
        return any(other.is_last_resort for other in self.others) or any(
            verdict.rank is not None and verdict.rank >= Prior.LAST_RESORT
            for verdict in self.candidates
            if (verdict.address, verdict.phase) in winners
        )

    @property
    def unserved_layers(self) -> tuple[tuple[str, int], ...]:
        """(kind, how many) of the model's linear layers that no backend serves."""
        layers, served = self.request.linear_layers, self.parts.get("linear_layers", {})
        return tuple((kind, count) for kind, count in layers if kind not in served)

    @property
    def unserved_hint(self) -> str:
        """A hint that follows the names of `unserved_layers`: how they would be served; "" if
        unknown."""
        trees = self.unserved_layers and self.request.has_trees
        return " (with draft trees: their states follow chains alone, spec_topk=1)" if trees else ""

    @property
    def hash(self) -> str:
        """SHA-256 of the decision: processes with the same hash run the same backends.

        It covers the kind of device, the request's values, page size, KV dtype, and every backend
        that the decision names, with its options and its plugin's version. It leaves out the
        origins of values, the product's name, and the losers.
        """
        request = self.request.to_dict()
        del request["origins"]
        if not self.others:
            del request["other_layers"]
        if not self.request.parts:
            del request["parts"]
        decided = {
            "platform": [self.platform.vendor, self.platform.arch, self.platform.runtime],
            "request": request,
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
            "phases": {phase: choice.identity() for phase, choice in self.phases.items()},
        }
        if self.decode_sizes:
            decided["decode_sizes"] = [
                [decode_size.least, decode_size.most, decode_size.choice.identity()]
                for decode_size in self.decode_sizes
            ]
        if self.parts:
            decided["parts"] = {
                part: {
                    ask: {phase: choice.identity() for phase, choice in phases.items()}
                    for ask, phases in served.items()
                }
                for part, served in self.parts.items()
            }
        if self.others:
            decided["others"] = [other.hash for other in self.others]
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return sha256(text.encode()).hexdigest()

    def check(
        self,
        platform: Platform,
        offers: Iterable[Offer],
        *,
        libraries: Libraries = installed_version,
        accuracy: Accuracy = by_card,
        parts: Parts = installed_part,
    ) -> None:
        """Check that a loaded decision holds in this process, before it builds the backends.

        platform, offers: this process's own. accuracy: `accuracy_by` with this machine's
        measurements; the default goes by the bounds on the cards alone. parts: of this process.
        Raises InvalidInput with every difference, if this process would compute another hash, or
        a chosen backend does not serve its phase here or is less accurate than the request demands.
        """
        here = (self.platform, platform, tuple(offers), libraries, accuracy)
        differences = [
            f"the request demands the part {name}, and the decision has none"
            for name in demanded(self.request)
            if name not in self.parts and name not in DISPENSABLE
        ]
        differences += [
            disagreement
            for group in self.groups
            for disagreement in group._disagreements(here, parts)
        ]
        if differences:
            expected = "one that holds in this process too"
            raise InvalidInput("decision", got="; ".join(differences), expected=expected)
        object.__setattr__(self, "is_checked", True)

    def _disagreements(self, here: Here, parts: Parts) -> list[str]:
        """Reasons why one group of layers cannot run in this process."""
        left, differences = self.request, []
        for name, served in self.parts.items():
            part = parts(name)
            if part is None:
                differences.append(absence(name))
                continue
            left = part.left(left)
            asks = part.asks(self.request)
            for ask, phases in served.items():
                if ask in asks:
                    differences += disagreements(phases.items(), asks[ask].request, *here)
                else:
                    differences.append(f"the part {name} does not ask for {ask} here")
        return [*disagreements(self.choices, left, *here), *differences]

    def to_dict(self) -> dict[str, Any]:
        data = {**plain_fields(self), "hash": self.hash}
        del data["is_checked"]
        return data

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Decision:
        """The inverse of `to_json`.

        Raises InvalidInput for text that is not a decision (such as a refusal's JSON), and for a
        hash that does not match the content.
        """
        try:
            return cls._read(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, InvalidInput) and error.argument == "decision":
                raise
            got = f"{type(error).__name__}: {error}"
            expected = "the JSON of this version's Decision.to_json"
            raise InvalidInput("decision", got=got, expected=expected) from error

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Decision:
        if data["hash"] is None and not data["phases"]:
            got = "an answer in which nothing was decided"
            raise InvalidInput("decision", got=got, expected="a backend for each phase")
        decision = cls(
            platform=Platform.from_dict(data["platform"]),
            request=Request.from_dict(data["request"]),
            page_size=data["page_size"],
            kv_dtype=data["kv_dtype"],
            phases=_choices(data["phases"]),
            decode_sizes=tuple(map(SizeRange.from_dict, data["decode_sizes"])),
            parts=FrozenMapping({part: _served(asks) for part, asks in data["parts"].items()}),
            others=tuple(map(cls._read, data["others"])),
            coercions=tuple(read_fact(Coercion, entry) for entry in data["coercions"]),
            notes=tuple(data["notes"]),
            candidates=tuple(read_fact(Verdict, entry) for entry in data["candidates"]),
        )
        if data["hash"] != decision.hash:
            expected = f"the hash of its content, {decision.hash}"
            got = f"hash {data['hash']}: it was changed since, or written by another version of "
            raise InvalidInput("decision", got=f"{got}attnmux", expected=expected)
        if len(decision.others) != len(decision.request.other_layers):
            got = f"{len(decision.others)} others for {len(decision.request.other_layers)} groups"
            raise InvalidInput("decision", got=got, expected="a decision for each group of layers")
        return decision

    def summary(self, *, parts: Parts = installed_part) -> str:
        """One line: the backend of each phase, the machine, and why each backend won."""
        return summary(self, parts)


def _served(data: Mapping[str, Any]) -> Served:
    return FrozenMapping({ask: _choices(phases) for ask, phases in data.items()})


def _choices(data: Mapping[str, Any]) -> Mapping[str, Choice]:
    return FrozenMapping({phase: Choice.from_dict(choice) for phase, choice in data.items()})
