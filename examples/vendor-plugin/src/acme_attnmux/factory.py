"""The card's factory, the only module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping

from acme_attnmux.backend import AcmePagedBackend
from acme_attnmux.library import paged_attention
from attnmux.core import BackendContext


def make(context: BackendContext, options: Mapping[str, object]) -> AcmePagedBackend:
    """The backend on the installed library."""
    return AcmePagedBackend(context, options, paged_attention)
