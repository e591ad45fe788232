"""The settings of backends: reading what a user gave against what the cards declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnmux.core.choosing.ask.values import OptionValue
from attnmux.core.choosing.common.checks import FALSE, TRUE, nearest
from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.offer.card import BackendCard, Offer, Option
from attnmux.core.choosing.offer.libraries import Libraries, installed_version
from attnmux.core.choosing.offer.named import offers_named
from attnmux.core.errors import InvalidInput

Given = Mapping[str, Mapping[str, OptionValue]]


def read_options(
    given: Given, offers: Sequence[Offer], libraries: Libraries = installed_version
) -> Mapping[str, Mapping[str, OptionValue]]:
    """What was set, by the address of each backend that it was set for.

    Raises UnknownBackend for a name that nobody offers, InvalidInput for an option that the backend
    does not have or a value that the option does not take.
    """
    found: dict[str, dict[str, OptionValue]] = {}
    for backend, values in given.items():
        meant = offers_named(backend, offers, libraries)
        for name, value in values.items():
            having = [(offer, _option(offer.card, name)) for offer in meant]
            if not any(option for _, option in having):
                raise _no_such(backend, name, meant)
            for offer, option in having:
                if option is not None:
                    read = _read(f"{backend}.{name}", value, option)
                    found.setdefault(offer.address, {})[name] = read
    return found


def complete(card: BackendCard, given: Mapping[str, OptionValue]) -> Mapping[str, OptionValue]:
    """Every option of the card: as given, else its default."""
    return FrozenMapping({option.name: option.default for option in card.options} | dict(given))


def _option(card: BackendCard, name: str) -> Option | None:
    return next((option for option in card.options if option.name == name), None)


def _no_such(backend: str, name: str, meant: Sequence[Offer]) -> InvalidInput:
    names = sorted({option.name for offer in meant for option in offer.card.options})
    near = nearest(name, names)
    expected = f"an option of {backend} ({', '.join(names) or 'it has none'})"
    guess = f"; did you mean {near!r}?" if near else ""
    return InvalidInput("option", came=repr(name), expected=expected + guess)


def _read(name: str, value: OptionValue, option: Option) -> OptionValue:
    if option.choices:
        expected = f"one of {', '.join(map(str, option.choices))}"
    else:
        expected = f"a value of type {option.type.__name__}"
    refusal = InvalidInput(name, came=repr(value), expected=expected)
    try:
        read = _as_type(value, option.type)
    except ValueError:
        raise refusal from None
    if option.choices and read not in option.choices:
        raise refusal
    return read


def _as_type(
    value: OptionValue, kind: type[bool] | type[int] | type[float] | type[str]
) -> OptionValue:
    """Raises ValueError for what is not of the type: no number is cut, no truth is guessed."""
    if kind is bool:
        word = str(value).strip().lower()
        if word not in TRUE and word not in FALSE:
            raise ValueError(word)
        return word in TRUE
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise ValueError(value)
    if not isinstance(value, (int, float, str)):
        raise ValueError(value)
    return kind(value)
