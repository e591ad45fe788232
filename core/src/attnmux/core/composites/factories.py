"""From a choice to the backend that its factory makes."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
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
from attnmux.core.facts.errors import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
)
from attnmux.core.facts.values import TreeMask
from attnmux.core.linear.backend import LinearAttentionBackend

MakeBackend = Callable[[BackendContext, Sequence[str]], AttentionBackend]
"""Makes a backend of a context for some phases."""


def around(inner: MakeBackend, decision: Decision, place: str) -> MakeBackend:
    """Build a decision's parts around the layers or around the model, over `inner`.

    Raises InvalidInput for a part that this process lacks.
    """
    named = []
    for name in decision.parts:
        part = installed_part(name)
        if part is None:
            raise InvalidInput("decision", got=absence(name), expected="each of its parts")
        named.append((name, part))
    for _, part in inside_first(named):
        if part.around == place:
            inner = partial(pkgutil.resolve_name(part.factory), inner, decision)
    return inner


def make_backend(choice: Choice, context: BackendContext) -> AttentionBackend:
    """The chosen attention backend, which gets the masks of draft trees in a form that it reads,
    and attention chunks as virtual requests if its card says so.

    Raises BackendFailed if its factory cannot be imported or fails, AttnmuxError if the
    factory makes something else.
    """

    def make(context: BackendContext) -> AttentionBackend:
        backend = _called(choice, context)
        if not isinstance(backend, AttentionBackend):
            raise _misfit(choice, backend)
        return backend

    return make_served(make, context, choice.tree_masks, virtual_requests=choice.virtual_requests)


def make_served(
    make: Callable[[BackendContext], AttentionBackend],
    context: BackendContext,
    tree_masks: tuple[TreeMask, ...],
    *,
    virtual_requests: bool,
) -> AttentionBackend:
    """The backend that `make` returns, with the masks and virtual requests that core adds.

    tree_masks, virtual_requests: the card's. Raises what `make` raises, and InvalidInput for chunks
    that are not whole pages of the pool.
    """
    backend = with_virtual_requests(make, context) if virtual_requests else make(context)
    return with_mask_forms(backend, tree_masks)


def make_linear(choice: Choice, context: BackendContext) -> LinearAttentionBackend:
    """The chosen backend of linear layers. Raises as `make_backend` does."""
    backend = _called(choice, context)
    if not isinstance(backend, LinearAttentionBackend):
        raise _misfit(choice, backend)
    return backend


def _misfit(choice: Choice, made: object) -> AttnmuxError:
    return AttnmuxError(f"{choice.address}: {choice.factory} made a {type(made).__name__}")


def _called(choice: Choice, context: BackendContext) -> object:
    """The backend that a choice's factory makes."""
    name = choice.address
    try:
        backend: object = pkgutil.resolve_name(choice.factory)(context, choice.options)
    except BackendFailed as failure:
        raise BackendFailed(name, failure.reason, hint=failure.hint) from failure
    except (AttnmuxError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # libraries and compilers raise anything
        raise BackendFailed(name, f"{choice.factory}: {AttnmuxError.in_brief(error)}") from error
    return backend
