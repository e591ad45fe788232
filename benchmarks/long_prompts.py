"""Long MLA prompts: expanded heads and the cached prefix in chunks, compared with absorbed.

    python -m benchmarks.long_prompts [--backend fa3_mla] [--rounds 7] [--json FILE]
    python -m benchmarks.long_prompts --dry-run      on a CPU: tiny sizes

Both sides take the heads' own queries and give the heads' own outputs (`forward_latent`), so that
the absorbed one multiplies Q and the output by the halves of `kv_b_proj`, and the expanded one the
latent. A figure is device time of one layer, in milliseconds; `metadata` is
`init_forward_metadata`, once a step, for both. `gain` is absorbed over expanded. Bar: 1.5 with a
prefix of 28,672 tokens. `by rule` says which side the backend takes, by operations or by a crossing
that was kept before. --keep keeps the measured crossing, the new tokens on 28,672 cached ones from
which the expanded side is faster, with the launches that `attnmux tune` keeps. `scratch` is the
memory of expanded K and V, and `error` the largest difference of the answers, as a share of the
largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import Case, dry_run_option, extend, json_option, only_option, rounds_option

from attnmux.core import (
    AttentionBackend,
    Decision,
    NoBackend,
    Platform,
    Plugins,
    Policy,
    Settings,
    TunedLaunch,
    UpProjection,
    build,
    solve,
)
from attnmux.core.verbs import Device
from attnmux.parts.chunked_prefix import CHUNK_BYTES, ChunkedPrefixBackend, crossing_subject
from attnmux.testing.bench import Report, Step, device_meter, facts, interleave
from attnmux.testing.bench.keeping import RecordFile
from attnmux.testing.bench.timing import Run

MIN_GAIN = 1.5
LONG = 28_672
NOPE, V = 128, 128
CASES = tuple(
    extend(1, new, prefix, page_size=64, kind="mla", q_heads=heads)
    for heads in (16, 128)
    for new, prefix in (
        *((new, LONG) for new in (32, 64, 128, 256, 512, 4096)),
        *((4096, prefix) for prefix in (0, 131_072)),
    )
)
TINY = tuple(
    extend(1, new, prefix, page_size=64, kind="mla", q_heads=2, dtype="float32")
    for new, prefix in ((200, 300), (200, 0), (20, 300))
)
COLUMNS = {
    **{"workload": "", "absorbed by": "", "expanded by": "", "by rule": ""},
    **{"absorbed, ms": ".2f", "expanded, ms": ".2f", "metadata, ms": ".2f", "gain": ".2f"},
    **{"chunks": "d", "scratch, MiB": ".0f", "error": ".4f", "bar": ""},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A measured case."""

    case: Case
    decision: Decision
    gain: float
    expanded_us: float


def measure(
    case: Case, platform: Platform, backend: str, chunk_bytes: int, rounds: int, report: Report
) -> Row:
    """Raises NoBackend where the machine has no backend for either side."""
    device = torch.device(platform.device_type)
    asked = case.request.replace(chunked_prefix=True, phases=("extend", "decode"))
    decision = solve(asked, platform, Plugins.load().offers(), Policy(backend=backend or None))
    step = case.step(device, 2)
    launches = TunedLaunch.read(Settings.load().launches_file()).found
    made = build(decision, step.context(platform, decision.request, launches))
    by_expanded = decision.answer("expanded_prompts", "prompts", "extend")
    if not isinstance(made, ChunkedPrefixBackend) or by_expanded is None:
        raise NoBackend(f"{decision.summary()}: none for expanded prompts")
    made.init_forward_metadata(step.batch)
    taken = "expanded" if made.runs_expanded else "absorbed"
    ours = ChunkedPrefixBackend(
        absorbed=made.absorbed, expanded=made.expanded, chunk_bytes=chunk_bytes, crossing=0.0
    )
    ours.init_forward_metadata(step.batch)
    calls = _calls(step, case)
    answers = {"absorbed": calls(made.absorbed), "expanded": calls(ours)}
    absorbed, expanded = (call().float() for call in answers.values())
    sides: dict[str, Run] = {**answers}
    sides["metadata"] = partial(ours.init_forward_metadata, step.batch)
    meters = {name: device_meter(call, device, 1) for name, call in sides.items()}
    times = interleave(meters, rounds)
    gain = times.ratio("absorbed", "expanded")
    has_bar = case.workload.prefix == LONG and case.workload.new >= 4096
    word = ("kept" if gain >= MIN_GAIN else "MISSED") if has_bar else "-"
    workspace = ours.context.workspace
    scratch = sum(workspace.get(f"chunked_prefix.{name}", 0).numel() for name in "kv")
    report.add(
        str(case),
        decision.phases["extend"].backend,
        by_expanded.backend,
        taken,
        *(times.median(name) / 1e3 for name in sides),
        gain,
        -(-case.workload.prefix * case.workload.batch_size // ours.chunk_tokens),
        scratch / 2**20,
        float((expanded - absorbed).abs().max() / absorbed.abs().max()),
        word,
        missed=word == "MISSED",
    )
    return Row(case=case, decision=decision, gain=gain, expanded_us=times.median("expanded"))


def crossings(rows: Sequence[Row]) -> Iterator[TunedLaunch]:
    """The crossing of each number of heads, between the measured new tokens on a long prefix.

    Where the expanded side is faster from the fewest tokens on, these; none where it never is.
    """
    platform = rows[0].decision.platform
    offers = {offer.address: offer for offer in Plugins.load().offers()}
    for heads in dict.fromkeys(row.case.q_heads for row in rows):
        cut = [r for r in rows if (r.case.q_heads, r.case.workload.prefix) == (heads, LONG)]
        faster = next((place for place, row in enumerate(cut) if row.gain >= 1), None)
        decision = cut[0].decision if cut else rows[0].decision
        by_expanded = decision.answer("expanded_prompts", "prompts", "extend")
        if faster is None or by_expanded is None:
            continue
        after, before = cut[faster], cut[max(faster - 1, 0)]
        crossing = float(after.case.workload.new)
        if faster:
            share = -math.log(before.gain) / math.log(after.gain / before.gain)
            crossing = before.case.workload.new * (crossing / before.case.workload.new) ** share
        absorbed, expanded = decision.phases["extend"].address, by_expanded.address
        yield TunedLaunch(
            backend=expanded,
            device=Device.of(platform),
            versions=offers[expanded].versions(),
            subject=crossing_subject(absorbed, decision.request),
            values={"crossing": round(crossing, 1)},
            median_us=after.expanded_us,
            date=datetime.now(tz=UTC),
        )


def _calls(step: Step, case: Case) -> Callable[[AttentionBackend], Callable[[], torch.Tensor]]:
    """A layer's call with random weights and queries."""
    heads, rank, k_rope = case.q_heads, step.k.shape[-1], step.k_rope
    assert k_rope is not None
    dtype, device = step.q.dtype, step.q.device
    new = partial(torch.randn, dtype=dtype, device=device)
    weight = new(heads * (NOPE + V), rank) / rank**0.5
    projection = UpProjection.of(weight, num_heads=heads, v_head_dim=V)
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
@click.option("--keep", is_flag=True, help="Keep the measured crossings.")
@rounds_option(7)
@only_option
@json_option
@dry_run_option("Tiny sizes on the CPU")
def main(
    backend: str,
    chunk_bytes: int,
    keep: bool,
    rounds: int,
    only: str,
    path: Path | None,
    dry_run: bool,
) -> None:
    """Print the time of long prompts with expanded heads and absorbed."""
    platform = Plugins.load().detect().pick("cpu" if dry_run else None)
    device = torch.device(platform.device_type)
    if dry_run:
        chunk_bytes = min(chunk_bytes, 1 << 18)
    title = f"One layer, {'float32' if dry_run else 'bfloat16'}, medians of {rounds} rounds"
    about = facts(device, "attnmux-core")
    rows = []
    with Report(COLUMNS, about, path, title=title) as report, torch.inference_mode():
        for case in TINY if dry_run else CASES:
            if only in str(case):
                rows.append(measure(case, platform, backend, chunk_bytes, rounds, report))
    file = Settings.load().launches_file()
    if keep and rows and file is not None:
        RecordFile(file, TunedLaunch).add(found := [*crossings(rows)])
        for each in found:
            heads = each.subject["num_q_heads"]
            click.echo(f"{file}: {heads} heads cross at {each.values['crossing']} new tokens")


if __name__ == "__main__":
    main()
