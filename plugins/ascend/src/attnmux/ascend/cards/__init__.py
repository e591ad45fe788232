"""The cards of Ascend's backends, as data, one module each."""

from __future__ import annotations

from attnmux.ascend.cards.ascend import ASCEND
from attnmux.core.plugin import BackendCard

CARDS: tuple[BackendCard, ...] = (ASCEND,)
