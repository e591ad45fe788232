"""The sides of a comparison in `triton_gpu.py`: what they answer, and how long they take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks.timing import Call, captured, device_time
from benchmarks.triton_setups import Setup
from triton.testing import do_bench

from attnmux.core.call import AttentionCall
from attnmux.core.errors import in_brief
from attnmux.triton.factory import triton

MOST_ERROR = 1e-2
"""Norm of the difference by the norm of what is expected."""
SAMPLED_REQUESTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What a side came to on a workload: a time, or why there is none."""

    us: float | None = None
    """Of one layer."""
    error: float | None = None
    """The larger of those against float32 on sampled queries and against our whole output."""
    failure: str = ""

    @property
    def cell(self) -> str:
        if self.us is not None:
            return f"{self.us:.1f}"
        return "WRONG" if self.error is not None else "failed" if self.failure else "-"


def ours(setup: Setup) -> list[Call]:
    """Each layer's call; the backend and the step's metadata are made here, once."""
    backend, batch, q = triton(setup.context, {}), setup.batch, setup.q
    backend.init_forward_metadata(batch)
    attend = backend.forward_decode if setup.workload.new == 1 else backend.forward_extend
    layers = setup.context.layers
    out = torch.empty_like(q)
    calls = [
        AttentionCall(q, None, None, layer, False, q_rope=setup.q_rope, out=out) for layer in layers
    ]
    return [partial(attend, call, batch) for call in calls]


def output(call: Call, setup: Setup) -> torch.Tensor:
    """[T, Hq, Dv] float32, of one call."""
    found: Any = call()
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out.float().view(setup.q.shape)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, by norm; infinite where anything is not a number."""
    relative = float((found - expected).norm() / expected.norm())
    return relative if relative == relative else float("inf")


def sampled(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of q and what attention over the first layer is there, in float32: [rows, Hq, Dv].

    The first, a middle and the last query of some requests.
    """
    work, context = setup.workload, setup.context
    pool, layer = context.token_to_kv_pool, context.layers[0]
    q = setup.q if setup.q_rope is None else torch.cat([setup.q, setup.q_rope], dim=-1)
    step = max(1, work.batch_size // SAMPLED_REQUESTS)
    rows, answers = [], []
    for request in range(0, work.batch_size, step):
        for token in sorted({0, work.new // 2, work.new - 1}):
            row = request * work.new + token
            seen = work.lens[request] - work.new + token + 1
            place = setup.batch.req_pool_indices[request]
            slots = context.req_to_token_pool.req_to_token[place, :seen].long()
            keys, values = (each[slots].float() for each in pool.get_kv_buffer(layer.layer_id))
            heads = q[row].float().view(work.kv_heads, -1, q.shape[-1])
            weights = torch.einsum("hgd,nhd->hgn", heads, keys).mul(layer.scaling).softmax(-1)
            answers.append(torch.einsum("hgn,nhd->hgd", weights, values).flatten(0, 1))
            rows.append(row)
    return torch.tensor(rows, device=q.device), torch.stack(answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is timed of a side: so many calls at once."""

    run: Call
    count: int
    first: Call


def admitted(
    make: Callable[[], list[Call]], setup: Setup, whole: torch.Tensor | None
) -> tuple[Run | None, Figure]:
    """A side that answers rightly, to be timed, and how far off any is.

    In extend the first layer's call is timed, else one graph of all. whole: another side's output,
    [T, Hq, Dv].
    """
    try:
        calls = make()
        found = output(calls[0], setup)
        rows, answers = sampled(setup)
        off = distance(found[rows], answers)
        if whole is not None:
            off = max(off, distance(found, whole))
        if off > MOST_ERROR:
            return None, Figure(error=off)
        if setup.workload.family == "extend":
            return Run(run=calls[0], count=1, first=calls[0]), Figure(error=off)
        run = captured(calls, setup.q.device)
        return Run(run=run, count=len(calls), first=calls[0]), Figure(error=off)
    except Exception as error:  # whatever a library raises is its result here
        return None, Figure(failure=in_brief(error))


def times(sides: Mapping[str, Run], rounds: int, device: torch.device) -> dict[str, float]:
    """Microseconds of one call of each side: medians of the rounds, the sides by turns.

    The cache is flushed before each run.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(_median(side.run, device) / side.count)
    return {name: statistics.median(taken) for name, taken in found.items()}


def ceilings(device: torch.device) -> dict[str, float]:
    """What this device reaches where nothing is in the way: TB/s and TFLOP/s."""
    count, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 16, 64)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _median(partial(target.copy_, source), device)
    read = source.nbytes / _median(partial(torch.sum, source), device)
    del source, target
    left, right = torch.randn(2, side, side, device=device).to(torch.bfloat16)
    product = 2 * side**3 / _median(partial(torch.matmul, left, right), device)
    return {"copy TB/s": copied / 1e6, "read TB/s": read / 1e6, "matmul TFLOP/s": product / 1e6}


def _median(run: Call, device: torch.device) -> float:
    """Microseconds."""
    if device.type != "cuda":
        return device_time(run, 1, device) * 1e6
    return float(do_bench(run, warmup=20, rep=60, return_mode="median")) * 1e3
