"""Compares what attnmux chooses for published models with what SGLang and vLLM take by their rules.

    python -m tools.compare_choices [--json FILE]

The models are those of tests/core/configs/published.py, on 8 platforms, with one rank and with 8,
bfloat16 unless the model states another dtype. Each difference is counted by its reason: why the
card of the engine's backend does not serve the layers here, or the rank by which another serves
them. Exits with 1 for a reason that nobody has looked at, which `reasons.py` lists.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

from attnmux.configs import request_from_model
from attnmux.core import (
    Decision,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
    Plugins,
    Request,
    solve,
)
from tools.compare_choices.engines import COUNTERPARTS, NOTHING, sglang, vllm
from tools.compare_choices.reasons import LOOKED_AT

MODELS = Path(__file__).parents[2] / "tests/core/configs/published.py"
PLATFORMS = (
    *(f"nvidia:{arch},cuda=13.0" for arch in ("sm80", "sm89", "sm90", "sm100", "sm120")),
    *("amd:gfx942,rocm=7.0", "intel:xe2", "cpu:x86_64,features=amx+avx512_bf16+cxx_compiler"),
)
ENGINES = {"SGLang": sglang, "vLLM": vllm}
RANKS = (1, 8)
Answer = tuple[str, str, str]
"""What the engine takes, what attnmux does, and why they differ; "" if they do not."""


class Question(NamedTuple):
    model: str
    tp: int
    platform: str
    request: Request


def questions() -> Iterator[Question]:
    """Questions that a decoder asks: encoders have choosers of their own, and what no request
    expresses has none."""
    for name, expected, config in run_path(str(MODELS))["ROWS"]:
        if expected.startswith("refused: "):
            continue
        for tp in RANKS:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(config))
                try:
                    request = request_from_model(folder, tp=tp)
                except InvalidInput:  # heads that 8 ranks do not divide
                    continue
            if "decode" not in request.phases:
                continue
            request = request.replace(
                phases=("extend", "decode"), dtype=request.dtype or "bfloat16"
            )
            for platform in PLATFORMS:
                yield Question(name, tp, platform, request)


def compared(question: Question, offers: Sequence[Offer], theirs: str) -> Answer:
    names = COUNTERPARTS.get(theirs) or tuple(
        offer.card.name for offer in offers if theirs in (offer.card.name, *offer.card.aliases)
    )
    try:
        decision = solve(question.request, Platform.parse(question.platform), offers)
    except NoBackend:
        return theirs, NOTHING, "" if theirs == NOTHING else "no backend serves it"
    chosen = [decision.phases[phase].backend for phase in ("extend", "decode")]
    ours = " + ".join(dict.fromkeys(chosen))
    if theirs == NOTHING:
        return theirs, ours, "the engine has no backend for it"
    return theirs, ours, "" if set(chosen) <= set(names) else _why(decision, names, chosen)


def because(engine: str, answer: Answer) -> str:
    """What is known of a difference; "" if nobody has looked at its kind."""
    theirs, _, why = answer
    return LOOKED_AT.get((engine, theirs, why), "")


def _why(decision: Decision, names: Sequence[str], chosen: Sequence[str]) -> str:
    """Why none of the named backends serves every phase."""
    for phase, winner in zip(("extend", "decode"), chosen, strict=True):
        verdicts = [one for one in decision.candidates if one.phase == phase]
        named = [one for one in verdicts if one.backend in names]
        if winner in names:
            continue
        if any(one.rank is not None for one in named):
            return "ranks later"
        nearest = min(named, key=lambda one: len(one.reasons), default=None)
        if nearest is None:
            return "no such card"
        codes = [each.axis for each in nearest.reasons]
        if nearest.obstacle is not None:
            codes += [
                f"{each.axis} of {nearest.obstacle.phase}" for each in nearest.obstacle.reasons
            ]
        return ", ".join(dict.fromkeys(codes))
    return "serves one phase"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="a file for every answer")
    args = parser.parse_args()
    offers, asked = Plugins.load().offers(), [*questions()]
    rows: list[dict[str, Any]] = []
    unknown = 0
    for name, rule in ENGINES.items():
        counts: Counter[tuple[str, str, str, str]] = Counter()
        for one in asked:
            theirs = rule(one.request, Platform.parse(one.platform))
            answer = compared(one, offers, theirs)
            counts[(one.platform.partition(",")[0], *answer)] += 1
            rows.append({"engine": name, **one._asdict(), "answer": answer})
            rows[-1]["request"] = str(one.request.to_dict())
        same = sum(count for (*_, why), count in counts.items() if not why)
        print(f"\n## {name}: the same in {same} of {len(asked)}\n")
        print("| platform | times | its own | attnmux | the card says | because |")
        print("|---|--:|---|---|---|---|")
        for (platform, theirs, ours, why), count in sorted(counts.items()):
            if why:
                known = because(name, (theirs, ours, why))
                unknown += not known
                print(f"| {platform} | {count} | {theirs} | {ours} | {why} | {known or '?'} |")
    print(f"\n{unknown} reasons that nobody has looked at")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    sys.exit(min(unknown, 1))


if __name__ == "__main__":
    main()
