"""The work of a step, the limits of the device, and how close a time comes to them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from attnmux.core import Request, torch_dtype
from attnmux.testing.bench.linear_work import linear_bytes, linear_flops
from attnmux.testing.bench.shapes import value_bytes
from attnmux.testing.bench.timing import current, median_us, wait
from attnmux.testing.bench.workload import Workload, kv_width, q_width

MOST_SECONDS = 1.5
"""Most time for both ceilings together. One product or copy that has begun is finished."""

BEYOND = 1.05
"""A larger share of a ceiling is more than two measurements of it differ by."""

SIDES = 256, 8192
"""Sides of the first and of the largest square matrix. Each takes eight times the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The work of one layer's call: arithmetic, and the memory that it cannot avoid to move."""

    flops: int
    """Floating-point operations: of attention, those of the two products."""
    nbytes: int
    """Bytes read and written."""

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.nbytes


def cost_of(workload: Workload, request: Request) -> Cost:
    """The cost of a workload in the shapes of a decided request, in which the KV dtype is set.

    With T new tokens, S visible pairs of a query and a key, and N keys that some query of their
    request sees:

        FLOP  = 2 * S * Hq * (D + Dv)
        bytes = T * Hq * (D + Dv) * size       Q is read, O is written
              + T * Hkv * (D + Dv) * size      the new K and V are read
              + T * Hkv * (D + Dv) * kv_size   and stored in the pool
              + N * Hkv * (D + Dv) * kv_size   K and V are read from the pool

    Windows and chunks reduce S and N. All query heads of a group share one read of their KV head.
    Absorbed MLA has one KV head, whose stored row of rank + rope values is both K and V: D is
    rank + rope for Q and Dv is rank for O.

    The products are counted as in FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 4.1), with
    the exact number of visible pairs in place of one half for causality; exponentials are not
    counted. The bytes are the compulsory traffic of the roofline model (Williams, Waterman and
    Patterson 2009, doi:10.1145/1498765.1498785): each value moves once. A backend that spills
    partial results, or reads a KV head once a query head, moves more and lies lower.

    `linear_work` counts linear layers.
    """
    size = torch_dtype(request.dtype or "").itemsize
    if request.is_linear:
        return Cost(
            flops=linear_flops(workload, request), nbytes=linear_bytes(workload, request, size)
        )
    kv_size = value_bytes(torch_dtype(request.kv_dtype or ""))
    new, stored = workload.num_tokens, workload.kv_bytes(request, kv_size)
    values = new * kv_width(request)
    q_and_out = new * q_width(request)
    return Cost(
        flops=workload.flops(request),
        nbytes=(q_and_out + values) * size + round(values * kv_size) + stored,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The largest rates measured on this device."""

    read_gbs: float
    """GB/s of a sum or of a copy (which reads and writes), whichever is more."""
    matmul_tflops: float
    """TFLOP/s of a square matrix product in the dtype that is timed."""

    def __str__(self) -> str:
        rate, unit = self.matmul_tflops, "TFLOP/s"
        if rate < 1:
            rate, unit = rate * 1e3, "GFLOP/s"
        return f"{self.read_gbs:,.4g} GB/s, {rate:,.4g} {unit}"

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on the products bound a step, and no longer the bandwidth."""
        return self.matmul_tflops * 1e3 / self.read_gbs

    def or_higher(self, other: Ceilings) -> Ceilings:
        """The higher rates of two measurements."""
        return Ceilings(
            read_gbs=max(self.read_gbs, other.read_gbs),
            matmul_tflops=max(self.matmul_tflops, other.matmul_tflops),
        )

    def limit(self, cost: Cost) -> Literal["bandwidth", "matmul"]:
        """The ceiling that bounds this work."""
        return "matmul" if cost.intensity > self.ridge else "bandwidth"

    def share(self, cost: Cost, us: float) -> float:
        """The least time that the ceilings allow, divided by `us`.

        More than 1 if a backend multiplies in a faster dtype, or finds K and V in a cache.
        """
        return max(cost.nbytes / self.read_gbs / 1e3, cost.flops / self.matmul_tflops / 1e6) / us


def ceilings(device: torch.device, dtype: torch.dtype, seconds: float) -> Ceilings:
    """Measure the device. seconds: least time for each figure, up to a third of `MOST_SECONDS`."""
    seconds = min(seconds, MOST_SECONDS / 3)
    with current(device):
        return Ceilings(
            read_gbs=_bandwidth(device, seconds) / 1e3,
            matmul_tflops=_products(device, dtype, seconds) / 1e6,
        )


def _bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes per microsecond."""
    nbytes = 1 << 27 if device.type == "cpu" else 1 << 30
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * nbytes / median_us(partial(target.copy_, source), seconds)
    read = nbytes / median_us(partial(torch.sum, source), seconds)
    return max(copied, read)


def _products(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """FLOP per microsecond of the best size, of sizes that grow while they fit in `seconds`."""
    side, largest = SIDES
    # The first product loads the library, which takes longer than `seconds`
    torch.matmul(*torch.randn((2, side, side), device=device).to(dtype))
    wait(device)
    best, end = 0.0, time.monotonic() + seconds
    while True:
        left, right = torch.randn((2, side, side), device=device).to(dtype)
        us = median_us(partial(torch.matmul, left, right), seconds / 8)
        best = max(best, 2 * side**3 / us)
        side *= 2
        # median_us warms up with two runs, and times at least one
        if side > largest or time.monotonic() + 3 * 8 * us / 1e6 > end:
            return best
