"""Whether a model would be served better in another dtype than its checkpoint's."""

from __future__ import annotations

from collections.abc import Sequence

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.solver import solve
from attnmux.core.facts.errors import NoBackend
from attnmux.core.facts.policy import Policy

GENERAL_RANK = 800
"""From this rank on, a backend has no kernel that was made for the KV cache or the platform."""


def dtype_hint(decision: Decision, offers: Sequence[Offer], policy: Policy) -> str:
    """A sentence for a model in float32 or float16 on a general backend, if one with a kernel of
    its own serves it in another dtype of 16 bits; otherwise, and for a dtype that the user named,
    ""."""
    request = decision.request
    is_own = request.origins.get("dtype") == "model"
    if request.dtype not in ("float32", "float16") or not is_own or not _general(decision):
        return ""
    derived = [name for name in ("page_size", "kv_dtype") if request.origins[name] == "default"]
    for dtype in sorted({"bfloat16", "float16"} - {request.dtype}):
        asked = request.replace(origin="model", dtype=dtype, **dict.fromkeys(derived))
        try:
            other = solve(asked, decision.platform, offers, policy)
        except NoBackend:
            continue
        if not _general(other):
            slow, fast = (_decoding(candidate) for candidate in (decision, other))
            return (
                f"the checkpoint is in {request.dtype}, which {slow} serves here without a kernel "
                f"of its own: with dtype={dtype}, {fast} serves it"
            )
    return ""


def _general(decision: Decision) -> bool:
    winners = {(choice.address, phase) for phase, choice in decision.phases.items()}
    return any(
        verdict.rank is not None and verdict.rank >= GENERAL_RANK
        for verdict in decision.candidates
        if (verdict.address, verdict.phase) in winners
    )


def _decoding(decision: Decision) -> str:
    phases = decision.phases
    return (phases.get("decode") or next(iter(phases.values()))).backend
