"""The cards of Intel's backends, as data, one module each."""

from __future__ import annotations

from attnmux.core.plugin import BackendCard
from attnmux.intel.cards.intel_amx import INTEL_AMX
from attnmux.intel.cards.intel_xpu import INTEL_XPU
from attnmux.intel.cards.vllm_xpu import VLLM_XPU

CARDS: tuple[BackendCard, ...] = (INTEL_AMX, INTEL_XPU, VLLM_XPU)
