"""Draft trees by kernels and by plain torch: the time until the host knows the result.

    python -m benchmarks.trees [--device cuda] [--batch 1,32] [--rounds 20] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.trees --device cpu     in small: figures mean nothing

A figure is microseconds of the host, the wait for the device included, for trees of 8 nodes:

- `build`: from a draft model's candidates on the device (topk 4, 3 steps) to a tree as the engine
  verifies it.
- `sample`: a path by the target's probabilities, for a vocabulary of 128,256 tokens.

`ratio` is kernels over plain torch. Both ways must agree; rows in which they do not are marked
WRONG.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import triton
from benchmarks.cases import json_option, rounds_option

from attnmux.parts import AcceptedDrafts, AcceptThresholds, DraftTree, sample_tree_target_only
from attnmux.testing.bench import Report, facts, interleave
from attnmux.transformers.draft.loop import drafted_tree
from attnmux.transformers.draft.paths import DraftCandidates
from attnmux.triton.functions.trees import TritonTrees

NODES, TOPK, STEPS = 8, 4, 3
COLUMNS = {
    **{"": "", "requests": ",.0f", "kernels": ",.1f", "torch": ",.1f", "ratio": ".3f"},
    " ": "",
}
LIMITS = AcceptThresholds(single=0.5)

Call = Callable[[], list[torch.Tensor]]
"""Returns tensors on the host, and waits for the device."""


@click.command(context_settings={"show_default": True})
@click.option("--device", "name", default="cuda", help="cpu interprets the kernels, in small.")
@click.option("--batch", "batches", default="1,32", help="Requests, separated by commas.")
@rounds_option(20)
@json_option
def main(name: str, batches: str, rounds: int, path: Path | None) -> None:
    """Print the time of both parts in each way."""
    device = torch.device(name)
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise click.UsageError(
            "--device cpu runs kernels in Triton's interpreter: TRITON_INTERPRET=1"
        )
    vocabulary = 300 if device.type == "cpu" else 128_256
    about = facts(device, "attnmux-core", "triton")
    title = f"us of the host, trees of {NODES} nodes"
    kernels = TritonTrees()
    with torch.no_grad(), Report(COLUMNS, about, path, title=title) as report:
        for size in map(int, batches.split(",")):
            found = candidates(size, device)
            report.add("build", size, *measured(building(found, kernels), rounds))
            given = sampling(found, vocabulary, kernels)
            report.add("sample", size, *measured(given, rounds))


def candidates(size: int, device: torch.device) -> DraftCandidates:
    """Those of random paths, as `DraftLoop` returns them."""
    scores = [-torch.rand(size, TOPK, device=device)]
    parents = [torch.full((size, TOPK), -1, device=device)]
    first = 0
    for _ in range(STEPS - 1):
        above = scores[-1][:, :TOPK].repeat_interleave(TOPK, dim=1)
        scores.append(above - torch.rand(size, TOPK * TOPK, device=device))
        links = torch.arange(first, first + TOPK, device=device).repeat_interleave(TOPK)
        parents.append(links.expand(size, -1))
        first += scores[-2].shape[1]
    total = sum(each.shape[1] for each in scores)
    tokens = torch.randint(0, 200, (size, total), device=device)
    return DraftCandidates(
        scores=torch.cat(scores, 1), tokens=tokens, parents=torch.cat(parents, 1)
    )


def building(found: DraftCandidates, kernels: TritonTrees) -> tuple[Call, Call]:
    """With kernels and without."""
    device, roots = found.tokens.device, torch.zeros(len(found.tokens), dtype=torch.int64)

    def run(ours: TritonTrees | None) -> list[torch.Tensor]:
        tree = drafted_tree(roots, found, NODES, topk=TOPK, kernels=ours)
        tree.spec_input(device)
        return [tree.draft_tokens, tree.parents, tree.depths]

    return lambda: run(kernels), lambda: run(None)


def sampling(found: DraftCandidates, vocabulary: int, kernels: TritonTrees) -> tuple[Call, Call]:
    """With kernels and without."""
    device, size = found.tokens.device, len(found.tokens)
    roots = torch.zeros(size, dtype=torch.int64, device=device)
    columns = found.scores, found.tokens, found.parents
    tree = DraftTree.best_of(roots, *columns, NODES, topk=TOPK)
    # Few tokens have much of it, so that drafts are accepted
    logits = torch.randn(size * NODES, vocabulary, device=device)
    logits[:, :200] += 8
    probs = logits.softmax(-1)
    coins = torch.rand(size, NODES, dtype=torch.float64, device=device)

    def run(sample: Callable[..., AcceptedDrafts]) -> list[torch.Tensor]:
        paths = sample(tree, probs, coins, LIMITS)
        # Its other half, the drawn tokens, may differ where a number is next to a sum
        return [torch.stack([paths.accept_index, paths.predict]).cpu()[0]]

    return lambda: run(kernels.sample), lambda: run(sample_tree_target_only)


def measured(both: tuple[Call, Call], rounds: int) -> list[float | str]:
    """The figures of a row, after the check."""
    ours, plain = both
    agree = all(map(torch.equal, ours(), plain()))

    def timed(call: Call) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e6

        return run

    found = interleave({"kernels": timed(ours), "torch": timed(plain)}, rounds, warm_up=3)
    medians = [found.median(side) for side in ("kernels", "torch")]
    return [*medians, found.ratio("kernels", "torch"), "" if agree else "WRONG"]


if __name__ == "__main__":
    main()
