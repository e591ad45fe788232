"""A part joins backends, and states which backends it needs."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from attnmux.core.choosing.choice import Choice
from attnmux.core.facts.request import Request

Served = Mapping[str, Mapping[str, Choice]]
"""Answers to a part's asks: the backend of each phase, by the ask's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A further request of a part, next to the one for the main backends."""

    request: Request
    is_optional: bool = False
    """Whether the part does without an answer. A backend that the asker named is not optional."""
    named_for: str = ""
    """The phase whose `Policy.named_for` binds this ask too, or "linear". Empty: no name binds."""
    otherwise: str = ""
    """Why another backend may answer than the named one, in words; the decision records it. Empty:
    the named backend answers, or the request is refused."""
    rivals: str = ""
    """A phase of the main backends. An answer must rank at least as high as the backend of this
    phase. A decision without the phase skips the ask."""


class Part(ABC):
    """One composite: when it runs, which backends it needs, how it is built, and how it is
    described.

    A package offers an instance as an entry point of the group `attnmux.parts`, under the part's
    name. A request demands it by one of its fields (`OWN_DEMANDS`), or by its name in
    `Request.parts`. The module of a part imports no torch: `factory` does.
    """

    factory: ClassVar[str]
    """"module:attribute" of a `PartFactory`."""
    after_refusal: ClassVar[bool] = False
    """Whether it is tried only if no backend serves the whole request."""
    around: ClassVar[Literal["layers", "model"]] = "layers"
    """Whether it is built around the backend of each group of layers that are alike, or once around
    the backend of all of them."""
    level: ClassVar[int] = 0
    """The part with the lower level is inside, of two around the same; then names decide."""
    phases: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    """For each phase that `left` takes from the request, the ask and its phase whose backend the
    decision lists instead. An empty ask means the main backends."""

    def wants(self, request: Request) -> bool:
        """Whether it can serve a request that demands it."""
        return True

    def left(self, request: Request) -> Request:
        """The request that the main backends have to serve."""
        return request

    def asks(self, request: Request) -> Mapping[str, Ask]:
        """Further backends that it needs, by names of its own. request: of one group of layers if
        the part is around layers, with page size and KV dtype as decided."""
        return {}

    def lines(self, request: Request, served: Served) -> Sequence[str]:
        """Facts for the user, a clause each; for `Decision.summary`."""
        return ()


PartFactory = Callable[..., Any]
"""`(inner, decision, context, phases) -> AttentionBackend`.

inner: `(context, phases) -> AttentionBackend` makes a new backend inside the part at each call.
decision: of one group of layers if the part is around layers. phases: those that are built.
"""
