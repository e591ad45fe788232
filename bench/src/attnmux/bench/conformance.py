"""Runs the conformance suite in a request's shapes, for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attnmux.bench.entrants import Entrant
from attnmux.core import Request, TunedLaunch
from attnmux.testing import Candidate, Case, run_case

DEFAULT_DTYPE = "bfloat16"
"""The dtype of cases that do not test a dtype."""

KINDS = ("mha", "mla")
"""Kinds of cases whose steps fit any kind."""

FEATURES = (
    "sliding_window",
    "attention_chunk",
    "cross_attention",
    "sinks",
    "logit_cap",
    "custom_mask",
    "multi_item",
    "deterministic",
    "lse",
)
"""Features whose cases run only where the request asks for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """How a backend did in one phase."""

    backend: str
    """`plugin/name`."""
    phase: str
    passed: int
    cases: int
    """Cases that apply, those that were not run for lack of time included."""
    failure: str = ""
    """The first failure, which ends the check."""

    @property
    def conformant(self) -> bool:
        return self.passed > 0 and not self.failure


def check_conformance(
    entrant: Entrant, device: str, seconds: float, launches: tuple[TunedLaunch, ...] = ()
) -> Check:
    """Run the cases in the suite's order until one fails or `seconds` are over, but at least one.

    device: a torch device, as in "cuda:1". launches: as `BackendContext.launches`.
    """
    candidate = Candidate(
        card=entrant.offer.card,
        plugin=entrant.offer.plugin,
        platform=entrant.decision.platform,
        device=device,
        options=entrant.choice.options,
        launches=launches,
    )
    cases = tuple(applicable_cases(candidate, entrant))
    passed, end = 0, time.monotonic() + seconds
    failure = "" if cases else "no case of the suite applies to this request"
    for case in cases:
        outcome = run_case(candidate, case)
        passed += outcome.status == "passed"
        if outcome.status == "failed":
            failure = f"{case.name}: {outcome.message}"
        if failure or time.monotonic() > end:
            break
    return Check(
        backend=entrant.offer.address,
        phase=entrant.phase,
        passed=passed,
        cases=len(cases),
        failure=failure or ("" if passed else "every case that was run was refused"),
    )


def applicable_cases(candidate: Candidate, entrant: Entrant) -> Iterator[Case]:
    """Yield cases of the entrant's phase and page size that need no other feature than the request,
    with the request's kind, heads and dtypes."""
    request = entrant.decision.request
    shapes = _shapes(request)
    seen: set[Case] = set()
    for case in candidate.cases({entrant.decision.page_size}):
        needed = case.request
        if (
            case.kind not in KINDS
            or entrant.phase not in case.phases
            or not {"decode", "extend"}.issuperset(case.phases)
            or case.dtype not in (DEFAULT_DTYPE, request.dtype)
            or case.kv_dtype not in (None, request.kv_dtype)
            or (case.graph and not entrant.in_graph)
            or not case.save_kv_cache
            or any(getattr(needed, name) and not getattr(request, name) for name in FEATURES)
        ):
            continue
        shaped = replace(case, **shapes)
        unnamed = replace(shaped, name="")
        if unnamed not in seen:
            seen.add(unnamed)
            yield shaped


def _shapes(request: Request) -> dict[str, Any]:
    return {
        "kind": request.kind,
        "num_q_heads": request.num_q_heads,
        "num_kv_heads": request.num_kv_heads,
        "head_dim": request.head_dim,
        "v_head_dim": request.v_head_dim or request.head_dim,
        "kv_lora_rank": request.kv_lora_rank,
        "qk_rope_head_dim": request.qk_rope_head_dim,
        "dtype": request.dtype,
        "kv_dtype": request.kv_dtype,
    }
