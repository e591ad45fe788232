"""The shipped suite in the shapes that are asked for, for as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attnmux.bench.subjects import Subject
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.measured.launches import TunedLaunch
from attnmux.testing import Candidate, Case, run_case

USUAL_DTYPE = "bfloat16"
"""Of cases that are not about a dtype."""

KINDS = ("mha", "mla")
"""Of cases whose steps are those of any kind."""

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
"""Of cases that are run only where they are asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a backend came to in one phase."""

    backend: str
    """`plugin/name`."""
    phase: str
    passed: int
    cases: int
    """That are asked for; what was not run for want of time counts too."""
    failure: str = ""
    """The first one: it ends the check."""

    @property
    def conformant(self) -> bool:
        return self.passed > 0 and not self.failure


def check_conformance(
    subject: Subject, device: str, seconds: float, launches: tuple[TunedLaunch, ...] = ()
) -> Check:
    """Run the cases in the suite's order until one fails or the time is over; one at least.

    device: torch's word. launches: as `BackendContext.launches`.
    """
    candidate = Candidate(
        card=subject.offer.card,
        plugin=subject.offer.plugin,
        platform=subject.decision.platform,
        device=device,
        options=subject.choice.options,
        launches=launches,
    )
    cases = tuple(asked_cases(candidate, subject))
    passed, end = 0, time.monotonic() + seconds
    failure = "" if cases else "no case of the suite is what is asked"
    for case in cases:
        outcome = run_case(candidate, case)
        passed += outcome.status == "passed"
        if outcome.status == "failed":
            failure = f"{case.name}: {outcome.message}"
        if failure or time.monotonic() > end:
            break
    return Check(
        backend=subject.offer.address,
        phase=subject.phase,
        passed=passed,
        cases=len(cases),
        failure=failure or ("" if passed else "every case that was run was refused"),
    )


def asked_cases(candidate: Candidate, subject: Subject) -> Iterator[Case]:
    """Cases of the subject's phase and page size without features that are not asked for, their
    kind, heads and dtypes replaced by those that are."""
    request = subject.decision.request
    shapes = _shapes(request)
    seen: set[Case] = set()
    for case in candidate.cases({subject.decision.page_size}):
        of_case = case.request
        if (
            case.kind not in KINDS
            or subject.phase not in case.phases
            or not {"decode", "extend"}.issuperset(case.phases)
            or case.dtype not in (USUAL_DTYPE, request.dtype)
            or case.kv_dtype not in (None, request.kv_dtype)
            or (case.graph and not subject.in_graph)
            or not case.save_kv_cache
            or any(getattr(of_case, name) and not getattr(request, name) for name in FEATURES)
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
