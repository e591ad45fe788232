"""Extend steps with the model compiled in pieces between the calls of attention, against eager.

    python benchmarks/piecewise.py [--backend fa3] [--device cuda] [--rounds 21]
    python benchmarks/piecewise.py --device cpu --backend torch_native --dry-run      tiny sizes

A model of random weights, of the shapes of an 8B one with fewer layers, runs prompts of several
lengths: eagerly, compiled with nothing captured, and compiled in pieces with CUDA graphs. All by
turns in one process; a figure is the median of the rounds, a ratio the median of the rounds' own.
`partitions` counts what Inductor made of the compiled model: with N layers, and so N calls of
attention between them, N + 1 on a GPU, and none on a CPU, where nothing is captured. `same text`
is how many of the tokens' most likely successors are those of the eager run, `difference` the
largest of the logits: the compiler fuses, so they are not bit for bit the same.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import click
import torch
from torch._inductor.utils import run_and_get_code

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.ask.request import Request
from attnmux.core.context import BackendContext
from attnmux.core.graph.config import Forward, ModelInput
from attnmux.core.graph.piecewise import PiecewiseRunner, compile_in_pieces
from attnmux.core.kv import MHATokenToKVPool, ReqToTokenPool
from attnmux.core.layer import LayerSpec
from attnmux.core.op import forward_context
from attnmux.core.radix_attention import RadixAttention
from attnmux.core.workspace import Workspace
from attnmux.testing import find_candidate

PAGE_SIZE = 16
INPUTS = {"input_ids": ModelInput(dtype=torch.int64)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of the model."""

    layers: int = 16
    hidden: int = 4096
    inner: int = 14336
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 32000


SMALL = Shape(layers=3, hidden=64, inner=128, q_heads=4, kv_heads=2, dim=16, vocabulary=100)


class Block(torch.nn.Module):
    """One layer, without rotary embedding: that is not what is measured."""

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
    """The installed backend, over a pool for one prompt of `room` tokens."""
    candidate = find_candidate(name, device=str(device))
    layers = tuple(
        LayerSpec(
            layer_id=index,
            tp_q_head_num=shape.q_heads,
            tp_k_head_num=shape.kv_heads,
            tp_v_head_num=shape.kv_heads,
            qk_head_dim=shape.dim,
            v_head_dim=shape.dim,
            scaling=shape.dim**-0.5,
        )
        for index in range(shape.layers)
    )
    request = Request(
        num_q_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=PAGE_SIZE,
    )
    size = -(-room // PAGE_SIZE) * PAGE_SIZE
    pool = MHATokenToKVPool(
        size=size,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        layer_ids=[layer.layer_id for layer in layers],
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        v_head_dim=shape.dim,
        device=device,
    )
    table = ReqToTokenPool(1, size, device)
    table.req_to_token[1] = torch.arange(PAGE_SIZE, PAGE_SIZE + size, device=device)
    context = BackendContext(
        request=request,
        platform=candidate.platform,
        device=device,
        layers=layers,
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        workspace=Workspace(device),
        max_batch_size=1,
        max_context_len=size,
    )
    return candidate.build(context)


def prompt(backend: AttentionBackend, num_tokens: int) -> ForwardBatch:
    """A step over one prompt without a prefix."""
    device = backend.context.device
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    order = torch.arange(num_tokens, device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        req_pool_indices=torch.ones(1, dtype=torch.int64, device=device),
        seq_lens=lens.to(device),
        out_cache_loc=order + PAGE_SIZE,
        positions=order,
        seq_lens_cpu=lens,
        seq_lens_sum=num_tokens,
        extend_seq_lens=lens.to(device),
        extend_seq_lens_cpu=lens,
        extend_prefix_lens=torch.zeros_like(lens).to(device),
        extend_prefix_lens_cpu=torch.zeros_like(lens),
        extend_num_tokens=num_tokens,
    )


def seconds(call: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def count_partitions(model: Model, backend: AttentionBackend, num_tokens: int) -> int:
    """Parts of the compiled model that Inductor made to be captured on their own."""
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
@click.option("--rounds", default=21, show_default=True)
@click.option("--dry-run", is_flag=True, help="A tiny model.")
def main(name: str, device_name: str, rounds: int, dry_run: bool) -> None:
    device = torch.device(device_name)
    shape = SMALL if dry_run else Shape()
    counts = (5, 16, 30) if dry_run else (30, 128, 250, 512, 1000, 2048)
    sizes = (16, 32) if dry_run else (32, 128, 256, 512, 1024, 2048)
    torch.manual_seed(0)
    backend = make_backend(name, shape, device, max(sizes))
    with torch.device(device):
        model = Model(shape, backend.context.layers).to(torch.bfloat16).eval()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"{name} on {where}, torch {torch.__version__}, {shape.layers} layers")
    print(f"partitions: {count_partitions(model, backend, counts[-1])}")
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

    print("tokens    eager ms  compiled ms  pieces ms  eager/pieces  same text  difference")
    for num_tokens in counts:
        batch = prompt(backend, num_tokens)
        ids = torch.randint(shape.vocabulary, (num_tokens,), device=device)
        inputs = {"input_ids": ids}
        expected = eager(batch, inputs)
        actual = runners["pieces"].run(batch, inputs)
        same = float((actual.argmax(-1) == expected.argmax(-1)).double().mean())
        difference = float((actual - expected).abs().max())
        calls: dict[str, Callable[[], object]] = {
            "eager": lambda b=batch, i=inputs: eager(b, i),  # type: ignore[misc]  # bound now
            **{
                label: lambda r=runner, b=batch, i=inputs: r.run(b, i)  # type: ignore[misc]  # bound now
                for label, runner in runners.items()
            },
        }
        times: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(rounds):
            for label, call in calls.items():
                times[label].append(seconds(call, device))
        medians = [statistics.median(times[label]) * 1e3 for label in calls]
        ratio = statistics.median(
            eager_time / pieces_time
            for eager_time, pieces_time in zip(times["eager"], times["pieces"], strict=True)
        )
        print(
            f"{num_tokens:6d}  {medians[0]:10.3f}  {medians[1]:11.3f}  {medians[2]:9.3f}  "
            f"{ratio:12.2f}  {same:9.1%}  {difference:10.4f}"
        )


if __name__ == "__main__":
    main()
