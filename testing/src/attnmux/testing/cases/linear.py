"""Cases of linear layers, as plain data. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from attnmux.core import ForwardMode, Request
from attnmux.core.plugin import BackendCard
from attnmux.testing.cases.case import PHASES, Case, Step, decode, extend, verify

USUAL_DIM = 64
"""Dim of the K and V of a head, in cases that are not about dims."""

SHAPES: dict[str, dict[str, Any]] = {
    "gdn": {"num_k_heads": 2, "num_v_heads": 4, "qk_l2norm": True, "conv_dims": (96,)},
    "kda": {"num_k_heads": 4, "num_v_heads": 4, "qk_l2norm": True, "conv_dims": (64, 32)},
    "mamba1": {
        "num_k_heads": 1,
        "num_v_heads": 24,
        "head_k_dim": 16,
        "head_v_dim": 1,
        "conv_dims": (24,),
        "conv_bias": True,
    },
    "mamba2": {"num_k_heads": 1, "num_v_heads": 4, "conv_dims": (96,), "conv_bias": True},
    "lightning": {"num_k_heads": 4, "num_v_heads": 4, "conv_size": 0},
    "conv": {"head_k_dim": 0, "head_v_dim": 0, "conv_dims": (96,), "conv_size": 3},
}
"""The usual settings of a kind's cases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCase:
    """Successive steps of a model's linear layers on one backend instance.

    Each step starts from other random states, so that it is a function of its inputs alone.
    """

    name: str
    steps: tuple[Step, ...]
    kind: Literal["gdn", "kda", "mamba1", "mamba2", "lightning", "conv"]
    num_k_heads: int = 0
    num_v_heads: int = 0
    head_k_dim: int = USUAL_DIM
    head_v_dim: int = USUAL_DIM
    qk_l2norm: bool = False
    conv_dims: tuple[int, ...] = ()
    conv_size: int = 4
    conv_bias: bool = False
    """Whether the convolutions have a bias, and SiLU after them."""
    strong_decay: bool = False
    """Whether some tokens forget everything before them: exp(g) is 0 in float32."""
    dtype: str = "bfloat16"
    host_lens: bool = False
    """Whether batches have their host mirrors."""
    graph: bool = False
    """Whether steps that device graphs serve are captured and replayed."""
    page_size: int = 1
    """Page size of the context; linear layers have no pages."""

    @property
    def execution(self) -> Literal["eager", "graph"]:
        """How the steps are run."""
        return "graph" if self.graph else "eager"

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of the steps, each once."""
        return tuple({PHASES[step.mode]: None for step in self.steps})

    @property
    def request(self) -> Request:
        """An engine's request for these layers."""
        drafts = [step.new[0] for step in self.steps if step.mode is ForwardMode.TARGET_VERIFY]
        return Request(
            kind=self.kind,
            num_q_heads=self.num_v_heads,
            num_kv_heads=self.num_k_heads,
            head_dim=self.head_k_dim,
            v_head_dim=self.head_v_dim,
            dtype=self.dtype,
            kv_dtype=self.dtype,
            page_size=self.page_size,
            phases=self.phases,
            spec_topk=1 if drafts else None,
            spec_draft_tokens=max(drafts) if drafts else None,
            graph=self.graph,
        )


AnyCase = Case | LinearCase


def linear_cases() -> tuple[LinearCase, ...]:
    """Every fixed case of linear layers, of all kinds."""
    return tuple(case for kind in SHAPES for case in _of_kind(kind))


def in_dims_of(card: BackendCard, case: LinearCase) -> LinearCase:
    """The case, or where the card refuses its heads and the case is not about them, the case with
    the first dims that the card names for its kind."""
    clauses = [clause for clause in card.clauses if clause.kind.admits(case.kind)]
    dims = case.head_k_dim, case.head_v_dim
    if dims != (USUAL_DIM, USUAL_DIM) or any(
        clause.head_dim.admits(USUAL_DIM) and clause.v_head_dim.admits(USUAL_DIM)
        for clause in clauses
    ):
        return case
    for clause in clauses:
        for k_dim, v_dim in product(clause.head_dim.examples(), clause.v_head_dim.examples()):
            if isinstance(k_dim, int) and isinstance(v_dim, int):
                return replace(case, head_k_dim=k_dim, head_v_dim=v_dim)
    return case


def linear_in_graphs(cases: tuple[LinearCase, ...]) -> tuple[LinearCase, ...]:
    """The cases of steps alone that graphs serve, as cases that run from graphs."""
    return tuple(
        replace(case, name=f"{case.name}-graph", graph=True)
        for case in cases
        if all(step.can_be_captured for step in case.steps)
    )


def _of_kind(kind: str) -> Iterator[LinearCase]:
    steps: dict[str, tuple[Step, ...]] = {
        "decode": (decode(5, 70, 2),),
        "decode-first-token": (decode(1, 9, 1, 0),),
        "decode-padding": (decode(20, 3, padding=3),),
        "decode-changing-batch-size": (decode(9, 40, 22), decode(31), decode(2, 60, 17, 5)),
        "extend": (extend((0, 37), (0, 1), (0, 20)),),
        "extend-long": (extend((0, 300), (64, 65)),),
        "extend-prefix": (extend((16, 5), (48, 19), (0, 11)),),
        "extend-chunk-edges": (extend((0, 64), (7, 128), (0, 63), (1, 16)),),
        "extend-fewer-than-taps": (extend((9, 1), (0, 2), (2, 1), (1, 3)),),
        "extend-nothing-new": (extend((20, 0), (5, 7), (9, 0)),),
        "extend-padding": (extend((4, 9), (0, 20), padding=2, trailing=3),),
        "mixed": (extend((0, 21), (40, 1), (17, 8), (5, 1), mode=ForwardMode.MIXED),),
        "extend-then-decode": (extend((0, 30), (16, 11)), decode(31, 28)),
        "idle": (decode(7, 12), extend(mode=ForwardMode.IDLE)),
        "verify": (verify(4, 20, 3, 70),),
        "verify-one-token": (verify(1, 9, 40),),
        "verify-first-tokens": (verify(3, 0, 7, 0, 2),),
        "verify-more-than-taps": (verify(9, 1, 30),),
        "verify-padding": (verify(5, 6, 33, padding=3),),
        "verify-then-decode": (verify(3, 30, 11, 4), decode(31, 28), verify(3, 9, 60, 1)),
        "verify-changing-drafts": (verify(6, 30, 11), verify(2, 31, 12), verify(6, 5, 2)),
        "extend-then-verify": (extend((0, 30), (16, 11)), verify(4, 30, 27)),
    }
    for name, of_case in steps.items():
        yield _case(f"{kind}-{name}", kind, *of_case)
    yield _case(f"{kind}-host-lens", kind, extend((0, 21), (40, 9)), host_lens=True)
    settings: dict[str, dict[str, Any]] = {
        "float16": {"dtype": "float16"},
        "float32": {"dtype": "float32"},
        "two-taps": {"conv_size": 2, "conv_dims": (40,)},
        "bias": {"conv_bias": True, "conv_dims": (24, 40), "conv_size": 4},
    }
    if kind != "conv":
        settings |= {
            "strong-decay": {"strong_decay": True},
            "no-norm": {"qk_l2norm": False},
            "one-head": {"num_k_heads": 1, "num_v_heads": 1},
        }
    if kind not in ("mamba1", "conv"):
        settings |= {
            "dims-128": {"head_k_dim": 128, "head_v_dim": 128},
            "dims-128-64": {"head_k_dim": 128},
            "dims-64-128": {"head_v_dim": 128},
            "8-heads-over-2": {"num_k_heads": 2, "num_v_heads": 8},
        }
    if kind == "mamba1":
        settings |= {
            "100-channels": {"num_v_heads": 100},
            "48-channels-in-3-groups": {"num_k_heads": 3, "num_v_heads": 48},
            "state-of-5": {"head_k_dim": 5},
            "state-of-64": {"head_k_dim": 64},
            "normed": {"qk_l2norm": True},
        }
    for name, given in settings.items():
        yield _case(f"{kind}-decode-{name}", kind, decode(45, 3, 17), **given)
        yield _case(f"{kind}-extend-{name}", kind, extend((0, 70), (9, 20)), **given)
        yield _case(f"{kind}-verify-{name}", kind, verify(2, 45, 3), **given)


def _case(name: str, kind: str, *steps: Step, **settings: Any) -> LinearCase:  # noqa: ANN401  # fields of LinearCase
    """A single step is followed by another of the same kind, which reveals stale metadata."""
    if len(steps) == 1:
        steps = (*steps, steps[0].varied(1024))
    given = {**SHAPES[kind], **settings}
    return LinearCase(name=name, steps=steps, kind=kind, **given)  # type: ignore[arg-type]  # a key of SHAPES
