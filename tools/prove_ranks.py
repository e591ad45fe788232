"""Hold backends to the conformance suite on a group of ranks that interleave their KV.

    python tools/prove_ranks.py DIR triton flex_attention --device cuda [--graphs] [--shards 8]
    python tools/prove_ranks.py DIR fa3 --emulated

Every rank runs the same cases with its part of the heads and keys, and compares the whole answer
with the float64 reference. Cases are dealt out to `--shards` groups of `--ranks` processes. A group
that loses a device or a process, or that hangs, is followed by another for the cases that are left.
Every outcome is a line of `DIR/NAME.SHARD.RANK.jsonl` as soon as it is known: started again, the
script goes on where it was. A table of the outcomes closes the run, then what failed. The status is
1 if a case fails on a rank, or if none passes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", str(int("--emulated" in sys.argv)))  # before any Triton

import torch
import torch.distributed as dist

from attnmux.distributed import HeadSplit, RankGroup
from attnmux.emulators.candidates import EMULATED, emulated
from attnmux.emulators.rank_cases import run_on_ranks
from attnmux.emulators.whole_heads import can_be_split, copies_of
from attnmux.testing import Candidate, Case, find_candidate, in_graphs, standard_cases

LOST_GROUP = 75
GRACE = 10.0
"""Seconds that a case may still run when the time is over."""
LATE = 5.0
"""Seconds that a rank whose case failed waits for the others, which may wait for it."""
MOST_SHOWN = 12
"""Failures and reasons of one backend in the report; the files have all."""

Lines = dict[tuple[str, str], list[dict[str, Any]]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where outcomes go")
    parser.add_argument("backends", nargs="+", metavar="BACKEND")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emulated", action="store_true", help=f"of {', '.join(EMULATED)}")
    parser.add_argument("--page-size", type=int, action="append", default=[], help="of one rank")
    parser.add_argument("--graphs", action="store_true", help="captured and replayed steps too")
    parser.add_argument("-k", dest="words", default="", help="only cases with this in their names")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shards", type=int, default=1, help="groups at a time")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no case after that")
    parser.add_argument("--case-seconds", type=float, default=120.0, help="of a case, at most")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def cases_of(name: str, asked: argparse.Namespace) -> list[tuple[int, Case]]:
    """The numbered cases of a backend."""
    usual = EMULATED[name].page_sizes if asked.emulated else (8, 32)
    cases = standard_cases([size * asked.ranks for size in asked.page_size or usual])
    cases = (*cases, *in_graphs(cases)) if asked.graphs else cases
    return [
        (number, case)
        for number, case in enumerate(case for case in cases if can_be_split(case, asked.ranks))
        # CUDA writes keys that requests share in no set order, so that ranks would have other keys
        if asked.device == "cpu" or not any(step.shared_prefix for step in case.steps)
        if asked.words in case.name
    ]


def known(folder: Path, backends: list[str]) -> Lines:
    """By backend and case: what the ranks that began it have said last, without cases that the end
    of the time cut off."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name in backends:
        for path in sorted(folder.glob(f"{name}.*.*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                found.setdefault((name, line["case"]), {})[path.suffixes[-2]] = line
    return {
        key: list(by_rank.values())
        for key, by_rank in found.items()
        if not any(line.get("cut") for line in by_rank.values())
    }


def work(asked: argparse.Namespace) -> int:
    """Run what is left of a shard, as one of its ranks. LOST_GROUP if it needs another group."""
    device = asked.device.partition(":")[0]
    group = RankGroup.start(device, seconds=asked.case_seconds)
    begun = known(asked.folder, asked.backends)
    group.exchange("")  # nobody writes before all have read
    cases = sorted((number, name) for name in asked.backends for number, _ in cases_of(name, asked))
    by_name = {name: dict(cases_of(name, asked)) for name in asked.backends}
    with ExitStack() as stack:
        candidates: dict[str, Candidate] = {}
        for number, name in cases[asked.work :: asked.shards]:
            case = by_name[name][number]
            if (name, case.name) in begun:
                continue
            if any(over for (over,) in group.exchange_numbers([int(time.time() > asked.until)])):
                break
            if name not in candidates:
                backend: AbstractContextManager[Candidate]
                plain = not asked.emulated
                backend = (
                    nullcontext(find_candidate(name, device=str(group.device)))
                    if plain
                    else emulated(name)
                )
                candidates[name] = stack.enter_context(backend)
            path = asked.folder / f"{name}.{asked.work}.{group.rank}.jsonl"
            if not run(candidates[name], case, number, group, path, asked):
                return LOST_GROUP
    return 0


def run(
    found: Candidate,
    case: Case,
    number: int,
    group: RankGroup,
    path: Path,
    asked: argparse.Namespace,
) -> bool:
    """Run a case and keep its outcome. Whether the group can go on."""
    left = asked.until + GRACE - time.time()
    split = HeadSplit(group=group, kv_copies=copies_of(case, group.size))
    interleave = (1, 4, case.page_size // group.size)[number % 3]
    interleave = interleave if case.page_size // group.size % interleave == 0 else 1
    portable = find_candidate("torch_native", device=found.device)
    with path.open("a") as file:

        def keep(**line: object) -> None:
            file.write(json.dumps({"case": case.name, "execution": case.execution, **line}) + "\n")
            file.flush()

        keep(cut=left < asked.case_seconds)
        # A rank may wait for another in a call that no signal of Python's interrupts
        faulthandler.dump_traceback_later(min(left, asked.case_seconds), exit=True)
        outcome = run_on_ranks(found, portable, case, split, interleave=interleave, seed=number)
        faulthandler.cancel_dump_traceback_later()
        keep(**outcome.to_dict())
    patience = LATE if outcome.status == "failed" else asked.case_seconds
    try:
        torch.ones(1, device=group.device).item()
        dist.barrier(group.hosts, async_op=True).wait(timedelta(seconds=patience))
    except RuntimeError:
        return False
    return True


def follow(asked: argparse.Namespace, number: int) -> str:
    """Start groups until a shard is done; what ended it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(asked.ranks), __file__, *sys.argv[1:], "--work", str(number)]
    command += ["--until", str(asked.until)]
    attempt = 0
    while time.time() < asked.until:
        attempt += 1
        before = len(known(asked.folder, asked.backends))
        with (asked.folder / f"{number}.log").open("a") as log:
            code = subprocess.run(command, stdout=log, stderr=log).returncode
        if code == 0 and time.time() < asked.until:
            return "done"
        if code and len(known(asked.folder, asked.backends)) == before and attempt > 1:
            return f"ended with {code} before any case"
    return "out of time"


def report(asked: argparse.Namespace, ends: list[str]) -> Iterator[str]:
    """The table, then what failed and why cases were refused."""
    lines = known(asked.folder, asked.backends)
    yield "| backend | agreed eagerly | from graphs | refused | largest error | not begun |"
    yield "|---|---|---|---|---|---|"
    notes: list[str] = []
    for name in asked.backends:
        outcomes = [together(of, asked.ranks) for (owner, _), of in lines.items() if owner == name]
        counts = Counter((line["execution"], line["status"]) for line in outcomes)
        ran = {
            how: sum(counts[how, status] for status in ("passed", "failed"))
            for how in ("eager", "graph")
        }
        agreed = [f"{counts[how, 'passed']} of {num}" if num else "-" for how, num in ran.items()]
        refused = counts["eager", "refused"] + counts["graph", "refused"]
        largest = max((line["max_error"] for line in outcomes), default=0.0)
        unknown = len(cases_of(name, asked)) - len(outcomes)
        yield f"| `{name}` | {' | '.join(agreed)} | {refused} | {largest:.4f} | {unknown} |"
        failed = [line for line in outcomes if line["status"] == "failed"]
        notes += [f"{name} {line['case']}: {line['message'][:300]}" for line in failed[:MOST_SHOWN]]
        reasons = Counter(reason for line in outcomes for reason in line["reasons"])
        notes += [f"{name} refused {num} times: {why}" for why, num in reasons.most_common(4)]
    yield from ("", f"shards: {', '.join(sorted(set(ends)))}", *notes)


def together(lines: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """The outcome of a case on all ranks: that of a rank which failed, if any."""
    missing = {"status": "failed", "message": "ended a process", "max_error": 0.0, "reasons": []}
    outcomes = [line if "status" in line else {**line, **missing} for line in lines]
    if len(outcomes) < ranks:
        outcomes.append({**lines[0], **missing})
    failed = [outcome for outcome in outcomes if outcome["status"] == "failed"]
    failed.sort(key=lambda outcome: outcome["message"] == missing["message"])
    if not failed and len({outcome["status"] for outcome in outcomes}) > 1:
        failed = [{**outcomes[0], **missing, "message": "refused by some ranks"}]
    worst = max(outcome["max_error"] for outcome in outcomes)
    return {**(failed or outcomes)[0], "max_error": worst}


def main() -> int:
    asked = parsed()
    if asked.work is not None:
        if code := work(asked):
            os._exit(code)  # no rank can leave a broken group in order
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    asked.until = time.time() + asked.seconds
    with ThreadPoolExecutor(asked.shards) as pool:
        ends = list(pool.map(lambda number: follow(asked, number), range(asked.shards)))
    print("\n".join(report(asked, ends)))
    lines = known(asked.folder, asked.backends).values()
    statuses = {together(each, asked.ranks)["status"] for each in lines}
    return int("failed" in statuses or "passed" not in statuses)


if __name__ == "__main__":
    sys.exit(main())
