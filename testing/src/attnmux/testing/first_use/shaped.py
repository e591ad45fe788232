"""The suite's cases in the shapes of a request, instead of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attnmux.core import Request
from attnmux.testing.cases.case import Case
from attnmux.testing.cases.linear import AnyCase, LinearCase
from attnmux.testing.run.candidate import Candidate

DEFAULT_DTYPE = "bfloat16"
"""The dtype of cases that do not test a dtype."""

KINDS = ("mha", "mla")
"""Kinds of cases whose steps fit any kind."""

FEATURES = (
    "sliding_window",
    "attention_chunk",
    "cross_attention",
    "sinks",
    "alibi",
    "relative_bias",
    "logit_cap",
    "custom_mask",
    "multi_item",
    "deterministic",
    "lse",
    "strided_kv",
)
"""Features whose cases run only where the request asks for them."""


def cases_in_shape(
    candidate: Candidate, request: Request, phase: str, *, page_size: int, in_graph: bool
) -> Iterator[AnyCase]:
    """Yield cases of the phase and page size that need no other feature than the request, with the
    request's kind, heads and dtypes. An encoder has no pages.

    in_graph: also those that run from graphs.
    """
    if request.is_linear:
        yield from _linear(candidate, request, phase, in_graph=in_graph)
        return
    shapes = _shapes(request, phase)
    encodes = phase == "encoder"
    kinds = (request.kind,) if request.kind == "dual_chunk" else KINDS
    seen: set[Case] = set()
    for case in candidate.cases({1 if encodes else page_size}):
        if isinstance(case, LinearCase):
            continue
        needed = case.request
        if (
            case.kind not in kinds
            or phase not in case.phases
            or not {"decode", "extend", phase}.issuperset(case.phases)
            or case.dtype not in (DEFAULT_DTYPE, request.dtype)
            or case.kv_dtype not in (None, request.kv_dtype)
            or (case.graph and not in_graph)
            or not (case.save_kv_cache or encodes)
            # In a request's shapes the pages before the first one could take all memory
            or case.first_page > 1
            or any(getattr(needed, name) and not getattr(request, name) for name in FEATURES)
        ):
            continue
        shaped = replace(case, **shapes)
        unnamed = replace(shaped, name="")
        if unnamed not in seen:
            seen.add(unnamed)
            yield shaped


def _linear(
    candidate: Candidate, request: Request, phase: str, *, in_graph: bool
) -> Iterator[LinearCase]:
    """Yield cases of linear layers in the request's kind, dims and dtype."""
    shapes: dict[str, Any] = {"dtype": request.dtype or DEFAULT_DTYPE}
    if request.head_dim is not None:
        shapes["head_k_dim"] = request.head_dim
        shapes["head_v_dim"] = request.v_head_dim or request.head_dim
    seen: set[LinearCase] = set()
    for case in candidate.cases():
        if not isinstance(case, LinearCase) or case.kind != request.kind:
            continue
        if case.graph and not in_graph:
            continue
        shaped = replace(case, **shapes)
        unnamed = replace(shaped, name="")
        if phase in case.phases and unnamed not in seen:
            seen.add(unnamed)
            yield shaped


def _shapes(request: Request, phase: str) -> dict[str, Any]:
    """Fields of the cases that the request states, and the ranks that its kind has or lacks."""
    if phase == "encoder":
        dims = request.encoder_head_dim or request.head_dim
        stated = {"head_dim": dims, "v_head_dim": dims, "dtype": request.dtype}
        ranks = {}
    else:
        stated = {
            "kind": request.kind,
            "num_q_heads": request.num_q_heads,
            "num_kv_heads": request.num_kv_heads,
            "head_dim": request.head_dim,
            "v_head_dim": request.v_head_dim or request.head_dim,
            "dtype": request.dtype,
            "kv_dtype": request.kv_dtype,
        }
        ranks = {
            "kv_lora_rank": request.kv_lora_rank,
            "qk_rope_head_dim": request.qk_rope_head_dim,
        }
    return {name: value for name, value in stated.items() if value is not None} | ranks
