"""Long MLA prompts: expanded heads and the cached prefix in chunks, compared with absorbed.

    python -m benchmarks.long_prompts [--backend fa3_mla] [--rounds 7] [--json FILE]
    python -m benchmarks.long_prompts --dry-run      on a CPU: tiny sizes

Both sides take the heads' own queries and give the heads' own outputs (`forward_latent`), so that
the absorbed one multiplies Q and the output by the halves of `kv_b_proj`, and the expanded one the
latent. A figure is device time of one layer, in milliseconds; `metadata` is
`init_forward_metadata`, once a step, for both. `gain` is absorbed over expanded. Bar: 1.5 with a
prefix of 28,672 tokens. `by operations` says which side `expansion_pays` takes; the other is run by
a rule that is turned off for the measurement. `scratch` is the memory of expanded K and V, and
`error` the largest difference of the answers, as a share of the largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import click
import torch
from benchmarks.cases import Case, dry_run_option, extend, json_option, only_option, rounds_option

from attnmux.bench import Report, Step, device_meter, facts, in_turn, interleave
from attnmux.core import (
    AttentionBackend,
    ChunkedPrefixBackend,
    NoBackend,
    Platform,
    Policy,
    UpProjection,
    build,
    detect,
    load_plugins,
    pick_platform,
    solve,
)
from attnmux.core.chunked_prefix import CHUNK_BYTES

MIN_GAIN = 1.5
LONG = 28_672
NOPE, V = 128, 128
CASES = tuple(
    extend(1, new, prefix, page_size=64, kind="mla", q_heads=heads)
    for heads in (16, 128)
    for new, prefix in ((4096, LONG), (4096, 0), (512, LONG), (128, LONG), (4096, 131_072))
)
TINY = tuple(
    extend(2, new, prefix, page_size=64, kind="mla", q_heads=2, dtype="float32")
    for new, prefix in ((200, 300), (200, 0), (20, 300))
)
COLUMNS = {
    **{"workload": "", "absorbed by": "", "expanded by": "", "by operations": ""},
    **{"absorbed, ms": ".2f", "expanded, ms": ".2f", "metadata, ms": ".2f", "gain": ".2f"},
    **{"chunks": "d", "scratch, MiB": ".0f", "error": ".4f", "bar": ""},
}


def measure(
    case: Case, platform: Platform, backend: str, chunk_bytes: int, rounds: int, report: Report
) -> None:
    """One row. Raises NoBackend where the machine has no backend for either side."""
    device = torch.device(platform.device_type)
    asked = case.request.replace(chunked_prefix=True, phases=("extend", "decode"))
    decision = solve(asked, platform, load_plugins().offers(), Policy(backend=backend or None))
    step = case.step(device, 2)
    made = build(decision, step.context(platform, decision.request))
    if not isinstance(made, ChunkedPrefixBackend) or decision.expanded is None:
        raise NoBackend(f"{decision.summary()}: none for expanded prompts")
    ours = ChunkedPrefixBackend(
        absorbed=made.absorbed, expanded=made.expanded, chunk_bytes=chunk_bytes
    )
    ours.init_forward_metadata(step.batch)
    pays = ours.runs_expanded
    runs = _calls(step, case)
    with patch("attnmux.core.chunked_prefix.expansion_pays", return_value=True):
        ours.init_forward_metadata(step.batch)
        metadata = device_meter(partial(ours.init_forward_metadata, step.batch), device, 1)
        answers = [runs(each)() for each in (made.absorbed, ours)]
        sides = {"absorbed": made.absorbed, "expanded": ours}
        meters = {
            name: device_meter(in_turn([runs(each)]), device, 1) for name, each in sides.items()
        }
        times = interleave({**meters, "metadata": metadata}, rounds)
    absorbed, expanded = (answer.float() for answer in answers)
    gain = times.ratio("absorbed", "expanded")
    has_bar = case.workload.prefix == LONG and case.workload.new >= 4096
    word = ("kept" if gain >= MIN_GAIN else "MISSED") if has_bar else "-"
    workspace = ours.context.workspace
    scratch = sum(workspace.get(f"chunked_prefix.{name}", 0).numel() for name in "kv")
    report.add(
        str(case),
        decision.phases["extend"].backend,
        decision.expanded.backend,
        "expanded" if pays else "absorbed",
        *(times.median(name) / 1e3 for name in (*sides, "metadata")),
        gain,
        -(-case.workload.prefix * case.workload.batch_size // ours.chunk_tokens),
        scratch / 2**20,
        float((expanded - absorbed).abs().max() / absorbed.abs().max()),
        word,
        missed=word == "MISSED",
    )


def _calls(step: Step, case: Case) -> Callable[[AttentionBackend], Callable[[], torch.Tensor]]:
    """A layer's call with random weights and queries."""
    heads, rank, k_rope = case.q_heads, step.k.shape[-1], step.k_rope
    assert k_rope is not None
    dtype, device = step.q.dtype, step.q.device
    new = partial(torch.randn, dtype=dtype, device=device)
    weight = new(heads * (NOPE + V), rank) / rank**0.5
    projection = UpProjection(weight=weight, num_heads=heads, v_head_dim=V)
    q = new(step.q.shape[0], heads, NOPE + k_rope.shape[-1])
    layer = step.layers[0]

    def calls(backend: AttentionBackend) -> Callable[[], torch.Tensor]:
        return partial(backend.forward_latent, q, step.k, k_rope, layer, step.batch, projection)

    return calls


@click.command()
@click.option("--backend", default="", help="That runs absorbed. [default: the solver's choice]")
@click.option(
    "--chunk-bytes",
    type=click.IntRange(1),
    default=CHUNK_BYTES,
    show_default=True,
    help="Memory for the expanded K and V of a chunk.",
)
@rounds_option(7)
@only_option
@json_option
@dry_run_option("Tiny sizes on the CPU")
def main(
    backend: str, chunk_bytes: int, rounds: int, only: str, path: Path | None, dry_run: bool
) -> None:
    """Print the time of long prompts with expanded heads and absorbed."""
    platform = pick_platform(detect(load_plugins()), "cpu" if dry_run else None)
    device = torch.device(platform.device_type)
    if dry_run:
        chunk_bytes = min(chunk_bytes, 1 << 18)
    title = f"One layer, {'float32' if dry_run else 'bfloat16'}, medians of {rounds} rounds"
    about = facts(device, "attnmux-core")
    with Report(COLUMNS, about, path, title=title) as report, torch.inference_mode():
        for case in TINY if dry_run else CASES:
            if only in str(case):
                measure(case, platform, backend, chunk_bytes, rounds, report)


if __name__ == "__main__":
    main()
