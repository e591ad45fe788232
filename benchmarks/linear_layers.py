"""Layers without softmax attention: the portable kernels, and flash-linear-attention's.

    python -m benchmarks.linear_layers [--kinds gdn,mamba2] [--heads 16x32,2x4] [--json FILE]
    python -m benchmarks.linear_layers --kinds mamba1 --heads 1x8192     Falcon Mamba's and Jamba's
    python -m benchmarks.linear_layers --dry-run     on a CPU: tiny sizes, torch_linear alone

A figure is device time of one layer's recurrence in microseconds, replayed from a graph. `eager`
names the sides that cannot be captured: their figures contain the host's work. `triton` is
`triton_linear`, which reads and writes the states in the rows of a pool. `fla` is
flash-linear-attention's function for the same, on states that lie in order: what an engine does to
bring them there is not counted. `one by one` is `triton_linear` token by token, in prompts. `torch`
is `torch_linear`. `ratio` is triton over fla, or over one by one where that is not installed; in
mamba1, which always runs one by one, over torch. An error is the largest difference from
torch_linear in float32, over its largest value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import dry_run_option, json_option, only_option, rounds_option

from attnmux.core import GraphUnsupported, Plugins
from attnmux.core.plugin import LinearAttentionBackend
from attnmux.cpu.torch_linear import TorchLinearBackend
from attnmux.testing.bench import Report, device_meter, facts, interleave
from attnmux.testing.bench.timing import Run, graphs_of, in_graph
from attnmux.testing.cases.case import Step, decode, extend
from attnmux.testing.cases.linear import SHAPES, LinearCase
from attnmux.testing.setup.linear import (
    LinearInput,
    LinearSetup,
    LinearStep,
    make_linear_setup,
    prepare_linear,
)

STEPS: dict[str, Step] = {
    **{f"decode {size}": decode(*[4096] * size) for size in (1, 16, 64, 256)},
    "prefill 1 x 4096": extend((0, 4096)),
    "prefill 1 x 8192": extend((0, 8192)),
    "prefill 1 x 32768": extend((0, 32768)),
    "prefill 8 x 1024": extend(*[(0, 1024)] * 8),
    "prefill 64 x 128 after 4096": extend(*[(4096, 128)] * 64),
}
TINY = {"decode 2": decode(9, 4), "prefill 1 x 70": extend((0, 70))}
ONE_BY_ONE = "one by one"
MOST_BY_TORCH = 8192
"""Tokens that torch_linear is timed with: more take seconds."""
COLUMNS = {
    **{"kind": "", "heads": "", "step": ""},
    **{"triton": ",.1f", "fla": ",.1f", "one by one": ",.1f", "torch": ",.1f", "ratio": ".2f"},
    **{"error": ".4f", "error of fla": ".4f", "eager": ""},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The ways to run a step, and the answer of each."""

    runs: dict[str, Run]
    answers: dict[str, torch.Tensor]


@click.command(context_settings={"show_default": True})
@click.option("--kinds", default="gdn,kda,mamba2")
@click.option("--heads", default="16x32,2x4", help="K heads x V heads, each a shape.")
@rounds_option(7)
@only_option
@dry_run_option("Run on a CPU")
@json_option
def main(kinds: str, heads: str, rounds: int, only: str, dry_run: bool, path: Path | None) -> None:
    """Print the time of a layer's recurrence in each way."""
    platform = Plugins.load().detect().pick()
    device = torch.device("cpu" if dry_run else platform.device_type)
    dims = "128 and 128; 16 and 1 in mamba1"
    about = facts(device, "attnmux-core", "flash-linear-attention", "triton", dims=dims)
    with torch.no_grad(), Report(COLUMNS, about, path, title="us of a layer") as report:
        for kind in kinds.split(","):
            for shape in heads.split(","):
                for name, lengths in (TINY if dry_run else STEPS).items():
                    if only in f"{kind} {shape} {name}" and can_be_checked(kind, lengths):
                        measure(kind, shape, name, lengths, device, rounds, report)


def can_be_checked(kind: str, lengths: Step) -> bool:
    """Whether torch_linear's products of each channel fit into a device's memory."""
    return kind != "mamba1" or sum(lengths.new) <= MOST_BY_TORCH


def measure(
    kind: str,
    shape: str,
    name: str,
    lengths: Step,
    device: torch.device,
    rounds: int,
    report: Report,
) -> None:
    """A row for a step of a shape."""
    sides = sides_of(case_of(kind, shape, lengths), device)
    exact = sides.answers.pop("exact")
    graphs = graphs_of(device)
    runs = {side: captured(run, graphs) for side, run in sides.runs.items()}
    eager = ", ".join(side for side in runs if runs[side] is sides.runs[side])
    meters = {side: device_meter(run, device) for side, run in runs.items()}
    times = interleave(meters, rounds, warm_up=1)
    us = {side: times.median(side) for side in meters}
    error = {
        side: float((answer.float() - exact).abs().max() / exact.abs().max())
        for side, answer in sides.answers.items()
    }
    other = next((side for side in ("fla", ONE_BY_ONE, "torch") if side in us), None)
    ratio = times.ratio("triton", other) if other is not None and "triton" in us else None
    by_way = (us.get("triton"), us.get("fla"), us.get(ONE_BY_ONE), us.get("torch"))
    errors = error.get("triton"), error.get("fla")
    report.add(kind, shape, name, *by_way, ratio, *errors, eager)


def case_of(kind: str, heads: str, lengths: Step) -> LinearCase:
    """Heads as given ("16x32"), of 128 dims each; mamba2 has a state of 128 for 64 dims of x, and
    mamba1 one of 16 for each of its channels, which are its V heads."""
    k_heads, v_heads = map(int, heads.split("x"))
    k_heads = v_heads if kind in ("kda", "lightning") else k_heads
    dims = {"head_k_dim": 128, "head_v_dim": 64 if kind == "mamba2" else 128}
    if kind == "mamba1":
        dims = {"head_k_dim": 16, "head_v_dim": 1}
    shaped: dict[str, Any] = {**SHAPES[kind], **dims}
    shaped |= {"num_k_heads": k_heads, "num_v_heads": v_heads, "conv_dims": (), "conv_size": 0}
    return LinearCase(name="benchmark", kind=kind, steps=(lengths,), **shaped)  # type: ignore[arg-type]  # a key of SHAPES


def sides_of(case: LinearCase, device: torch.device) -> Sides:
    """Every side that runs on the device, and torch_linear's answer in float32."""
    platform = Plugins.load().detect().pick()
    setup = make_linear_setup(case, platform, device)
    step = prepare_linear(setup, case.steps[0], host_lens=True)
    given = step.inputs[0]
    start = setup.states.state(given.layer.layer_id).clone()
    runs: dict[str, Run] = {}
    answers: dict[str, torch.Tensor] = {}

    def add(name: str, run: Callable[[], torch.Tensor]) -> None:
        setup.states.state(given.layer.layer_id).copy_(start)
        answers[name] = run().clone()
        runs[name] = run

    torch_linear = TorchLinearBackend(setup.context)
    add("torch", on_backend(torch_linear, step, given))
    answers["exact"] = answers.pop("torch").float()
    if step.num_real_tokens > MOST_BY_TORCH:
        runs.pop("torch")
    if device.type != "cpu":
        kernels = import_module("attnmux.triton.linear.backend").TritonLinearBackend
        add("triton", on_backend(kernels(setup.context), step, given))
        if not step.batch.forward_mode.is_decode() and case.kind != "mamba1":
            recurrent = kernels(setup.context)
            recurrent.few_tokens = sys.maxsize
            add(ONE_BY_ONE, on_backend(recurrent, step, given))
        by_fla = flash_linear_attention(setup, step, given, start)
        if by_fla is not None:
            add("fla", by_fla)
    return Sides(runs=runs, answers=answers)


def on_backend(
    backend: LinearAttentionBackend, step: LinearStep, given: LinearInput
) -> Callable[[], torch.Tensor]:
    backend.init_forward_metadata(step.batch)

    def run() -> torch.Tensor:
        qkv = given.q, given.k, given.v
        return backend.forward(*qkv, given.layer, step.batch, g=given.g, beta=given.beta)

    return run


def flash_linear_attention(
    setup: LinearSetup, step: LinearStep, given: LinearInput, start: torch.Tensor
) -> Callable[[], torch.Tensor] | None:
    """Its function for the step; None for a kind that it is not compared in, and without it."""
    layer, batch = given.layer, step.batch
    module, stem = {
        "gdn": ("fla.ops.gated_delta_rule", "gated_delta_rule"),
        "kda": ("fla.ops.kda", "kda"),
    }.get(layer.kind, ("", ""))
    try:
        functions = import_module(module)
    except (ImportError, ValueError):
        return None
    is_decode = batch.forward_mode.is_decode()
    function = getattr(functions, f"{'fused_recurrent' if is_decode else 'chunk'}_{stem}")
    states = start[batch.req_pool_indices]
    states[step.fresh] = 0
    tokens = torch.tensor((0, *step.new), device=setup.context.device).cumsum(0)
    assert given.beta is not None  # both kinds have one
    tensors = given.q, given.k, given.v, given.g, given.beta
    q, k, v, g, beta = (each.contiguous().unsqueeze(0) for each in tensors)

    def run() -> torch.Tensor:
        out, _ = function(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=layer.scaling,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=layer.qk_l2norm,
            cu_seqlens=tokens,
        )
        result: torch.Tensor = out[0]
        return result

    return run


def captured(run: Run, graphs: Any) -> Run:  # noqa: ANN401  # as graphs_of returns it
    """The run in a graph; itself where it reads lengths on the host."""
    try:
        return in_graph(run, graphs)
    except (GraphUnsupported, RuntimeError):
        return run


if __name__ == "__main__":
    main()
