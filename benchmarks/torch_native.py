"""torch_native against a loop that gathers each request's K and V and calls torch's SDPA.

    python benchmarks/torch_native.py [--rounds 9] [--threads N] [--only TEXT]

Both run by turns in one process, over the same scattered pages; a figure is the median of the
rounds, a ratio the median of the rounds' ratios. Times are of one layer's attention with K and V
in the pool; `metadata` is what a step costs once, whatever the number of layers. GB/s counts the
K and V that a layer has to read, and is held against how fast `torch.sum` reads a large buffer.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.context import BackendContext
from attnmux.core.dtypes import dtype_name
from attnmux.core.kv import MHATokenToKVPool, PagedAllocator, ReqToTokenPool
from attnmux.core.layer import LayerSpec
from attnmux.core.workspace import Workspace
from attnmux.cpu.torch_native import TorchNativeBackend

Q_HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, torch.bfloat16
LAYERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of a step: keys of each, of which `new` are queries."""

    lens: tuple[int, ...]
    page_size: int
    new: int = 1
    name: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}, page {self.page_size}"
        return f"decode bs {len(self.lens)}, ctx {self.lens[0]}, page {self.page_size}"

    @property
    def num_tokens(self) -> int:
        return self.new * len(self.lens)

    @property
    def kv_bytes(self) -> int:
        return 2 * sum(self.lens) * KV_HEADS * DIM * DTYPE.itemsize


def workloads() -> list[Workload]:
    """The two that are quoted, a grid, uneven lengths, a prefill."""
    rows = [Workload(lens=(2048,) * 16, page_size=page) for page in (1, 16)]
    rows += [
        Workload(lens=(ctx,) * batch, page_size=16)
        for ctx in (128, 2048)
        for batch in (1, 4, 16, 64)
        if (ctx, batch) != (2048, 16)
    ]
    uneven = tuple(int(length) for length in torch.linspace(16, 4096, 16))
    rows.append(Workload(lens=uneven, page_size=16, name="decode bs 16, ctx 16 to 4096"))
    rows.append(Workload(lens=(2048,), page_size=16, new=2048, name="prefill of 2048"))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bench:
    """A workload in pools of its own, with both ways to run it."""

    workload: Workload
    backend: AttentionBackend
    batch: ForwardBatch
    q: torch.Tensor

    @classmethod
    def of(cls, workload: Workload) -> Bench:
        context = make_context(workload)
        return cls(
            workload=workload,
            backend=TorchNativeBackend(context),
            batch=make_batch(workload, context),
            q=torch.randn(workload.num_tokens, Q_HEADS, DIM).to(DTYPE),
        )

    def prepare(self) -> None:
        """All of a step but the layers."""
        self.backend.init_forward_metadata(self.batch)

    def ours(self) -> list[torch.Tensor]:
        """Every layer's attention."""
        return [
            self.backend.forward(self.q, None, None, layer, self.batch)
            for layer in self.backend.context.layers
        ]

    def baseline(self) -> list[torch.Tensor]:
        """The same by a loop over requests."""
        return [self._baseline(layer) for layer in self.backend.context.layers]

    def _baseline(self, layer: LayerSpec) -> torch.Tensor:
        context = self.backend.context
        keys, values = context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        table, new = context.req_to_token_pool.req_to_token, self.workload.new
        out = torch.empty_like(self.q)
        for request, (row, length) in enumerate(
            zip(self.batch.req_pool_indices.tolist(), self.workload.lens, strict=True)
        ):
            slots = table[row, :length]
            tokens = slice(request * new, (request + 1) * new)
            of_request = torch.nn.functional.scaled_dot_product_attention(
                self.q[tokens].transpose(0, 1).unsqueeze(0),
                keys[slots].transpose(0, 1).unsqueeze(0),
                values[slots].transpose(0, 1).unsqueeze(0),
                scale=layer.scaling,
                is_causal=new > 1,
                enable_gqa=True,
            )
            out[tokens] = of_request.squeeze(0).transpose(0, 1)
        return out


def make_context(workload: Workload) -> BackendContext:
    page, longest = workload.page_size, max(workload.lens)
    size = sum(-(-length // page) * page for length in workload.lens)
    layers = tuple(
        LayerSpec(
            layer_id=index,
            tp_q_head_num=Q_HEADS,
            tp_k_head_num=KV_HEADS,
            tp_v_head_num=KV_HEADS,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            scaling=DIM**-0.5,
        )
        for index in range(LAYERS)
    )
    pool = MHATokenToKVPool(
        size=size,
        page_size=page,
        dtype=DTYPE,
        layer_ids=range(LAYERS),
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        device="cpu",
    )
    for layer in layers:
        for buffer in pool.get_kv_buffer(layer.layer_id):
            buffer.normal_()
    return BackendContext(
        request=Request(
            kind="mha", num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, dtype=dtype_name(DTYPE)
        ),
        platform=Platform.parse(f"cpu:{platform.machine()}"),
        device=torch.device("cpu"),
        layers=layers,
        req_to_token_pool=ReqToTokenPool(len(workload.lens), longest, "cpu"),
        token_to_kv_pool=pool,
        workspace=Workspace(torch.device("cpu")),
        max_batch_size=len(workload.lens),
        max_context_len=longest,
    )


def make_batch(workload: Workload, context: BackendContext) -> ForwardBatch:
    """Requests on pages in random order."""
    page, pool, table = workload.page_size, context.token_to_kv_pool, context.req_to_token_pool
    pages = PagedAllocator(pool.size, page, "cpu").alloc(pool.size).view(-1, page)
    pages = pages[torch.randperm(len(pages))]
    rows = torch.tensor(table.alloc(len(workload.lens)))
    lens = torch.tensor(workload.lens, dtype=torch.int32)
    num_pages = [-(-length // page) for length in workload.lens]
    slots = [
        part.reshape(-1)[:length]
        for part, length in zip(torch.split(pages, num_pages), workload.lens, strict=True)
    ]
    table.write(rows, torch.zeros_like(lens), lens, torch.cat(slots))
    new = torch.full_like(lens, workload.new)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if workload.new == 1 else ForwardMode.EXTEND,
        batch_size=len(workload.lens),
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=torch.cat([part[-workload.new :] for part in slots]),
        positions=torch.cat([torch.arange(n - workload.new, n) for n in workload.lens]),
        extend_seq_lens=new,
        extend_prefix_lens=lens - new,
        extend_num_tokens=workload.num_tokens,
    )


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """Mean wall time of a call."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def read_bandwidth(rounds: int) -> float:
    """GB/s of summing 256 MB of float32."""
    buffer = torch.ones(64 * 2**20)
    return buffer.nbytes / statistics.median(seconds(buffer.sum) for _ in range(rounds)) / 1e9


def measure(workload: Workload, rounds: int) -> tuple[float, float, float, float]:
    """Seconds of a layer by the baseline and by torch_native, of the metadata, and the ratio."""
    bench = Bench.of(workload)
    bench.prepare()
    for mine, other in zip(bench.ours(), bench.baseline(), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)
    baseline, ours, metadata = [], [], []
    for _ in range(rounds):
        baseline.append(seconds(bench.baseline) / LAYERS)
        metadata.append(seconds(bench.prepare))
        ours.append(seconds(bench.ours, times=3) / LAYERS)
    ratio = statistics.median(a / b for a, b in zip(baseline, ours, strict=True))
    median = statistics.median
    return median(baseline), median(ours), median(metadata), ratio


@click.command()
@click.option("--rounds", default=9, show_default=True, help="Rounds of each workload.")
@click.option("--threads", type=int, help="Threads of torch; its own choice by default.")
@click.option("--only", default="", help="Run the workloads whose name contains this.")
def main(rounds: int, threads: int | None, only: str) -> None:
    """Print the figures as a Markdown table."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    bandwidth = read_bandwidth(rounds)
    click.echo(
        f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; "
        f"{Q_HEADS}/{KV_HEADS} heads x {DIM}, {dtype_name(DTYPE)}; "
        f"medians of {rounds} rounds; torch.sum reads {bandwidth:.1f} GB/s.\n"
    )
    click.echo(
        "| workload | baseline ms | ours ms | metadata ms | tokens/s | GB/s | of read bandwidth "
        "| times baseline |\n|---|---|---|---|---|---|---|---|"
    )
    for workload in workloads():
        if only not in str(workload):
            continue
        baseline, ours, metadata, ratio = measure(workload, rounds)
        rate = workload.kv_bytes / ours / 1e9
        # A prefill is bound by arithmetic: what it reads says nothing.
        reading = f"{rate:.2f} | {rate / bandwidth:.0%}" if workload.new == 1 else "- | -"
        click.echo(
            f"| {workload} | {baseline * 1e3:.2f} | {ours * 1e3:.2f} | {metadata * 1e3:.2f} "
            f"| {workload.num_tokens / ours:,.0f} | {reading} | {ratio:.1f} |"
        )


if __name__ == "__main__":
    main()
