"""Run the conformance suite on a group of ranks that interleave their KV.

    torchrun --nproc-per-node 2 tools/prove_ranks.py --device cuda --backend triton
    torchrun --nproc-per-node 2 tools/prove_ranks.py --backend fa3 --emulated

Every rank runs the same cases with its part of the heads and keys, and compares the whole answer
with the float64 reference. Ends with status 1 if a case fails on a rank, or if none runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

os.environ.setdefault("TRITON_INTERPRET", str(int("--emulated" in sys.argv)))  # before any Triton

from attnmux.distributed import HeadSplit, RankGroup
from attnmux.emulators.candidates import EMULATED, emulated
from attnmux.emulators.rank_cases import run_on_ranks
from attnmux.emulators.whole_heads import can_be_split, copies_of
from attnmux.testing import Candidate, find_candidate, in_graphs, standard_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emulated", action="store_true", help=f"one of {', '.join(EMULATED)}")
    parser.add_argument("--page-size", type=int, action="append", default=[], help="of one rank")
    parser.add_argument("--graphs", action="store_true", help="captured and replayed steps")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no case after that")
    asked = parser.parse_args()
    group = RankGroup.start(asked.device)
    with candidate(asked.backend, str(group.device), is_emulated=asked.emulated) as found:
        usual = EMULATED[asked.backend].page_sizes if asked.emulated else (8, 32)
        sizes = asked.page_size or usual
        failed = prove(found, group, sizes, graphs=asked.graphs, seconds=asked.seconds)
    sys.exit(int(failed))


@contextmanager
def candidate(name: str, device: str, *, is_emulated: bool) -> Iterator[Candidate]:
    if not is_emulated:
        yield find_candidate(name, device=device)
        return
    with emulated(name) as found:
        yield found


def prove(
    found: Candidate, group: RankGroup, sizes: Sequence[int], *, graphs: bool, seconds: float
) -> bool:
    """Run the cases, print the counts of each rank, and return whether something is wrong."""
    portable = find_candidate("torch_native", device=found.device)
    cases = standard_cases([size * group.size for size in sizes])
    cases = in_graphs(cases) if graphs else cases
    cases = tuple(case for case in cases if can_be_split(case, group.size))
    began, counts, failed, refused = time.monotonic(), Counter[str](), [], Counter[str]()
    for number, case in enumerate(cases):
        # CUDA writes keys that requests share in no set order, so that ranks would have other keys
        if group.device.type != "cpu" and any(step.shared_prefix for step in case.steps):
            continue
        # Every rank ends after the same case
        spent = min(each for (each,) in group.exchange_numbers([int(time.monotonic() - began)]))
        if spent > seconds:
            counts["not begun"] = len(cases) - number
            break
        split = HeadSplit(group=group, kv_copies=copies_of(case, group.size))
        interleave = (1, 4, case.page_size // group.size)[number % 3]
        interleave = interleave if case.page_size // group.size % interleave == 0 else 1
        outcome = run_on_ranks(found, portable, case, split, interleave=interleave, seed=number)
        counts[outcome.status] += 1
        if outcome.status == "failed":
            failed.append(f"{case.name}: {outcome.message[:300]}")
        refused.update({str(reason) for reason in outcome.reasons})
    lines = [", ".join(f"{count} {word}" for word, count in counts.items()), *failed]
    lines += [f"refused {count} times: {reason}" for reason, count in refused.most_common(4)]
    for rank, each in enumerate(group.exchange("\n".join(lines))):
        if group.rank == 0:
            print(f"rank {rank}: {each}", flush=True)
    return bool(failed) or not counts["passed"]


if __name__ == "__main__":
    main()
