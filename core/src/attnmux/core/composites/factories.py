"""From a choice to the backend that its factory makes."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.parts import absence, installed_part
from attnmux.core.choosing.with_parts import inside_first
from attnmux.core.composites.local_attention import with_virtual_requests
from attnmux.core.composites.mask_forms import with_mask_forms
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.linear.backend import LinearAttentionBackend
from attnmux.core.facts.errors import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
)

MakeBackend = Callable[[BackendContext, Sequence[str]], AttentionBackend]
"""Makes a backend of a context for some phases."""

Factory = Callable[[BackendContext, Mapping[str, object]], object]


def around(inner: MakeBackend, decision: Decision, place: str) -> MakeBackend:
    """A factory of a decision's parts around the layers or around the model, over `inner`.

    Raises InvalidInput for a part that this process lacks.
    """
    found = []
    for name in decision.parts:
        part = installed_part(name)
        if part is None:
            raise InvalidInput("decision", got=absence(name), expected="each of its parts")
        found.append((name, part))
    for _, part in inside_first(found):
        if part.around == place:
            inner = partial(pkgutil.resolve_name(part.factory), inner, decision)
    return inner


def make_backend(
    choice: Choice, context: BackendContext, factory: Factory | None = None
) -> AttentionBackend:
    """The chosen attention backend, which gets the masks of draft trees in a form that it reads,
    and attention chunks as virtual requests if its card says so.

    factory: called in place of the choice's.
    Raises BackendFailed if the factory cannot be imported or fails, AttnmuxError if it makes
    something else, and InvalidInput for chunks that are not whole pages of the pool.
    """

    def make(context: BackendContext) -> AttentionBackend:
        backend = _called(choice, context, factory)
        if not isinstance(backend, AttentionBackend):
            raise _misfit(choice, backend)
        return backend

    made = with_virtual_requests(make, context) if choice.virtual_requests else make(context)
    return with_mask_forms(made, choice.tree_masks)


def make_linear(
    choice: Choice, context: BackendContext, factory: Factory | None = None
) -> LinearAttentionBackend:
    """The chosen backend of linear layers. Raises as `make_backend` does."""
    backend = _called(choice, context, factory)
    if not isinstance(backend, LinearAttentionBackend):
        raise _misfit(choice, backend)
    return backend


def _misfit(choice: Choice, made: object) -> AttnmuxError:
    return AttnmuxError(f"{choice.address}: {choice.factory} made a {type(made).__name__}")


def _called(choice: Choice, context: BackendContext, factory: Factory | None) -> object:
    """The backend that the factory of a choice makes."""
    name = choice.address
    try:
        made: object = (factory or pkgutil.resolve_name(choice.factory))(context, choice.options)
    except BackendFailed as failure:
        raise BackendFailed(name, failure.reason, hint=failure.hint) from failure
    except (AttnmuxError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries and compilers raise anything
        raise BackendFailed(name, f"{choice.factory}: {AttnmuxError.in_brief(error)}") from error
    return made
