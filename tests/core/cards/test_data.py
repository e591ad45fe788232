"""Cards as data: what is written is read back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attnmux.core import InvalidInput, load_plugins
from attnmux.core.cards.data import from_data, to_data
from attnmux.core.plugin import (
    BackendCard,
    Caveat,
    Clause,
    ErrorBound,
    Option,
    Prior,
    Verified,
    emulated,
    multiple_of,
    one_of,
    versions,
)

CARD = BackendCard(
    name="full",
    summary="every field",
    clauses=(
        Clause.when(vendor=one_of("acme"), version=versions(">=2"), page_size=emulated(1)),
        Clause.when(page_size=multiple_of(16)),
    ),
    sources={"page_size": "acme.h"},
    aliases=("all",),
    factory="a:b",
    requires=("x>=1", ("y", "z")),
    options=(
        Option(name="splits", type=int, default=1, choices=(1, 2)),
        Option(name="tile", type=int, default=0, least=0, most=64),
    ),
    priors=(
        Prior(rank=7, when=Clause.when(vendor=one_of("acme")), source="here"),
        Prior(rank=9, source="there"),
    ),
    caveats=(Caveat(text="slow", unless=("x>=2",), arch=("m2",)),),
    verified_on=(
        Verified(on="Acme M2", platform="acme:m2", libraries=("x 1",), date="2026-01-01"),
    ),
    error_bounds=(
        ErrorBound(max_error=2.5, keys=4096, kv_dtype=one_of("bfloat16"), source="a test"),
    ),
)


@pytest.mark.parametrize("checked", [False, True])
def test_a_card_with_every_field_comes_back(checked) -> None:
    data = json.loads(json.dumps(to_data((CARD,))))
    assert from_data(data, checked=checked) == (CARD,)


def test_every_installed_card_comes_back() -> None:
    cards = tuple(offer.card for offer in load_plugins().offers())
    assert from_data(json.loads(json.dumps(to_data(cards))), checked=False) == cards


def test_control_characters_are_refused() -> None:
    data = to_data((replace(CARD, summary="\x1b[2J"),))
    with pytest.raises(InvalidInput, match="control characters"):
        from_data(data, checked=False)
