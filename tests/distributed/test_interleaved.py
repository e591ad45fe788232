"""KV interleaved over ranks: its layout, and the conformance suite on a group of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attnmux.core import RankGroup
from attnmux.distributed import HeadSplit
from attnmux.emulators.ranks import run_ranks
from attnmux.emulators.whole_heads import can_be_split, copies_of, viewed
from attnmux.testing import find_candidate, run_case, standard_cases


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
