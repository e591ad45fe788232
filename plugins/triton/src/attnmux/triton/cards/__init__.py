"""The cards of the Triton backends, as data, one module each."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.triton.cards.double_sparsity import DOUBLE_SPARSITY
from attnmux.triton.cards.triton import TRITON

CARDS: tuple[BackendCard, ...] = (TRITON, DOUBLE_SPARSITY)
