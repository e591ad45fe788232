"""Cost of a choice once everything is loaded: the decision alone, with every verdict, refused.

The cards are made up, with limits like those of real ones: five vendors, clauses for two dtypes,
page sizes, head dims, drafts; one card is portable and serves every request. Every run asks another
question, so that no answer is cached. Medians are printed in milliseconds, of wall time and of CPU
time, which other jobs disturb less, and as ratios of wall time to one verdict (`check` of the
portable card in decode), which hold on a slower machine too.

    python -m benchmarks.choosing [--rounds N] [--seed N]
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import count

import click
from rich.console import Console
from rich.table import Table

from attnmux.core import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Prior,
    Request,
    at_most,
    between,
    emulated,
    includes,
    multiple_of,
    one_of,
    runtimes,
    solve,
    versions,
    when,
)
from attnmux.core.choosing.judge.checking import check

SMALL, LARGE = 40, 1000
MACHINES = {
    "nvidia": (versions(">=9.0,<10"), versions(">=8.0"), versions(">=10.0,<12.2")),
    "amd": (versions(">=9.4,<10"), ANY),
    "intel": (ANY,),
    "ascend": (ANY,),
    "cpu": (ANY,),
}
PLATFORM = Platform.parse("nvidia:sm90,cuda=12.8")
POLICY = Policy(hypothetical=True)
PAGES = (ANY, emulated(1), one_of(64, 32, 16), one_of(128), multiple_of(16))


def cards(number: int, rng: random.Random) -> list[Offer]:
    """Offers of six plugins, six in ten of them for the platform's vendor."""
    found = [_offer(place, rng) for place in range(1, number)]
    portable = BackendCard(
        name="portable",
        summary="serves all",
        factory="made.up:Backend",
        clauses=(when(page_size=emulated(1)),),
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
                Prior(rank=rng.randrange(100), when=when(spec_topk=at_most(0)), source="made up"),
                Prior(rank=rng.randrange(100), when=when(page_size=one_of(1)), source="made up"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    run: Callable[[Request], object]
    rounds: int
    most: float | None = None
    """In milliseconds."""


def rows(offers: Sequence[Offer], many: Sequence[Offer], rounds: int) -> list[Row]:
    def decide(found: Sequence[Offer]) -> Callable[[Request], object]:
        return lambda request: solve(request, PLATFORM, found, POLICY)

    def explain(request: Request) -> object:
        return len(solve(request, PLATFORM, offers, POLICY).candidates)

    def refuse(found: Sequence[Offer]) -> Callable[[Request], object]:
        """No card but the portable one serves trees in float32 over pages of 7."""

        def run(request: Request) -> object:
            asked = request.replace(dtype="float32", page_size=7, spec_topk=4, deterministic=True)
            try:
                return solve(asked, PLATFORM, found[1:], POLICY)
            except NoBackend as refusal:
                return len(refusal.candidates)

        return run

    def one(request: Request) -> object:
        return check(offers[0].card, "decode", request, PLATFORM, policy=POLICY)

    few = max(rounds // 10, 5)
    return [
        Row(name="one verdict", run=one, rounds=rounds),
        Row(name=f"{SMALL} cards, the decision", run=decide(offers), rounds=rounds, most=1),
        Row(name=f"{SMALL} cards, every reason and hint", run=explain, rounds=rounds, most=10),
        Row(name=f"{SMALL} cards, a refusal with all hints", run=refuse(offers), rounds=few),
        Row(name=f"{LARGE} cards, the decision", run=decide(many), rounds=few, most=50),
        Row(name=f"{LARGE} cards, a refusal with all hints", run=refuse(many), rounds=1),
    ]


def measure(row: Row, asked: Iterator[Request]) -> tuple[float, float]:
    """Median seconds of a call, wall and CPU time. The first two calls fill caches of parsed text
    and do not count."""
    wall, cpu = [], []
    for _ in range(row.rounds + 2):
        request = next(asked)
        start, busy = time.perf_counter(), time.process_time()
        row.run(request)
        cpu.append(time.process_time() - busy)
        wall.append(time.perf_counter() - start)
    return statistics.median(wall[2:]), statistics.median(cpu[2:])


@click.command()
@click.option("--rounds", default=200, help="Runs of each row; a tenth of them over many cards.")
@click.option("--seed", default=0, help="Of the cards and the requests.")
def main(rounds: int, seed: int) -> None:
    """Print the cost of a choice, in milliseconds and as a ratio to one verdict."""
    rng = random.Random(seed)
    offers, many = cards(SMALL, rng), cards(LARGE, rng)
    asked = requests(rng)
    medians = {row.name: measure(row, asked) for row in rows(offers, many, rounds)}
    version = metadata.version("attnmux-core")
    title = f"5 phases; Python {platform.python_version()}, attnmux-core {version}"
    table = Table("", "ms", "CPU ms", "ratio", "at most", title=title)
    unit, _ = medians["one verdict"]
    for row in rows(offers, many, rounds):
        wall, cpu = medians[row.name]
        style = "red" if row.most is not None and wall * 1e3 > row.most else None
        limit = "" if row.most is None else f"{row.most:g}"
        times = f"{wall * 1e3:.3f}", f"{cpu * 1e3:.3f}", f"{wall / unit:.0f}"
        table.add_row(row.name, *times, limit, style=style)
    Console().print(table)


if __name__ == "__main__":
    main()
