"""An indexer's picks: the Triton kernels and the plain torch that they must agree with.

    python -m benchmarks.indexer [--device cuda] [--keys bfloat16,float8_e4m3fn] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.indexer --device cpu     in small: figures mean nothing

A figure is device time in microseconds of one layer's `KeyPicker.pick` at DeepSeek-V3.2's shapes:
64 heads of 128 dims pick 2048 keys; `ratio` is kernels over torch. Both
rank scores by `torch.topk`. `disorder` is by how much a key that was left
out has a higher score than a picked one, by torch, as a share of the highest score: 0 but for
rounding. Rows above 0.001 are marked WRONG.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
import triton
from benchmarks.cases import json_option, only_option, rounds_option

from attnmux.core import ForwardBatch, ForwardMode, torch_dtype
from attnmux.testing.bench import Report, device_meter, facts, interleave
from attnmux.testing.bench.timing import Run
from attnmux.transformers import IndexKPool, KeyPicker
from attnmux.transformers.model.sparse.scores import index_scores
from attnmux.triton.functions.index_scores import IndexScores

LAYER = 0
PAGE_SIZE = 64
WRONG = 1e-3
COLUMNS = {
    **{"step": "", "context": ",.0f", "keys": ""},
    **{"kernels": ",.1f", "torch": ",.1f", "ratio": ".3f"},
    **{"disorder": ".1e", "": ""},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """What is run on a device."""

    heads: int
    head_dim: int
    topk: int
    contexts: tuple[int, ...]
    decodes: tuple[int, ...]
    prompt: int


FULL = Shapes(
    heads=64, head_dim=128, topk=2048, contexts=(2**13, 2**15, 2**17), decodes=(1, 64), prompt=2048
)
SMALL = Shapes(heads=24, head_dim=32, topk=40, contexts=(192,), decodes=(1, 3), prompt=9)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PickStep:
    """A step, and what an indexer projects in it."""

    batch: ForwardBatch
    index_q: torch.Tensor
    index_k: torch.Tensor
    weights: torch.Tensor
    torch_picker: KeyPicker

    def run(self, picker: KeyPicker) -> Run:
        given = self.index_q, self.index_k, self.weights, self.batch
        return lambda: picker.pick(LAYER, *given)


@click.command(context_settings={"show_default": True})
@click.option("--device", "name", default="cuda", help="cpu interprets the kernels, in small.")
@click.option("--keys", default="bfloat16,float8_e4m3fn", help="dtypes of the index keys.")
@rounds_option(5)
@only_option
@json_option
def main(name: str, keys: str, rounds: int, only: str, path: Path | None) -> None:
    """Print the time of an indexer's picks in each way."""
    device = torch.device(name)
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise click.UsageError(
            "--device cpu runs kernels in Triton's interpreter: TRITON_INTERPRET=1"
        )
    shapes = SMALL if device.type == "cpu" else FULL
    about = facts(device, "attnmux-core", "triton")
    title = f"us of a layer's picks, {shapes.heads} heads of {shapes.head_dim}, {shapes.topk} keys"
    steps = {f"decode {size}": size for size in shapes.decodes} | {f"prompt {shapes.prompt}": 0}
    with torch.no_grad(), Report(COLUMNS, about, path, title=title) as report:
        for context in shapes.contexts:
            for dtype in map(torch_dtype, keys.split(",")):
                for label, requests in steps.items():
                    if only in label:
                        step = make_step(shapes, context, dtype, requests, device)
                        report.add(label, context, str(dtype)[6:], *measured(step, rounds))


def make_step(
    shapes: Shapes, context: int, dtype: torch.dtype, requests: int, device: torch.device
) -> PickStep:
    """Decode of so many requests; of none, the end of a prompt of one."""
    rows, new = (requests, 1) if requests else (1, shapes.prompt)
    pages = torch.randperm(rows * context // PAGE_SIZE, device=device) + 1
    slots = pages.unsqueeze(1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)
    table = slots.view(rows, context).int()
    pool = IndexKPool(
        num_slots=rows * context + PAGE_SIZE,
        dtype=dtype,
        layer_ids=(LAYER,),
        head_dim=shapes.head_dim,
        device=device,
    )

    # Triton's interpreter does not multiply bfloat16
    own_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=own_dtype)

    for row in table:
        pool.set_keys(LAYER, row.long(), drawn(context, shapes.head_dim))
    picker = KeyPicker(pool=pool, req_to_token=table, topk=shapes.topk)
    lens = torch.full((rows,), context, dtype=torch.int32)
    count = rows * new
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if requests else ForwardMode.EXTEND,
        batch_size=rows,
        req_pool_indices=torch.arange(rows, device=device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        out_cache_loc=table[:, context - new :].flatten().long(),
        positions=torch.arange(context - new, context, device=device).repeat(rows),
    )
    if not requests:
        lengths = {"extend_seq_lens": new, "extend_prefix_lens": context - new}
        tensors = {key: torch.tensor([value], dtype=torch.int32) for key, value in lengths.items()}
        mirrors = {f"{key}_cpu": value for key, value in tensors.items()}
        own = {key: value.to(device) for key, value in tensors.items()}
        batch = replace(batch, extend_num_tokens=new, **own, **mirrors)  # type: ignore[arg-type]  # by the names above
    return PickStep(
        batch=replace(batch, topk_indices=picker.room(batch)),
        index_q=drawn(count, shapes.heads, shapes.head_dim),
        index_k=drawn(count, shapes.head_dim),
        weights=torch.randn(count, shapes.heads, device=device),
        torch_picker=picker,
    )


def measured(step: PickStep, rounds: int) -> list[float | str | None]:
    """The figures of a row, after the check."""
    ours = step.run(replace(step.torch_picker, kernel=IndexScores()))
    ours()
    found = disorder(step)
    device = step.index_q.device
    runs = {"kernels": ours, "torch": step.run(step.torch_picker)}
    repeats = 1 if device.type == "cpu" or len(step.index_q) > FULL.decodes[-1] else 10
    meters = {side: device_meter(run, device, repeats) for side, run in runs.items()}
    times = interleave(meters, rounds, warm_up=1)
    return [
        times.median("kernels"),
        times.median("torch"),
        times.ratio("kernels", "torch"),
        found,
        "" if found <= WRONG else "WRONG",
    ]


def disorder(step: PickStep) -> float:
    """By torch's scores of the first and the last tokens; infinite where picks are no places."""
    batch, pool = step.batch, step.torch_picker.pool
    assert batch.topk_indices is not None
    count, worst = len(batch.positions), 0.0
    each = count // batch.batch_size
    for token in sorted({*range(min(4, count)), *range(max(count - 4, 0), count)}):
        stop = int(batch.positions[token]) + 1
        slots = step.torch_picker.req_to_token[token // each, :stop].long()
        q = pool.rotated(step.index_q[token : token + 1])
        scores = index_scores(q, pool.keys(LAYER, slots), step.weights[token : token + 1])[0]
        picks = batch.topk_indices[token].long()
        places = picks[picks >= 0]
        is_picked = torch.zeros(stop, dtype=torch.bool, device=scores.device)
        is_picked[places[places < stop]] = True
        if int(is_picked.sum()) != min(len(picks), stop):
            return float("inf")
        if bool(is_picked.all()):
            continue
        above = scores[~is_picked].max() - scores[is_picked].min()
        worst = max(worst, float(above / scores.abs().max()))
    return worst


if __name__ == "__main__":
    main()
