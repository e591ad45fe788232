"""Hold backends to the conformance suite in processes that may die, and go on with the next case.

    python tools/prove_cases.py DIR fa3 flashmla [--device cuda] [--shards 2] [--at-once 16]
    python tools/prove_cases.py DIR fa3 --set num_splits=8

`attnmux verify` runs a backend in one process. A kernel that faults takes the device's context with
it, and all later cases of the process fail with it; one that crashes takes the process. Here the
cases of a backend are dealt out to `--shards` processes, and a process that lost its device or its
life is followed by another for the cases that are left. Every outcome is a line of
`DIR/NAME.SHARD.jsonl` as soon as it is known: started again, the script goes on where it was.
A table of the outcomes closes the run, then what failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnmux.testing import Candidate, find_candidate, outside_points, run_case, try_point

LOST_DEVICE = 75
MOST_SHOWN = 12
"""Failures of one backend in the report; the files have all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Every `of`-th case of a backend."""

    folder: Path
    backend: str
    number: int
    of: int

    @property
    def path(self) -> Path:
        return self.folder / f"{self.backend}.{self.number}.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def forget_begun(self) -> None:
        """Drop the last line where it is a case without an outcome."""
        lines = self.lines()
        if lines and "status" not in lines[-1]:
            self.path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """By case. One that was begun and has no outcome ended its process."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.lines():
            missing = {"status": "failed", "message": "ended the process", "max_error": 0.0}
            found[line["case"]] = line if "status" in line else {**line, **missing}
        return found


def work(share: Share, device: str, seed: int, options: Mapping[str, str]) -> int:
    """Run what is left of a share. LOST_DEVICE where a case broke the device's context."""
    candidate = find_candidate(share.backend, device=device, options=options)
    known = share.outcomes()
    with share.path.open("a") as file:

        def keep(**line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        for case in candidate.cases()[share.number :: share.of]:
            if case.name in known:
                continue
            keep(case=case.name, execution=case.execution)
            outcome = run_case(candidate, case, seed=seed)
            keep(**outcome.to_dict())
            if outcome.status == "failed" and is_lost(candidate):
                return LOST_DEVICE
        if share.number == 0:
            for point in outside_points(candidate):
                if point.name in known:
                    continue
                outcome = try_point(candidate, point)
                keep(**{**outcome.to_dict(), "execution": "limit"})
    return 0


def is_lost(candidate: Candidate) -> bool:
    """Whether the process can no longer use its device."""
    if candidate.device == "cpu":
        return False
    try:
        torch.zeros(1, device=candidate.device).add_(1).item()
    except RuntimeError:
        return True
    return False


def follow(share: Share, more: Sequence[str], until: float) -> str:
    """Start processes until the share is done; what ended it."""
    command = [sys.executable, __file__, str(share.folder), share.backend, *more]
    command += ["--shards", str(share.of), "--work", str(share.number)]
    while (left := until - time.monotonic()) > 0:
        before = len(share.lines())
        try:
            with share.path.with_suffix(".log").open("a") as log:
                code = subprocess.run(command, timeout=left, stdout=log, stderr=log).returncode
        except subprocess.TimeoutExpired:
            share.forget_begun()
            break
        if code == 0:
            return "done"
        if len(share.lines()) == before:
            return f"ended with {code} before any case"
    return "out of time"


def report(shares: Sequence[Share], ends: Sequence[str]) -> Iterator[str]:
    """The table, then what failed."""
    names = list(dict.fromkeys(share.backend for share in shares))
    yield "| backend | eager | graph | refused | limits | failed | largest error | ended |"
    yield "|---|---|---|---|---|---|---|---|"
    failures: list[str] = []
    for name in names:
        mine = [
            (share, end) for share, end in zip(shares, ends, strict=True) if share.backend == name
        ]
        outcomes = [each for share, _ in mine for each in share.outcomes().values()]
        counts = Counter((each["execution"], each["status"]) for each in outcomes)
        failed = [each for each in outcomes if each["status"] == "failed"]
        refused = counts["eager", "refused"] + counts["graph", "refused"]
        largest = max((each["max_error"] for each in outcomes), default=0.0)
        ended = ", ".join(sorted({end for _, end in mine}))
        yield (
            f"| {name} | {counts['eager', 'passed']} | {counts['graph', 'passed']} | {refused} "
            f"| {counts['limit', 'refused']} | {len(failed)} | {largest:.4f} | {ended} |"
        )
        failures += [
            f"{name} {each['case']}: {each['message'][:300]}" for each in failed[:MOST_SHOWN]
        ]
    yield from ("", *failures)


def option(text: str) -> tuple[str, str]:
    """Name and value of an option of the backends."""
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is no OPTION=VALUE")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where outcomes go")
    parser.add_argument("backends", nargs="+", metavar="BACKEND")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", dest="options", action="append", default=[], metavar="OPTION=VALUE", type=option
    )
    parser.add_argument("--shards", type=int, default=1, help="processes of each backend")
    parser.add_argument("--at-once", type=int, default=8, help="processes of all backends")
    parser.add_argument("--seconds", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    shares = [
        Share(folder=args.folder, backend=name, number=number, of=args.shards)
        for number in range(args.shards)
        for name in args.backends
    ]
    if args.work is not None:
        return work(shares[args.work], args.device, args.seed, dict(args.options))
    more = ["--device", args.device, "--seed", str(args.seed)]
    more += [f"--set={name}={value}" for name, value in args.options]
    until = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.at_once) as pool:
        ends = list(pool.map(lambda share: follow(share, more, until), shares))
    lines = list(report(shares, ends))
    print("\n".join(lines))
    has_failed = any(each["status"] == "failed" for s in shares for each in s.outcomes().values())
    return int(has_failed or any(end != "done" for end in ends))


if __name__ == "__main__":
    sys.exit(main())
