"""KV interleaved over ranks: its layout, and the conformance suite on a group of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attnmux.core import BackendContext, ForwardMode, RankGroup
from attnmux.distributed import HeadSplit
from attnmux.emulators.ranks import run_ranks
from attnmux.emulators.whole_heads import WholeHeadsView
from attnmux.testing import Candidate, Case, find_candidate, run_case, standard_cases


def can_be_split(case: Case, size: int) -> bool:
    """Whether the case's keys may lie on several ranks, and its heads too."""
    modes = {step.mode for step in case.steps}
    return (
        modes <= {ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE}
        and case.kind in ("mha", "mla")
        and not any(case.windows)
        and not case.attention_chunk
        and not case.cross_attention
        and not case.multi_item
        and not case.is_encoder
        and case.save_kv_cache
        and not (case.kv_in_pool and modes != {ForwardMode.DECODE})
        and case.num_q_heads % size == 0
        and case.page_size % size == 0
    )


def copies_of(case: Case, size: int) -> int:
    """How many ranks hold the same KV heads."""
    return 1 if case.num_kv_heads % size == 0 else size // case.num_kv_heads


def viewed(
    context: BackendContext,
    options: Mapping[str, object],
    *,
    heads: HeadSplit,
    candidate: Candidate,
    **settings: int,
) -> WholeHeadsView:
    return WholeHeadsView(context, heads, candidate.build, **settings)


def conforms(group: RankGroup, backend: str, graph: bool) -> dict[str, str]:
    found = find_candidate(backend)
    outcomes = {}
    for seed, case in enumerate(standard_cases((16, 64))):
        if not can_be_split(case, group.size) or case.graph is not graph:
            continue
        split = HeadSplit(group=group, kv_copies=copies_of(case, group.size))
        interleave = (1, 4, case.page_size // group.size)[seed % 3]
        make = partial(
            viewed, heads=split, candidate=found, interleave=interleave, chunk_bytes=4096
        )
        candidate = replace(found, factory=make)
        outcome = run_case(candidate, case, seed=seed)
        outcomes[case.name] = outcome.status + outcome.message
    return outcomes


@pytest.mark.parametrize("size", [2])
def test_the_suite_agrees_on_a_group(tmp_path: Path, size: int) -> None:
    for outcomes in run_ranks(conforms, size, tmp_path, "torch_native", False, deadline=600.0):
        wrong = {name: said for name, said in outcomes.items() if said != "passed"}
        assert not wrong
        assert len(outcomes) > 30
