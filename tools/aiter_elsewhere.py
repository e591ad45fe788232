"""Run the conformance suite on AITER's Triton kernels, compiled for a GPU that is not AMD's.

    python tools/aiter_elsewhere.py --seed 7

Needs a GPU that Triton compiles for, amd-aiter (`pip install --no-deps amd-aiter`) and the packages
attnmux-amd, attnmux-testing and attnmux-emulators. Cases run eagerly and in the device's graphs, in
random order; then cases are sampled from the card.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import click
import torch
import triton
from triton.runtime.jit import JITFunction

from attnmux.amd.aiter import make
from attnmux.amd.cards.aiter import AITER
from attnmux.core import AttentionBackend, BackendContext, Platform
from attnmux.emulators.amd.aiter import aiter_kernels
from attnmux.testing import Candidate, Sampler, run_case
from attnmux.testing.cases.linear import AnyCase

AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Options of AMD's compiler, which others refuse."""
PAGE_SIZES = (16, 64)


def strip_options() -> None:
    """Launch kernels without the options of AMD's compiler."""
    run = JITFunction.run

    def stripped(self: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # a kernel's
        kept = {name: value for name, value in options.items() if name not in AMD_ONLY}
        return run(self, *args, **kept)

    JITFunction.run = stripped


def tally(
    candidate: Candidate, cases: Iterable[AnyCase], *, seed: int, budget: float
) -> Counter[str]:
    """Outcomes by execution and status. Failed cases are printed."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + budget
    for case in cases:
        if time.monotonic() > end:
            counts["not reached in time"] += 1
            break
        outcome = run_case(candidate, case, seed=seed)
        counts[f"{case.execution} {outcome.status}"] += 1
        if outcome.status != "passed":
            click.echo(f"{outcome.status}: {case.name}: {outcome.message}")
    return counts


@click.command()
@click.option("--seed", default=0, show_default=True)
@click.option("--budget", default=240.0, show_default=True, help="Seconds for the suite's cases.")
@click.option("--samples", default=60.0, show_default=True, help="Seconds for sampled cases.")
def main(seed: int, budget: float, samples: float) -> None:
    """Print the outcomes; the exit status is 1 if a case failed."""
    strip_options()
    kernels = aiter_kernels(compute_units=304)

    def factory(context: BackendContext, options: Mapping[str, object]) -> AttentionBackend:
        return make.backend(context, options, kernels)

    platform = Platform.parse("amd:gfx942")
    card = replace(AITER, requires=())
    candidate = Candidate(card=card, platform=platform, device="cuda", factory=factory)
    cases = [case for case in candidate.cases(PAGE_SIZES) if candidate.admits(case)]
    random.Random(seed).shuffle(cases)
    suite = tally(candidate, cases, seed=seed, budget=budget)
    sampler = Sampler(
        candidate=candidate, seed=seed, page_sizes=frozenset(PAGE_SIZES), most_cost=0.2
    )
    sampled = tally(candidate, sampler.cases(), seed=seed, budget=samples)
    device = torch.cuda.get_device_name()
    click.echo(f"{device}, torch {torch.__version__}, triton {triton.__version__}, seed {seed}")
    click.echo(f"suite ({len(cases)} cases): {dict(suite)}; sampled: {dict(sampled)}")
    sys.exit(any("failed" in key for key in (*suite, *sampled)))


if __name__ == "__main__":
    main()
