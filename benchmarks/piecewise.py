"""Extend steps with the model compiled in pieces between the calls of attention, against eager.

    python -m benchmarks.piecewise [--backend fa3] [--device cuda] [--rounds 21] [--json FILE]
    python -m benchmarks.piecewise --device cpu --backend torch_native --dry-run      tiny sizes

A model of random weights, with the shapes of an 8B one and fewer layers, runs prompts of several
lengths: eagerly, compiled with nothing captured, and compiled in pieces with CUDA graphs. All take
turns in one process; a figure is the median of the rounds, a ratio the median of the rounds' own.
`partitions` counts the parts into which Inductor split the compiled model: with N layers, and so N
calls of attention between them, N + 1 on a GPU, and none on a CPU, where nothing is captured.
`same text` is the share of tokens whose most likely successor is the eager run's, `difference` the
largest one between logits: the compiler fuses, so they are not bit for bit the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import dry_run_option, json_option, rounds_option
from torch._inductor.utils import run_and_get_code

from attnmux.bench import Report, Workload, facts, interleave, make_step, wall_meter
from attnmux.core import (
    AttentionBackend,
    ForwardBatch,
    ForwardMode,
    LayerSpec,
    ModelInput,
    RadixAttention,
    Request,
    forward_context,
)
from attnmux.core.graph.config import Forward
from attnmux.core.graph.piecewise import PiecewiseRunner, compile_in_pieces
from attnmux.testing import find_candidate

PAGE_SIZE = 16
INPUTS = {"input_ids": ModelInput(dtype=torch.int64)}
COLUMNS = {
    **{"tokens": "d", "eager ms": ".3f", "compiled ms": ".3f", "pieces ms": ".3f"},
    **{"eager/pieces": ".2f", "same text": ".1%", "difference": ".4f"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the model."""

    layers: int = 16
    hidden: int = 4096
    inner: int = 14336
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 32000


SMALL = Shape(layers=3, hidden=64, inner=128, q_heads=4, kv_heads=2, dim=16, vocabulary=100)


class Block(torch.nn.Module):
    """One layer, without a rotary embedding, which is not measured."""

    def __init__(self, shape: Shape, spec: LayerSpec) -> None:
        super().__init__()
        self.widths = [shape.q_heads * shape.dim, *[shape.kv_heads * shape.dim] * 2]
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(shape.hidden) for _ in range(2))
        self.qkv = torch.nn.Linear(shape.hidden, sum(self.widths), bias=False)
        self.attention = RadixAttention(spec)
        self.out = torch.nn.Linear(self.widths[0], shape.hidden, bias=False)
        self.up = torch.nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.down = torch.nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](hidden)).split(self.widths, -1)
        hidden = hidden + self.out(self.attention(q, k, v, batch).flatten(1))
        gate, up = self.up(self.norms[1](hidden)).chunk(2, -1)
        result: torch.Tensor = hidden + self.down(torch.nn.functional.silu(gate) * up)
        return result


class Model(torch.nn.Module):
    """Embeds, runs the layers, and gives logits for each token."""

    def __init__(self, shape: Shape, specs: tuple[LayerSpec, ...]) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = torch.nn.ModuleList(Block(shape, spec) for spec in specs)
        self.head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.embedding(inputs["input_ids"])
        for block in self.blocks:
            hidden = block(hidden, batch)
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_backend(name: str, shape: Shape, device: torch.device, room: int) -> AttentionBackend:
    """The installed backend, over a pool for one prompt of at most `room` tokens."""
    request = Request(
        num_q_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=PAGE_SIZE,
    )
    work = Workload(phase="extend", batch_size=1, new=room, prefix=0)
    step = make_step(work, request, device, num_layers=shape.layers)
    candidate = find_candidate(name, device=str(device))
    return candidate.build(step.context(candidate.platform))


def prompt(backend: AttentionBackend, num_tokens: int) -> ForwardBatch:
    """A step over one prompt without a prefix."""
    context = backend.context
    device, table = context.device, context.req_to_token_pool.req_to_token
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    order = torch.arange(num_tokens, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        req_pool_indices=torch.ones(1, dtype=torch.int64, device=device),
        seq_lens=lens.to(device),
        out_cache_loc=table[1, :num_tokens].long(),
        positions=order,
        seq_lens_cpu=lens,
        seq_lens_sum=num_tokens,
        extend_seq_lens=lens.to(device),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens=torch.zeros_like(lens).to(device),
        extend_prefix_lens_cpu=torch.zeros_like(lens),
        extend_num_tokens=num_tokens,
    )


def count_partitions(model: Model, backend: AttentionBackend, num_tokens: int) -> int:
    """Parts into which Inductor split the compiled model, to be captured on their own."""
    batch = prompt(backend, num_tokens)
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=backend.context.device)
    backend.init_forward_metadata(batch)
    with torch.no_grad(), forward_context(backend, batch):
        _, codes = run_and_get_code(compile_in_pieces(model), batch, {"input_ids": ids})
    torch.compiler.reset()
    return sum(len(set(re.findall(r"def (partition_\d+)\(", code))) for code in codes)


def compile_whole(forward: Forward) -> Forward:
    """Compiled the same way, with nothing captured."""
    return torch.compile(forward, dynamic=True)


@click.command()
@click.option("--backend", "name", default="fa3", show_default=True)
@click.option("--device", "device_name", default="cuda", show_default=True)
@rounds_option(21)
@json_option
@dry_run_option("A tiny model")
def main(name: str, device_name: str, rounds: int, path: Path | None, dry_run: bool) -> None:
    """Print the times of extend steps: eager, compiled, and compiled in pieces with graphs."""
    device = torch.device(device_name)
    shape = SMALL if dry_run else Shape()
    counts = (5, 16, 30) if dry_run else (30, 128, 250, 512, 1000, 2048)
    sizes = (16, 32) if dry_run else (32, 128, 256, 512, 1024, 2048)
    torch.manual_seed(0)
    backend = make_backend(name, shape, device, max(sizes))
    with torch.device(device):
        model = Model(shape, backend.context.layers).to(torch.bfloat16).eval()
    partitions = count_partitions(model, backend, counts[-1])
    runners = {
        label: PiecewiseRunner(backend, model, sizes, inputs=INPUTS, compiler=compiler)
        for label, compiler in (("compiled", compile_whole), ("pieces", compile_in_pieces))
    }
    for runner in runners.values():
        runner.capture()

    def eager(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        backend.init_forward_metadata(batch)
        with torch.no_grad(), forward_context(backend, batch):
            logits: torch.Tensor = model(batch, inputs)
        return logits

    title = f"{name}, {shape.layers} layers; partitions: {partitions}; medians of {rounds} rounds"
    with Report(COLUMNS, facts(device, partitions=partitions), path, title=title) as report:
        for num_tokens in counts:
            batch = prompt(backend, num_tokens)
            inputs = {"input_ids": torch.randint(shape.vocabulary, (num_tokens,), device=device)}
            expected, actual = eager(batch, inputs), runners["pieces"].run(batch, inputs)
            runs = {"eager": partial(eager, batch, inputs)}
            runs |= {label: partial(each.run, batch, inputs) for label, each in runners.items()}
            times = interleave(
                {label: wall_meter(run, device) for label, run in runs.items()}, rounds
            )
            report.add(
                num_tokens,
                *(times.median(label) / 1e3 for label in runs),
                times.ratio("eager", "pieces"),
                float((actual.argmax(-1) == expected.argmax(-1)).double().mean()),
                float((actual - expected).abs().max()),
            )


if __name__ == "__main__":
    main()
