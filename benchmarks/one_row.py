"""The kernel `linear` of attnmux-triton against torch's linear layers, for one row.

    python -m benchmarks.one_row [--rounds 9] [--dtype bfloat16] [--json FILE]
    TRITON_INTERPRET=1 python -m benchmarks.one_row --device cpu     small, to try the script

Both sides take turns. A figure is the device time of one product in microseconds, in a graph of
products with as many weights of a shape as exceed a cache of 256 MB. TB/s are bytes of the weights.
The error is the largest one compared with float64, over the largest value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from benchmarks.cases import json_option, rounds_option

from attnmux.testing.bench import Report, device_meter, facts, interleave
from attnmux.testing.bench.timing import graphs_of, in_graph, in_turn
from attnmux.triton.functions.one_row import OneRowProducts

WEIGHTS = {
    "random 3B: queries, keys, values": (5120, 3072),
    "random 3B: output of attention": (3072, 3072),
    "random 3B: keys": (1024, 3072),
    "random 3B: gate and up": (16384, 3072),
    "random 3B: down": (3072, 8192),
    "random 3B: head": (32000, 3072),
    "Llama 3 8B: queries, keys, values": (6144, 4096),
    "Llama 3 8B: gate and up": (28672, 4096),
    "Llama 3 8B: down": (4096, 14336),
    "Qwen2.5 0.5B: gate and up, biased": (9728, 896),
    "Qwen2.5 0.5B: down": (896, 4864),
}
"""[N, K] of the merged projections of models."""
TINY = {"tiny": (40, 520), "tiny, biased": (8, 512)}
CACHE_BYTES = 256 << 20
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
COLUMNS = {
    "weights": "",
    "N x K": "",
    "triton us": ".2f",
    "torch us": ".2f",
    "triton TB/s": ".2f",
    "triton / torch": ".2f",
    "error": ".4f",
    "error of torch": ".4f",
}


@click.command()
@rounds_option(9)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16")
@click.option("--device", default="cuda")
@json_option
def main(rounds: int, dtype: str, device: str, path: Path | None) -> None:
    """Print a product's time for each shape, and the ratio to torch."""
    place = torch.device(device)
    with Report(COLUMNS, facts(place, "triton", dtype=dtype), path) as report:
        for name, shape in (WEIGHTS if place.type == "cuda" else TINY).items():
            measure(name, shape, getattr(torch, dtype), place, rounds, report)


def measure(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    report: Report,
) -> None:
    num_out, width = shape
    count = 2 + CACHE_BYTES // (2 * num_out * width) if device.type == "cuda" else 2
    weights = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
    x = torch.randn(1, width, device=device).to(dtype)
    bias = torch.randn(num_out, device=device).to(dtype) if "biased" in name else None
    exact = x.double() @ weights[0].double().T + (0 if bias is None else bias.double())
    graphs = graphs_of(device)
    sides: dict[str, Product] = {
        "triton": OneRowProducts(),
        "torch": torch.nn.functional.linear,
    }
    meters, errors = {}, {}
    for side, multiply in sides.items():
        errors[side] = float(
            (multiply(x, weights[0], bias) - exact).abs().max() / exact.abs().max()
        )
        run = in_graph(in_turn([partial(multiply, x, each, bias) for each in weights]), graphs)
        meters[side] = device_meter(run, device)
    times = interleave(meters, rounds, warm_up=1)
    us = {side: times.median(side) / count for side in meters}
    speed = 2 * num_out * width / us["triton"] / 1e6
    ratio = times.ratio("triton", "torch")
    report.add(
        name, f"{num_out:,} x {width:,}", us["triton"], us["torch"], speed, ratio, *errors.values()
    )


if __name__ == "__main__":
    main()
