"""What the backend takes from flashinfer, so that tests can give it something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Classes of flashinfer 0.6, with the library's own signatures."""

    paged: Callable[..., Any]
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper`."""
