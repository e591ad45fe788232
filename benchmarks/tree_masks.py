"""Bytes and time of a verify step's mask in each of its forms, on a CPU.

    python -m benchmarks.tree_masks [--threads N] [--rounds N] [--json FILE]

8 requests with 32,768 cached tokens verify trees of 16 nodes. Each form is made from the visible
drafts of the trees, [8, 16, 16] bool, as core makes it for a backend that reads it. `graphs` are
the bytes that a graph's buffers take for as many requests and a context of 131,072 tokens. The
ratio is to the whole mask's time. Every round makes every form once; medians are printed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option, threads_option

from attnmux.core import ForwardBatch, ForwardMode, SpecInput
from attnmux.core.contract.spec import FORMS
from attnmux.core.contract.tree_masks import with_form
from attnmux.core.facts.values import TreeMask
from attnmux.core.plugin import BackendCard
from attnmux.parts import DraftTree
from attnmux.testing.bench import Report, facts, interleave, wall_meter

CPU = torch.device("cpu")
BATCH_SIZE, DRAFTS, PREFIX, MAX_CONTEXT, TOPK = 8, 16, 32768, 131072, 4
IN_GRAPHS = {
    "full": BATCH_SIZE * DRAFTS * (MAX_CONTEXT + DRAFTS),
    "qlen_only": BATCH_SIZE * DRAFTS * DRAFTS,
    "qlen_only_bitpacking": BATCH_SIZE * DRAFTS * DRAFTS // 8,
}
COLUMNS = {"form": "", "bytes": "d", "graphs": "d", "us": ".1f", "ratio": ".5f"}


def make_batch(spec: SpecInput) -> ForwardBatch:
    """The verify step; its lengths are known on the host."""
    lens = torch.full((BATCH_SIZE,), PREFIX, dtype=torch.int32)
    tokens = torch.zeros(BATCH_SIZE * DRAFTS, dtype=torch.int64)
    new = torch.full_like(lens, DRAFTS)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=BATCH_SIZE,
        req_pool_indices=tokens[:BATCH_SIZE],
        seq_lens=lens,
        seq_lens_cpu=lens,
        out_cache_loc=tokens,
        positions=tokens,
        extend_seq_lens=new,
        extend_prefix_lens=lens,
        extend_num_tokens=len(tokens),
        spec_info=spec,
    )


@click.command()
@threads_option
@rounds_option(50)
@json_option
def main(rounds: int, path: Path | None) -> None:
    """Print each form's bytes, and the time to make it."""
    parents = (torch.arange(DRAFTS) - 1).div(TOPK, rounding_mode="floor")
    parents[0] = -1
    tokens = torch.zeros(BATCH_SIZE, DRAFTS, dtype=torch.int64)
    tree = DraftTree.of(tokens, parents.expand_as(tokens), topk=TOPK)

    def make(form: TreeMask) -> ForwardBatch:
        batch = make_batch(tree.spec_input(CPU))
        return with_form(batch, form, max_context_len=MAX_CONTEXT)

    meters = {str(form): wall_meter(partial(make, form), CPU) for form in BackendCard.TREE_MASKS}
    times = interleave(meters, rounds, warm_up=5)
    fields = {form: field for field, form in FORMS.items()}
    title = f"{BATCH_SIZE} requests, {DRAFTS} nodes, {PREFIX} cached tokens; {rounds} rounds"
    with Report(COLUMNS, facts(CPU), path, title=title) as report:
        for form in BackendCard.TREE_MASKS:
            mask: torch.Tensor = getattr(make(form).spec_info, fields[form])
            median = times.median(form)
            size = mask.numel() * mask.element_size()
            report.add(form, size, IN_GRAPHS[form], median, median / times.median("full"))


if __name__ == "__main__":
    main()
