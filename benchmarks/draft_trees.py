"""Verifying draft trees: by a backend's own masks, and by prefix and drafts merged by LSE.

    python -m benchmarks.draft_trees [--backends fa3,flashinfer,triton] [--rounds 5] [--json FILE]
    python -m benchmarks.draft_trees --dry-run       on a CPU: tiny sizes

A figure is device time of one layer in microseconds, replayed from a graph where the device has
them. `own` takes the mask of the tree in the backend's kernel, where its card admits trees on these
pages. `merged` is `TreeAttnBackend` with the backend for the prefixes and the device's kernel for
the drafts, `plain` the same with plain torch for the drafts. `decode` is a plain step of the same
requests. `ratio` is merged over the fastest `own` of the workload, `error` the largest difference
of merged from the float64 reference over the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch
from benchmarks.cases import Case, dry_run_option, extend, json_option, only_option, rounds_option

from attnmux.core import (
    AttentionBackend,
    ForwardBatch,
    ForwardMode,
    NoBackend,
    Offer,
    Platform,
    Plugins,
    Policy,
    Request,
    build,
    solve,
)
from attnmux.parts import DraftTree, prefixes_request, undrafted_request
from attnmux.parts.draft_trees import TreeAttnBackend
from attnmux.testing import reference
from attnmux.testing.bench import Report, Step, device_meter, facts, interleave
from attnmux.testing.bench.timing import Run, graphs_of, in_graph

DRAFTS, TOPK = 8, 4
CASES = (
    *(extend(size, DRAFTS, prefix) for size, prefix in ((1, 2048), (1, 16384), (16, 4096))),
    extend(64, DRAFTS, 4096),
    *(
        extend(size, DRAFTS, prefix, page_size=64, kind="mla", q_heads=16)
        for size, prefix in ((1, 16384), (16, 4096))
    ),
)
TINY = (extend(2, DRAFTS, 40, dtype="float32"),)
COLUMNS = {
    **{"workload": "", "prefixes by": ""},
    **dict.fromkeys(("own", "merged", "plain", "decode"), ",.1f"),
    **{"ratio": ".2f", "error": ".4f"},
}


@click.command(context_settings={"show_default": True})
@click.option("--backends", default="fa3,flashinfer,triton,fa3_mla,flashmla")
@rounds_option(5)
@only_option
@dry_run_option("Run on a CPU")
@json_option
def main(backends: str, rounds: int, only: str, dry_run: bool, path: Path | None) -> None:
    """Print the time of a layer in each way, and the ratio of merging to the fastest own kernel."""
    plugins = Plugins.load()
    platform, offers = plugins.detect().pick(), plugins.offers()
    names = ["torch_native"] if dry_run else backends.split(",")
    device = torch.device(platform.device_type)
    about = facts(device, "attnmux-core", drafts=DRAFTS, topk=TOPK)
    title = f"{DRAFTS} drafts of trees with {TOPK} branches; us of a layer"
    with torch.no_grad(), Report(COLUMNS, about, path, title=title) as report:
        for case in TINY if dry_run else CASES:
            if only in str(case):
                measure(case, platform, offers, names, rounds, report)


def measure(
    case: Case,
    platform: Platform,
    offers: Sequence[Offer],
    names: list[str],
    rounds: int,
    report: Report,
) -> None:
    """A row for each backend that reads the prefixes of the case."""
    device = torch.device(platform.device_type)
    step = case.step(device)
    trees, plain = verifying(step), decoding(step)
    asked = case.request.replace(
        spec_topk=TOPK, spec_draft_tokens=DRAFTS, phases=("extend", "decode", "verify")
    )
    expected, _ = reference.attention(
        step.q, step.layers[-1], trees.batch, step.table.req_to_token, step.pool, q_rope=step.q_rope
    )
    sides: dict[str, Run] = {}
    errors: dict[str, float] = {}
    for name in names:
        for way in ("own", "merged", "plain", "decode"):
            backend = backend_of(step, asked, platform, offers, name, way)
            if backend is None:
                continue
            taken = plain if way == "decode" else trees
            sides[f"{name} {way}"], answer = prepared(backend, taken)
            if way == "merged":
                errors[name] = float((answer - expected).abs().max() / expected.abs().max())
    meters = {name: device_meter(run, device) for name, run in sides.items()}
    times = interleave(meters, rounds)
    us = {name: times.median(name) / len(step.layers) for name in sides}
    own = min((us[name] for name in sides if name.endswith(" own")), default=None)
    for name, error in errors.items():
        merged = us[f"{name} merged"]
        by_way = (us.get(f"{name} {way}") for way in ("own", "merged", "plain", "decode"))
        report.add(str(case), name, *by_way, merged / own if own else None, error)


def verifying(step: Step) -> Step:
    """The step as one that verifies trees, of which each node has up to TOPK children."""
    given = step.batch
    assert given.extend_prefix_lens is not None
    parents = (torch.arange(DRAFTS) - 1).div(TOPK, rounding_mode="floor")
    parents[0] = -1
    tokens = torch.zeros(given.batch_size, DRAFTS, dtype=torch.int64)
    tree = DraftTree.of(tokens, parents.expand_as(tokens), topk=TOPK)
    prefix = given.extend_prefix_lens.cpu()
    batch = replace(
        given,
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=given.extend_prefix_lens,
        seq_lens_cpu=prefix,
        seq_lens_sum=int(prefix.sum()),
        spec_info=tree.spec_input(given.seq_lens.device),
    )
    return replace(step, batch=batch)


def decoding(step: Step) -> Step:
    """A decode step of the same requests, each with the first of its new tokens."""
    given = step.batch
    assert given.extend_prefix_lens is not None
    lens = given.extend_prefix_lens + 1
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=given.batch_size,
        req_pool_indices=given.req_pool_indices,
        seq_lens=lens,
        out_cache_loc=given.out_cache_loc[::DRAFTS].contiguous(),
        positions=lens.long() - 1,
        seq_lens_cpu=lens.cpu(),
        seq_lens_sum=int(lens.sum()),
    )
    q_rope = None if step.q_rope is None else step.q_rope[::DRAFTS]
    return replace(step, batch=batch, q=step.q[::DRAFTS], q_rope=q_rope)


def backend_of(
    step: Step,
    asked: Request,
    platform: Platform,
    offers: Sequence[Offer],
    name: str,
    way: str,
) -> AttentionBackend | None:
    """None where the backend's card does not admit that way."""
    policy = Policy(backend=name)
    try:
        if way == "own":
            decision = solve(asked, platform, offers, policy)
            if decision.parts:
                return None
        else:
            decision = solve(undrafted_request(asked), platform, offers, policy)
        if way in ("merged", "plain"):
            reads = solve(prefixes_request(asked), platform, offers, policy).phases
            decision = replace(decision, request=asked, parts={"draft_trees": {"prefixes": reads}})
    except NoBackend:
        return None
    context = step.context(platform, decision.request)
    backend = build(decision, context)
    if way == "plain":
        assert isinstance(backend, TreeAttnBackend)
        return TreeAttnBackend(context, child=backend.child, prefixes=backend.prefixes)
    return backend


def prepared(backend: AttentionBackend, step: Step) -> tuple[Run, torch.Tensor]:
    """All layers of the step, from a graph where the device has them, and the last one's answer."""
    batch, calls = step.batch, step.calls_in_pool(backend)
    graphs = graphs_of(step.pool.device)
    if graphs is not None:
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
    backend.init_forward_metadata(batch)
    answer = torch.as_tensor([call() for call in calls][-1])
    backend.init_forward_metadata_out_graph(batch, in_capture=graphs is not None)

    def run() -> None:
        backend.init_forward_metadata_in_graph(batch)
        for call in calls:
            call()

    return in_graph(run, graphs), answer


if __name__ == "__main__":
    main()
