"""Run the conformance suite on a group of ranks that interleave their KV.

    torchrun --nproc-per-node 2 tools/prove_ranks.py --device cuda --backend triton

Every rank runs the same cases with its part of the heads and keys, and compares the whole answer
with the float64 reference. Ends with status 1 if a case fails on a rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial

from attnmux.core import RankGroup
from attnmux.distributed import HeadSplit
from attnmux.emulators.whole_heads import can_be_split, copies_of, viewed
from attnmux.testing import find_candidate, in_graphs, run_case, standard_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page-size", type=int, action="append", default=[])
    parser.add_argument("--graphs", action="store_true", help="captured and replayed steps")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no case after that")
    asked = parser.parse_args()
    group = RankGroup.start(asked.device)
    found = find_candidate(asked.backend, device=str(group.device))
    cases = standard_cases(asked.page_size or (16, 64))
    cases = in_graphs(cases) if asked.graphs else cases
    began, passed, failed = time.monotonic(), 0, []
    for number, case in enumerate(cases):
        # CUDA writes keys that requests share in no set order, so that ranks would have other keys
        shares = any(step.shared_prefix for step in case.steps)
        if not can_be_split(case, group.size) or (shares and group.device.type != "cpu"):
            continue
        # Every rank ends after the same case
        spent = min(each for (each,) in group.exchange_numbers([int(time.monotonic() - began)]))
        if spent > asked.seconds:
            break
        split = HeadSplit(group=group, kv_copies=copies_of(case, group.size))
        interleave = (1, 4, case.page_size // group.size)[number % 3]
        make = partial(viewed, heads=split, candidate=found, interleave=interleave)
        outcome = run_case(replace(found, factory=make), case, seed=number)
        if outcome.status == "passed":
            passed += 1
        elif outcome.status == "failed":
            failed.append(f"{case.name}: {outcome.message[:300]}")
    said = f"{passed} cases passed, {len(failed)} failed"
    for rank, each in enumerate(group.exchange("\n".join([said, *failed]))):
        if group.rank == 0:
            print(f"rank {rank}: {each}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
