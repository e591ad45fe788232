"""The cards of AMD's backends, as data, one module each."""

from __future__ import annotations

from attnmux.amd.cards.aiter import AITER
from attnmux.amd.cards.aiter_mla import AITER_MLA
from attnmux.amd.cards.aiter_mla_prefill import AITER_MLA_PREFILL
from attnmux.amd.cards.wave import WAVE
from attnmux.core.plugin import BackendCard

CARDS: tuple[BackendCard, ...] = (AITER, AITER_MLA, AITER_MLA_PREFILL, WAVE)
