"""Cost of a choice once everything is loaded: the decision alone, with every verdict, refused.

The cards are made up, with limits like those of real ones: five vendors, clauses for two dtypes,
page sizes, head dims, drafts; one card is portable and serves every request. Every run asks another
question, so that no answer is cached. Medians are printed in milliseconds, of wall time and of CPU
time, which other jobs disturb less, and as ratios of wall time to one verdict (`check` of the
portable card in decode), which hold on a slower machine too.

    python -m benchmarks.choosing [--rounds N] [--seed N] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option

from attnmux.core import NoBackend, Offer, Platform, Request, solve
from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Prior,
    at_most,
    between,
    emulated,
    includes,
    multiple_of,
    one_of,
    runtimes,
    versions,
)
from attnmux.core.verbs import check
from attnmux.testing.bench import Report, facts

SMALL, LARGE = 40, 1000
COLUMNS = {"": "", "ms": ".3f", "CPU ms": ".3f", "ratio": ".0f", "at most": "g"}
MACHINES = {
    "nvidia": (versions(">=9.0,<10"), versions(">=8.0"), versions(">=10.0,<12.2")),
    "amd": (versions(">=9.4,<10"), ANY),
    "intel": (ANY,),
    "ascend": (ANY,),
    "cpu": (ANY,),
}
PLATFORM = Platform.parse("nvidia:sm90,cuda=12.8")
PAGES = (ANY, emulated(1), one_of(64, 32, 16), one_of(128), multiple_of(16))


def cards(number: int, rng: random.Random) -> list[Offer]:
    """Offers of six plugins, six in ten of them for the platform's vendor."""
    found = [_offer(place, rng) for place in range(1, number)]
    portable = BackendCard(
        name="portable",
        summary="serves all",
        factory="made.up:Backend",
        clauses=(Clause.when(page_size=emulated(1)),),
        priors=(Prior(rank=900, source="made up"),),
    )
    return [Offer(card=portable, plugin="portable"), *found]


def _offer(place: int, rng: random.Random) -> Offer:
    vendor = rng.choice(["nvidia"] * 5 + [*MACHINES])
    latent = rng.random() < 0.3
    shared = {
        "vendor": one_of(vendor),
        "version": rng.choice(MACHINES[vendor]),
        "runtime": runtimes("cuda>=12.3") if vendor == "nvidia" else ANY,
        "features": includes("amx") if vendor == "cpu" else ANY,
        "kind": one_of("mla" if latent else "mha"),
        "kv_lora_rank": one_of(512) if latent else NONE,
        "qk_rope_head_dim": one_of(64) if latent else NONE,
        "page_size": rng.choice(PAGES),
        "head_dim": rng.choice([one_of(64, 128, 256), multiple_of(8, most=256)]),
        "group_size": rng.choice([ANY, between(1, 16)]),
        "spec_topk": rng.choice([ANY, ANY, NONE, at_most(1)]),
        "sliding_window": rng.choice([ANY, NONE]),
        "sinks": rng.choice([ANY, NONE]),
        "custom_mask": ANY,
        "graph": rng.choice([ANY, ANY, NONE]),
        "lse": ANY,
    }
    phases = rng.choice([("extend", "decode", "verify", "draft", "encoder"), ("decode",)])
    return Offer(
        card=BackendCard(
            name=f"backend{place}",
            summary="made up",
            factory="made.up:Backend",
            requires=("torch>=2.11", f"kernels-{place}>=1"),
            clauses=tuple(
                Clause(
                    **{
                        **shared,
                        "phase": one_of(*phases),
                        "dtype": one_of(dtype),
                        "kv_dtype": one_of(dtype, *stored),
                        "deterministic": deterministic,
                    }
                )
                for dtype in ("bfloat16", "float16")
                for stored, deterministic in (((), ANY), (("fp8_e4m3",), NONE))
            ),
            priors=(
                Prior(
                    rank=rng.randrange(100),
                    when=Clause.when(spec_topk=at_most(0)),
                    source="made up",
                ),
                Prior(
                    rank=rng.randrange(100), when=Clause.when(page_size=one_of(1)), source="made up"
                ),
                Prior(rank=rng.randrange(100), source="made up"),
            ),
        ),
        plugin=f"plugin{place % 6}",
        distribution=f"attnmux-plugin{place % 6}",
        version="1.0",
    )


def requests(rng: random.Random) -> Iterator[Request]:
    """Requests of all five phases, no two alike. The solver finds the page size."""
    for number in count():
        yield Request(
            num_q_heads=4 * (8 + number),
            num_kv_heads=8 + number,
            head_dim=rng.choice([64, 128]),
            dtype="bfloat16",
            kv_dtype=rng.choice([None, "fp8_e4m3"]),
            spec_topk=rng.choice([1, 4]),
            sliding_window=rng.choice([None, 127]),
            multimodal=True,
            graph=True,
        )


def questions(
    offers: Sequence[Offer], many: Sequence[Offer], rounds: int
) -> Mapping[str, tuple[Callable[[Request], object], int, float | None]]:
    """By name: the question, how often it is asked, and its bar in milliseconds."""

    def decide(found: Sequence[Offer], request: Request) -> object:
        return solve(request, PLATFORM, found)

    def explain(request: Request) -> object:
        return len(solve(request, PLATFORM, offers).candidates)

    def refuse(found: Sequence[Offer], request: Request) -> object:
        """No card but the portable one serves trees in float32 over pages of 7."""
        asked = request.replace(dtype="float32", page_size=7, spec_topk=4, deterministic=True)
        try:
            return solve(asked, PLATFORM, found[1:])
        except NoBackend as refusal:
            return len(refusal.candidates)

    def one(request: Request) -> object:
        return check(offers[0].card, "decode", request, PLATFORM)

    few = max(rounds // 10, 5)
    return {
        "one verdict": (one, rounds, None),
        f"{SMALL} cards, the decision": (partial(decide, offers), rounds, 1),
        f"{SMALL} cards, every reason and hint": (explain, rounds, 10),
        f"{SMALL} cards, a refusal with all hints": (partial(refuse, offers), few, None),
        f"{LARGE} cards, the decision": (partial(decide, many), few, 50),
        f"{LARGE} cards, a refusal with all hints": (partial(refuse, many), 1, None),
    }


def measure(run: Callable[[Request], object], rounds: int, asked: Iterator[Request]) -> list[float]:
    """Median milliseconds of a call, wall and CPU time. The first two calls fill caches of parsed
    text and do not count."""
    taken = []
    for _ in range(rounds + 2):
        request = next(asked)
        start, busy = time.perf_counter(), time.process_time()
        run(request)
        taken.append((time.perf_counter() - start, time.process_time() - busy))
    return [statistics.median(clock) * 1e3 for clock in zip(*taken[2:], strict=True)]


@click.command()
@rounds_option(200)
@click.option("--seed", default=0, help="Of the cards and the requests.")
@json_option
def main(rounds: int, seed: int, path: Path | None) -> None:
    """Print the cost of a choice, in milliseconds and as a ratio to one verdict.

    Over many cards, a tenth of the rounds.
    """
    rng, unit = random.Random(seed), None
    offers, many = cards(SMALL, rng), cards(LARGE, rng)
    asked, about = requests(rng), facts(torch.device("cpu"), "attnmux-core")
    with Report(COLUMNS, about, path, title="requests of 5 phases, medians") as report:
        for name, (run, count, most) in questions(offers, many, rounds).items():
            wall, cpu = measure(run, count, asked)
            unit = unit or wall
            missed = most is not None and wall > most
            report.add(name, wall, cpu, wall / unit, most, missed=missed)


if __name__ == "__main__":
    main()
