"""The cards of NVIDIA's backends, as data, one module each."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.nvidia.cards.fa3 import FA3
from attnmux.nvidia.cards.flashinfer import FLASHINFER

CARDS: tuple[BackendCard, ...] = (FA3, FLASHINFER)
