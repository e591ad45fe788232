"""Cards to choose among: small ones, and a few that are limited as real kernels are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnmux.core import Offer, Platform
from attnmux.core.plugin import ANY, BackendCard, Clause, Condition, Prior, one_of

MakeClause = Callable[..., Clause]
MakeOffer = Callable[..., Offer]

PLAIN: dict[str, Condition] = {
    "vendor": ANY,
    "phase": one_of("extend", "decode"),
    "kind": one_of("mha"),
    "dtype": one_of("bfloat16", "float16"),
    "kv_dtype": one_of("bfloat16", "float16"),
    "page_size": ANY,
    "head_dim": ANY,
}


@pytest.fixture
def clause() -> MakeClause:
    """A clause for plain MHA on anything, with the given conditions instead."""
    return lambda **conditions: Clause(**{**PLAIN, **conditions})


@pytest.fixture
def offer(clause: MakeClause) -> MakeOffer:
    """An offer: `rank` makes its prior, conditions its one clause (or give `clauses`)."""

    def make(name: str, rank: int | None = None, plugin: str = "fake", **given: object) -> Offer:
        known = BackendCard.__dataclass_fields__
        card = {key: value for key, value in given.items() if key in known}
        conditions = {key: value for key, value in given.items() if key not in known}
        card.setdefault("clauses", (clause(**conditions),))
        card.setdefault("factory", f"fake.{name}:Backend")
        if rank is not None:
            card.setdefault("priors", (Prior(rank=rank, source="the test"),))
        return Offer(
            card=BackendCard(name=name, summary=name, **card),
            plugin=plugin,
            distribution=f"attnmux-{plugin}",
            version="1.2.3",
        )

    return make


@pytest.fixture
def cpu() -> Platform:
    return Platform.parse("cpu:x86_64,features=avx2")


@pytest.fixture
def hopper() -> Platform:
    return Platform.parse("nvidia:sm90,cuda=12.8")
