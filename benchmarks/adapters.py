"""What an adapter adds to the library that it calls: device time in a graph, host time eagerly.

    python benchmarks/adapters.py [--library fa3] [--only TEXT] [--rounds 21] [--json FILE]
    python benchmarks/adapters.py --dry-run      without a GPU: tiny sizes, emulated libraries

K and V are in the pool, over scattered pages. Both sides run by turns in one process; a figure is
the median of the rounds, a ratio or a difference the median of the rounds' own.

graph   Layers in one CUDA graph, each with K and V of its own, 256 MB in all at least, so that no
        launch gap and no warm cache enters. Raw: the library's function, called by hand. Ours:
        `backend.forward`, decode as it is captured. `metadata` is what the step captures besides,
        once for all layers. Bar: ours at most 1.02 times raw.
host    Wall time of one eager call, without waiting for the device. Bar: `backend.forward` at most
        15 us more than the library's own call. `metadata` is `init_forward_metadata`, once a step;
        `write` is what storing the call's K and V takes, which other engines pay too.
"""

from __future__ import annotations

import importlib.metadata
import json
import pkgutil
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from attnmux.core.backend import AttentionBackend, BackendContext
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.options import complete
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.kv import MHATokenToKVPool, PagedAllocator, ReqToTokenPool
from attnmux.core.layer import LayerSpec
from attnmux.core.workspace import Workspace
from attnmux.nvidia.cards.flashinfer import FLASHINFER
from attnmux.nvidia.emulators import flashinfer as emulated_flashinfer
from attnmux.nvidia.emulators import sgl_flash_attn
from attnmux.nvidia.fa3 import FA3Backend
from attnmux.nvidia.fa3 import Kernels as FA3Kernels
from attnmux.nvidia.flashinfer.backend import FlashInferBackend
from attnmux.nvidia.flashinfer.kernels import Kernels as FlashInferKernels

Q_HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, torch.bfloat16
COLD_BYTES = 256e6
"""Several times what a GPU's cache holds."""
MAX_RATIO, MAX_HOST_US = 1.02, 15.0
CALLS = 20
"""Eager calls between two waits: fewer than a device queues."""
WORKSPACE_BYTES = 256 << 20

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests of a step, all alike: keys of each, of which `new` are queries."""

    batch_size: int
    keys: int
    new: int = 1
    page_size: int = 16
    max_context_len: int = 0
    """What the engine allows, as wide as page tables in graphs are; 0: no more than `keys`."""

    def __str__(self) -> str:
        kind = "decode" if self.new == 1 else f"extend {self.new}"
        room = f" of {self.max_context_len}" if self.max_context_len else ""
        return f"{kind} bs {self.batch_size}, ctx {self.keys}{room}, page {self.page_size}"

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch_size * self.keys * KV_HEADS * DIM * DTYPE.itemsize


WORKLOADS = (
    Workload(batch_size=1, keys=4096),
    Workload(batch_size=16, keys=4096),
    Workload(batch_size=64, keys=4096),
    Workload(batch_size=16, keys=4096, page_size=1),
    Workload(batch_size=1, keys=4096, max_context_len=131072),
    Workload(batch_size=16, keys=4096, max_context_len=131072),
    Workload(batch_size=1, keys=4096, new=4096),
    Workload(batch_size=4, keys=8704, new=512),
)
TINY = (
    Workload(batch_size=2, keys=20),
    Workload(batch_size=2, keys=20, max_context_len=64),
    Workload(batch_size=2, keys=20, new=5, page_size=4),
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setup:
    """A workload in pools of its own."""

    workload: Workload
    context: BackendContext
    batch: ForwardBatch
    q: torch.Tensor
    pages: torch.Tensor
    """[B, pages of a request] int32."""

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [pages, page, Hkv, D]."""
        pool, page = self.context.token_to_kv_pool, self.workload.page_size
        shape = (-1, page, KV_HEADS, DIM)
        return [
            (keys.view(shape), values.view(shape))
            for keys, values in map(pool.get_kv_buffer, pool.layer_ids)
        ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Library:
    """A kernel library with its adapter."""

    distribution: str
    backend: Callable[[BackendContext], AttentionBackend]
    raw: Callable[[Setup], list[Call]]
    """The library's own call for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The figures of a library on a workload, in microseconds of a layer or of a step."""

    library: str
    workload: str
    layers: int
    graph_raw: float
    graph_ours: float
    graph_ratio: float
    graph_metadata: float
    host_raw: float
    host_ours: float
    host_added: float
    host_metadata: float
    host_write: float

    @property
    def within_bars(self) -> bool:
        return self.graph_ratio <= MAX_RATIO and self.host_added <= MAX_HOST_US


def fa3(*, emulated: bool) -> Library:
    kernels = _kernels(
        "fa3",
        emulated=None
        if not emulated
        else FA3Kernels(
            flash_attn_with_kvcache=sgl_flash_attn.flash_attn_with_kvcache,
            flash_attn_varlen_func=sgl_flash_attn.flash_attn_varlen_func,
        ),
    )

    def raw(setup: Setup) -> list[Call]:
        batch, new = setup.batch, setup.workload.new
        q, lens, queries = setup.q, batch.seq_lens, {}
        if new == 1:
            q = setup.q.unsqueeze(1)
        else:
            bounds = torch.arange(0, len(setup.q) + 1, new, dtype=torch.int32, device=lens.device)
            queries = {"cu_seqlens_q": bounds, "max_seqlen_q": new}
        return [
            partial(
                kernels.flash_attn_with_kvcache,
                q,
                keys,
                values,
                cache_seqlens=lens,
                page_table=setup.pages,
                causal=True,
                **queries,
            )
            for keys, values in setup.caches()
        ]

    return Library(
        distribution="sglang-kernel",
        backend=lambda context: FA3Backend(context, {}, kernels),
        raw=raw,
    )


def flashinfer(*, emulated: bool) -> Library:
    kernels = _kernels(
        "flashinfer",
        emulated=None
        if not emulated
        else FlashInferKernels(
            decode=emulated_flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            paged=emulated_flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            ragged=emulated_flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            merge_state=emulated_flashinfer.merge_state,
            fast_decode_plan=emulated_flashinfer.fast_decode_plan,
        ),
    )

    def raw(setup: Setup) -> list[Call]:
        work = setup.workload
        per_request = setup.pages.shape[1]
        space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=setup.q.device)
        steps = torch.arange(work.batch_size + 1, dtype=torch.int32)
        last = torch.full((work.batch_size,), (work.keys - 1) % work.page_size + 1).int()
        keys = (steps * per_request, setup.pages.flatten(), last)
        dims = (Q_HEADS, KV_HEADS, DIM, work.page_size)
        dtypes = {"q_data_type": DTYPE, "kv_data_type": DTYPE}
        if work.new == 1:
            wrapper = kernels.decode(space, "NHD", use_tensor_cores=True)
            wrapper.plan(*keys, *dims, **dtypes)
        else:
            backend = "fa3" if setup.q.is_cuda else "auto"
            wrapper = kernels.paged(space, "NHD", backend=backend)
            wrapper.plan(steps * work.new, *keys, *dims, causal=True, **dtypes)
        return [partial(wrapper.run, setup.q, cache) for cache in setup.caches()]

    return Library(
        distribution="flashinfer-python",
        backend=lambda context: FlashInferBackend(context, complete(FLASHINFER, {}), kernels),
        raw=raw,
    )


LIBRARIES: Mapping[str, Callable[..., Library]] = {"fa3": fa3, "flashinfer": flashinfer}


def _kernels(name: str, *, emulated: object) -> Any:  # noqa: ANN401  # the Kernels of any library
    return emulated or pkgutil.resolve_name(f"attnmux.nvidia.{name}.factory:KERNELS")


def make_setup(workload: Workload, device: torch.device) -> Setup:
    """Requests on pages in random order, in as many layers as a cold cache needs."""
    page, batch_size = workload.page_size, workload.batch_size
    layers = max(2, -(-int(COLD_BYTES) // workload.kv_bytes)) if device.type == "cuda" else 2
    per_request = -(-workload.keys // page)
    size = batch_size * per_request * page
    longest = workload.max_context_len or workload.keys
    pool = MHATokenToKVPool(
        size=size,
        page_size=page,
        dtype=DTYPE,
        layer_ids=range(layers),
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        device=device,
    )
    for layer_id in pool.layer_ids:
        for buffer in pool.get_kv_buffer(layer_id):
            buffer.normal_()
    context = BackendContext(
        request=Request(
            kind="mha",
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
            kv_dtype="bfloat16",
            page_size=page,
            phases=("extend", "decode"),
        ),
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device=device,
        layers=tuple(map(_layer, range(layers))),
        req_to_token_pool=ReqToTokenPool(batch_size, longest, device),
        token_to_kv_pool=pool,
        workspace=Workspace(device),
        max_batch_size=batch_size,
        max_context_len=longest,
    )
    slots = PagedAllocator(size, page, device).alloc(size).view(-1, page)
    slots = slots[torch.randperm(len(slots), device=device)].view(batch_size, -1)
    return Setup(
        workload=workload,
        context=context,
        batch=_batch(workload, context, slots[:, : workload.keys]),
        q=torch.randn(batch_size * workload.new, Q_HEADS, DIM, device=device).to(DTYPE),
        pages=(slots[:, ::page] // page).int().contiguous(),
    )


def _layer(layer_id: int) -> LayerSpec:
    return LayerSpec(
        layer_id=layer_id,
        tp_q_head_num=Q_HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
    )


def _batch(workload: Workload, context: BackendContext, slots: torch.Tensor) -> ForwardBatch:
    """slots: [B, keys] int64, of each request's tokens."""
    table, new = context.req_to_token_pool, workload.new
    rows = torch.tensor(table.alloc(workload.batch_size), device=slots.device)
    lens = torch.full((workload.batch_size,), workload.keys, dtype=torch.int32, device=slots.device)
    table.write(rows, torch.zeros_like(lens), lens, slots.flatten())
    news = torch.full_like(lens, new)
    places = torch.arange(workload.keys - new, workload.keys, device=slots.device)
    extends: dict[str, Any] = {}
    if new > 1:
        extends = {
            "extend_seq_lens": news,
            "extend_seq_lens_cpu": news.cpu(),
            "extend_prefix_lens": lens - news,
            "extend_prefix_lens_cpu": (lens - news).cpu(),
            "extend_num_tokens": new * workload.batch_size,
        }
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
        batch_size=workload.batch_size,
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        seq_lens_sum=workload.keys * workload.batch_size,
        out_cache_loc=slots[:, -new:].flatten(),
        positions=places.repeat(workload.batch_size),
        **extends,
    )


def measure(name: str, library: Library, setup: Setup, rounds: int) -> Row:
    """All figures of a library on a workload; its outputs are compared first."""
    backend, batch, q = library.backend(setup.context), setup.batch, setup.q
    layers = setup.context.layers
    raw = library.raw(setup)
    ours = [partial(backend.forward, q, None, None, layer, batch) for layer in layers]
    backend.init_forward_metadata(batch)
    for other, mine in zip(raw, ours, strict=True):
        expected: Any = other()
        torch.testing.assert_close(mine(), expected.view(q.shape), atol=2e-2, rtol=2e-2)

    rows = q[:, :KV_HEADS]
    host = host_times(
        {
            "raw": raw,
            "ours": ours,
            "write": [partial(backend.save_kv, rows, rows, layer, batch) for layer in layers],
            "metadata": [partial(backend.init_forward_metadata, batch)],
        },
        rounds,
        q.device,
    )
    in_graph: list[Call] = []
    if setup.workload.new == 1:
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        in_graph = [partial(backend.init_forward_metadata_in_graph, batch)]
    graph = graph_times({"raw": raw, "metadata": in_graph, "ours": ours}, rounds, q.device)
    median = statistics.median
    return Row(
        library=name,
        workload=str(setup.workload),
        layers=len(layers),
        graph_raw=median(graph["raw"]) / len(layers),
        graph_ours=median(graph["ours"]) / len(layers),
        graph_ratio=median(a / b for a, b in zip(graph["ours"], graph["raw"], strict=True)),
        graph_metadata=median(graph["metadata"]),
        host_raw=median(host["raw"]),
        host_ours=median(host["ours"]),
        host_added=median(a - b for a, b in zip(host["ours"], host["raw"], strict=True)),
        host_metadata=median(host["metadata"]),
        host_write=median(host["write"]),
    )


def host_times(
    sides: Mapping[str, Sequence[Call]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Microseconds on the host of one call of each side, by rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, calls in sides.items():
            wait(device)
            start = time.perf_counter()
            for index in range(CALLS):
                calls[index % len(calls)]()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return times


def graph_times(
    sides: Mapping[str, Sequence[Call]], rounds: int, device: torch.device, repeats: int = 10
) -> dict[str, list[float]]:
    """Microseconds on the device of all calls of each side, from one graph, by rounds."""
    runs = {name: captured(calls, device) for name, calls in sides.items() if calls}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in sides:
            taken = 0.0 if name not in runs else device_time(runs[name], repeats, device)
            times[name].append(taken / repeats * 1e6)
    return times


def captured(calls: Sequence[Call], device: torch.device) -> Call:
    """One graph of the calls; without a GPU the calls themselves."""

    def run() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    return graph.replay


def device_time(run: Call, repeats: int, device: torch.device) -> float:
    """Seconds of `repeats` runs."""
    wait(device)
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return time.perf_counter() - start
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts(names: Sequence[str], *, dry_run: bool) -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    libraries = [LIBRARIES[name](emulated=True).distribution for name in names]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for distribution in (*libraries, "attnmux-nvidia"):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = "not installed"
    return {
        "command": " ".join(["python", *sys.argv]),
        "emulated": dry_run,
        "machine": platform.platform(),
        "device": "cpu" if dry_run else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "versions": versions,
        "bars": {"graph_ratio": MAX_RATIO, "host_added": MAX_HOST_US},
    }


def line(row: Row, *, has_bars: bool) -> str:
    """The row of the table."""
    figures = asdict(row)
    cells = [str(figures[name]) for name in ("library", "workload", "layers")]
    for name, figure in figures.items():
        if name.startswith(("graph_", "host_")):
            cells.append(f"{figure:.3f}" if name == "graph_ratio" else f"{figure:.1f}")
    cells.append(("kept" if row.within_bars else "MISSED") if has_bars else "-")
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option(
    "--library", "names", multiple=True, type=click.Choice([*LIBRARIES]), help="Default: all."
)
@click.option("--only", default="", help="Run the workloads whose name contains this.")
@click.option("--rounds", default=21, show_default=True, help="Rounds of each workload.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures here too.")
@click.option(
    "--dry-run", is_flag=True, help="Emulated libraries on the CPU: figures mean nothing."
)
def main(names: tuple[str, ...], only: str, rounds: int, path: Path | None, dry_run: bool) -> None:
    """Print the figures as a Markdown table, and whether the bars are kept."""
    torch.manual_seed(0)
    names = names or tuple(LIBRARIES)
    device = torch.device("cpu" if dry_run else "cuda")
    known = facts(names, dry_run=dry_run)
    said = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
    click.echo(f"{known['device']}, CUDA {known['cuda']}, {said}; {known['machine']};")
    click.echo(f"{Q_HEADS}/{KV_HEADS} heads x {DIM}, bfloat16; medians of {rounds} rounds, us.\n")
    click.echo(
        "| library | workload | layers | graph: raw | ours | ratio | metadata "
        "| host: raw | ours | added | metadata | write | bars |\n" + "|---" * 13 + "|"
    )
    rows = []
    for workload in TINY if dry_run else WORKLOADS:
        if only not in str(workload):
            continue
        for name in names:
            setup = make_setup(workload, device)
            with torch.no_grad():
                row = measure(name, LIBRARIES[name](emulated=dry_run), setup, rounds)
            rows.append(row)
            click.echo(line(row, has_bars=not dry_run))
    if path is not None:
        path.write_text(json.dumps({**known, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
