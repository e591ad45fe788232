"""KV interleaved over ranks: its layout, and the conformance suite on a group of ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import InvalidInput, LayerGroup, Request
from attnmux.core.find.cpu import probe_cpu
from attnmux.distributed import (
    HeadSplit,
    Interleaving,
    RankGroup,
    decide_interleaved,
    exchange_and_merge,
    interleaved_backend,
)
from attnmux.emulators.ranks import run_ranks
from attnmux.emulators.whole_heads import can_be_split, copies_of, viewed
from attnmux.testing import find_candidate, run_case, standard_cases
from attnmux.testing.run.comparison import OUTPUT_TOLERANCE, Tolerance

NUM_CASES = 24
MERGED = Tolerance(atol=0.016, rtol=0.016)
"""Of bfloat16. The ranks' parts are rounded to it before they are merged, and may be larger than
the whole: half a unit in the last place of a part near 4 is 0.0078."""


def conforms(group: RankGroup, backend: str, seed: int) -> dict[str, str]:
    found = find_candidate(backend)
    OUTPUT_TOLERANCE[torch.bfloat16] = MERGED  # in this rank's process
    cases = [case for case in standard_cases((16,)) if can_be_split(case, group.size)]
    outcomes = {}
    for number, case in enumerate(random.Random(seed).sample(cases, NUM_CASES)):
        split = HeadSplit(group=group, kv_copies=copies_of(case, group.size))
        interleave = (1, 4, case.page_size // group.size)[number % 3]
        # Prefixes are gathered in many chunks, or in one
        chunk_bytes = (4096, 1 << 29)[number % 2]
        make = partial(
            viewed, heads=split, candidate=found, interleave=interleave, chunk_bytes=chunk_bytes
        )
        outcome = run_case(replace(found, factory=make), case, seed=seed + number)
        outcomes[case.name] = outcome.status + outcome.message
    return outcomes


@pytest.mark.turns(over="size")
@pytest.mark.parametrize("size", [2, 4])
def test_the_suite_agrees_on_a_group(tmp_path: Path, size: int) -> None:
    seed = random.SystemRandom().randrange(1 << 16)
    for outcomes in run_ranks(conforms, size, tmp_path, "torch_native", seed, deadline=300.0):
        wrong = {name: said for name, said in outcomes.items() if said != "passed"}
        assert not wrong, f"seed {seed}"


def faulty(group: RankGroup, fault: str) -> str:
    """What the suite says of a group with a fault planted in one of its pieces."""
    patch = pytest.MonkeyPatch()
    if fault == "a rank's keys twice":
        patch.setattr(Interleaving, "owners", lambda self, slots: torch.full_like(slots, self.rank))
    elif fault == "LSE ignored":
        patch.setattr(
            interleaved_backend,
            "exchange_and_merge",
            lambda group, out, lse, merger: exchange_and_merge(group, out, torch.zeros_like(lse)),
        )
    elif fault == "keys of no request":
        patch.setattr(Interleaving, "lens", lambda self, lens, start=0, **_: lens - start)
    found = find_candidate("torch_native")
    case = next(each for each in standard_cases((16,)) if each.name == "decode-uneven-page16")
    make = partial(viewed, heads=HeadSplit(group=group), candidate=found)
    with patch.context():
        outcome = run_case(replace(found, factory=make), case)
    patch.undo()
    return outcome.status


@pytest.mark.parametrize("fault", ["a rank's keys twice", "LSE ignored", "keys of no request"])
def test_the_suite_finds_a_faulty_group(tmp_path: Path, fault: str) -> None:
    assert "failed" in run_ranks(faulty, 2, tmp_path, fault)


def test_the_same_case_passes_without_a_fault(tmp_path: Path) -> None:
    assert run_ranks(faulty, 2, tmp_path, "") == ["passed", "passed"]


@given(
    size=st.integers(1, 5),
    runs=st.integers(1, 4),
    interleave=st.integers(1, 5),
    start=st.integers(0, 200),
    length=st.integers(0, 200),
)
def test_every_place_lies_on_one_rank(
    size: int, runs: int, interleave: int, start: int, length: int
) -> None:
    every = [
        Interleaving(rank=rank, size=size, page_size=runs * interleave, interleave=interleave)
        for rank in range(size)
    ]
    slots = torch.arange(start, start + length)
    owners = every[0].owners(slots)
    assert owners.tolist() == [place // interleave % size for place in slots.tolist()]
    for rank, each in enumerate(every):
        own = each.local(slots[owners == rank])
        assert int(each.lens(torch.tensor(length), start)) == len(own)
        assert len(own.unique()) == len(own)
        assert torch.equal(each.mine(slots)[owners == rank], own)
        assert not each.mine(slots)[owners != rank].any()
        pages = slots[owners == rank] // each.whole_page
        assert torch.equal(own // each.page_size, pages)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"interleave": 3}, "a divisor of the page size, 4, got 3"),
        ({"rank": 2}, "rank: expected 0 to 1, got 2"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Interleaving(**{"rank": 0, "size": 2, "page_size": 4, **changes})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sliding_window": 8}, "sliding_window: expected nothing"),
        ({"alibi": True}, "alibi: expected nothing"),
        ({"relative_bias": True}, "relative_bias: expected nothing"),
        ({"attention_chunk": 8}, "attention_chunk: expected nothing"),
        ({"kv_dtype": "fp4"}, "kv_dtype: expected 8 bits or more"),
        ({"spec_topk": 2}, "spec_topk: expected 1, chains"),
        ({"spec_topk": 1}, "spec_draft_tokens: expected a number, with spec_topk"),
        ({"spec_topk": 1, "spec_draft_tokens": 4, "deterministic": True}, "deterministic: expec"),
        ({"other_layers": [LayerGroup(layers=1)]}, "other_layers: expected one: KV is interleaved"),
        ({"kind": "dual_chunk"}, "self attention of kind mha or mla"),
    ],
)
def test_requests_whose_keys_cannot_lie_on_several_ranks(asked, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        decide_interleaved(Request(**asked), probe_cpu(), (), size=2)
