"""KV interleaved over two ranks with every backend: its own kernels, or those of its emulator.

A few cases of each; `tools/prove_ranks.py` runs all of them.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import replace

import pytest

from attnmux.distributed import HeadSplit, RankGroup
from attnmux.emulators.candidates import EMULATED, emulated
from attnmux.emulators.rank_cases import run_on_ranks
from attnmux.emulators.ranks import run_ranks
from attnmux.emulators.whole_heads import copies_of
from attnmux.testing import Candidate, Outcome, find_candidate, standard_cases

CASES = (
    "decode-sinks-lse",
    "extend-fp8_e5m2-saturated",
    "extend-padding",
    "verify-chain",
    "decode-fp8_e4m3-scales",
    "mla-verify-chain",
    "mla-decode",
)
MOST = 4
"""Cases of a backend that run; kernels in the interpreter have half as many."""

WITHOUT_LSE = (
    "aiter",
    "aiter_mla",
    "aiter_mla_prefill",
    "cutlass_mla",
    "intel_amx",
    "intel_xpu",
    "trtllm_mha",
    "trtllm_mla",
    "vllm_xpu",
)
WITHOUT_DECODE = ("fa4",)
OF_THIS_MACHINE = ("torch_native",)
NAMES = (*(name for name in EMULATED if "-" not in name), *OF_THIS_MACHINE)
NEEDED = {"aiter": "aiter", "triton": "triton", "vllm_xpu": "vllm_xpu_kernels"}
"""Packages that an emulator needs."""


def missing(name: str) -> bool:
    return name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None


def conform(group: RankGroup) -> dict[str, list[Outcome]]:
    """By backend: the outcomes of this rank, those of cases that were refused too."""
    portable = find_candidate("torch_native", device="cpu")
    found: dict[str, list[Outcome]] = {}
    for name in NAMES:
        if missing(name):
            continue
        here = name in OF_THIS_MACHINE
        backend = nullcontext(find_candidate(name, device="cpu")) if here else emulated(name)
        page = 16 if here else EMULATED[name].page_sizes[-1]
        slow = not here and EMULATED[name].is_interpreted

        with backend as candidate:
            found[name] = outcomes(candidate, portable, group, page, MOST // 2 if slow else MOST)
    return found


def outcomes(
    found: Candidate, portable: Candidate, group: RankGroup, page: int, most: int
) -> list[Outcome]:
    by_name = {case.name: case for case in standard_cases([page * group.size])}
    done: list[Outcome] = []
    for number, name in enumerate(CASES):
        if sum(each.status != "refused" for each in done) == most:
            break
        case = by_name[f"{name}-page{page * group.size}"]
        split = HeadSplit(group=group, kv_copies=copies_of(case, group.size))
        interleave = (1, page)[number % 2]
        # Prefixes are gathered in many chunks, or in one
        chunk_bytes = (4096, 1 << 29)[number % 2]
        outcome = run_on_ranks(
            found, portable, case, split, interleave=interleave, chunk_bytes=chunk_bytes
        )
        done.append(replace(outcome, error=None))  # errors cannot be pickled
    return done


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Outcome]]]:
    """One pair of processes for all backends: to import torch takes longer than a case."""
    return run_ranks(conform, 2, tmp_path_factory.mktemp("ranks"), deadline=300.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.turns(12)
def test_the_suite_agrees(of_ranks, name: str) -> None:
    if missing(name):
        pytest.skip(f"needs {NEEDED[name]}")
    for found in of_ranks:
        failed = [f"{each.case}: {each.message}" for each in found[name] if each.status == "failed"]
        passed = [each.case for each in found[name] if each.status == "passed"]
        assert not failed
        assert bool(passed) is (name not in (*WITHOUT_LSE, *WITHOUT_DECODE))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "lse: not served") for name in WITHOUT_LSE),
        *((name, "phase: asked for decode, serves extend") for name in WITHOUT_DECODE),
    ],
)
@pytest.mark.turns(3)
def test_who_cannot_decode_over_ranks_is_refused(of_ranks, name: str, reason: str) -> None:
    if missing(name):
        pytest.skip(f"needs {NEEDED[name]}")
    said = [str(each) for outcome in of_ranks[0][name] for each in outcome.reasons]
    assert any(each.startswith(reason) for each in said)
