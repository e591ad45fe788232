"""Running a backend of linear layers on a case, and comparing it with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields

import torch

from attnmux.core import ForwardBatch, LinearAttentionBackend, device_graphs, torch_dtype
from attnmux.core.graph.devices import CapturedGraph, GraphStep
from attnmux.testing import linear_reference
from attnmux.testing.candidate import Candidate, StepFigures
from attnmux.testing.comparison import (
    OUTPUT_TOLERANCE,
    Disagreement,
    Tolerance,
    compare,
    errors_between,
)
from attnmux.testing.linear_cases import LinearCase
from attnmux.testing.linear_setup import (
    LinearInput,
    LinearSetup,
    LinearStep,
    make_linear_setup,
    prepare_linear,
)
from attnmux.testing.recording import RecordingGraphs

PRODUCTS = 4
"""Chunked kernels round a chunk's products to the dtype of the call before they multiply them
again, so that errors of a few such roundings add up."""


def run_linear(
    candidate: Candidate, case: LinearCase, seed: int
) -> tuple[float, tuple[StepFigures, ...]]:
    """The largest absolute error, and the figures of the steps.

    Raises Disagreement, or whatever the backend raises.
    """
    setup = make_linear_setup(
        case, candidate.platform, candidate.device, seed=seed, launches=candidate.launches
    )
    backend = candidate.build_linear(setup.context)
    host_lens = case.host_lens or candidate.card.needs_cpu_seq_lens
    run = _graphs(setup, backend, host_lens) if case.graph else _eager(backend)
    max_error, figures = 0.0, []
    for number, lengths in enumerate(case.steps, start=1):
        step = prepare_linear(setup, lengths, host_lens=host_lens)
        before = [buffer.clone() for buffer in setup.states.buffers]
        given = [tensor.clone() for tensor in _tensors(step)]
        begin = time.perf_counter()
        outputs = run(step)
        if setup.context.device.type != "cpu":
            torch.accelerator.synchronize(setup.context.device)
        ms = (time.perf_counter() - begin) * 1e3
        try:
            if not all(map(torch.equal, given, _tensors(step))):
                raise Disagreement("an input was written, and a backend only reads it")
            error, rounding = _check(setup, step, before, outputs)
        except Disagreement as fault:
            raise Disagreement(f"step {number}, {lengths.mode.name}: {fault}") from fault
        max_error = max(max_error, error)
        if rounding:
            rms, worst = (max(values) for values in zip(*rounding, strict=True))
            longest = max(lengths.lens)
            figures.append(StepFigures(dtype=case.dtype, keys=longest, ms=ms, rms=rms, worst=worst))
    return max_error, tuple(figures)


def _tensors(step: LinearStep) -> list[torch.Tensor]:
    return [tensor for each in step.inputs for tensor in each.tensors()]


Outputs = list[list[torch.Tensor]]
"""Of each layer: the convolutions' results, then the recurrence's."""


def _call(backend: LinearAttentionBackend, given: LinearInput, batch: ForwardBatch) -> list:  # type: ignore[type-arg]  # as Outputs
    layer = given.layer
    outputs = [
        backend.convolve(x, weight, layer, batch, bias=bias, silu=given.silu, index=index)
        for index, (x, weight, bias) in enumerate(given.convs)
    ]
    if layer.has_state:
        qkv = given.q, given.k, given.v
        outputs.append(backend.forward(*qkv, layer, batch, g=given.g, beta=given.beta))
    return outputs


def _eager(backend: LinearAttentionBackend) -> Callable[[LinearStep], Outputs]:
    def run(step: LinearStep) -> Outputs:
        backend.init_forward_metadata(step.batch)
        return [_call(backend, given, step.batch) for given in step.inputs]

    return run


def _graphs(
    setup: LinearSetup, backend: LinearAttentionBackend, host_lens: bool
) -> Callable[[LinearStep], Outputs]:
    """Each batch size has a graph, captured with shorter requests and other values."""
    device = setup.context.device
    devices = RecordingGraphs() if device.type == "cpu" else device_graphs(device)
    most = max(len(step.lens) + step.padding for step in setup.case.steps)
    backend.init_cuda_graph_state(most, most)
    captured: dict[int, tuple[LinearStep, CapturedGraph]] = {}
    with devices.session():
        for lengths in setup.case.steps:
            fixed = prepare_linear(setup, lengths.halved(), host_lens=host_lens)
            if fixed.batch.batch_size in captured:
                continue
            backend.init_forward_metadata_out_graph(fixed.batch, in_capture=True)
            step = GraphStep(
                prepare=lambda fixed=fixed: backend.init_forward_metadata_in_graph(fixed.batch),  # type: ignore[misc]
                forward=lambda fixed=fixed: [  # type: ignore[misc]
                    _call(backend, given, fixed.batch) for given in fixed.inputs
                ],
            )
            devices.warm_up(step)
            captured[fixed.batch.batch_size] = fixed, devices.capture(step)

    def run(step: LinearStep) -> Outputs:
        fixed, graph = captured[step.batch.batch_size]
        for name in (field.name for field in fields(fixed.batch)):
            held, value = getattr(fixed.batch, name), getattr(step.batch, name)
            if isinstance(held, torch.Tensor):
                held.copy_(value)
        for ours, theirs in zip(fixed.inputs, step.inputs, strict=True):
            for held, value in zip(ours.tensors(), theirs.tensors(), strict=True):
                held.copy_(value)
            for (_, weight, bias), (_, other, more) in zip(ours.convs, theirs.convs, strict=True):
                weight.copy_(other)
                if bias is not None and more is not None:
                    bias.copy_(more)
        backend.init_forward_metadata_out_graph(fixed.batch)
        graph.replay()
        return [[part.clone() for part in outputs] for outputs in graph.outputs]

    return run


def _check(
    setup: LinearSetup, step: LinearStep, before: list[torch.Tensor], outputs: Outputs
) -> tuple[float, list[tuple[float, float]]]:
    """The largest absolute error, and (rms, worst) of each recurrence in roundings."""
    rows, real = step.batch.req_pool_indices, step.num_real_tokens
    held = dict(zip(map(id, setup.states.buffers), before, strict=True))
    own = OUTPUT_TOLERANCE[torch_dtype(setup.case.dtype)]
    tolerance = Tolerance(atol=PRODUCTS * own.atol, rtol=PRODUCTS * own.rtol)
    error, rounding = 0.0, []
    for given, found in zip(step.inputs, outputs, strict=True):
        layer, name = given.layer, f"layer {given.layer.layer_id}"
        for index, (x, weight, bias) in enumerate(given.convs):
            pool, out = setup.states.conv(layer.layer_id, index), found[index]
            start = _started(held[id(pool)], step)
            expected, after = linear_reference.convolution(
                x, weight, bias, silu=given.silu, states=start, new=step.new
            )
            what = f"{name}, convolution {index}"
            error = max(error, compare(what, out[:real], expected[:real], own))
            _check_states(what, pool, held[id(pool)], rows, after, Tolerance(atol=0, rtol=0), step)
        if layer.has_state:
            pool, out = setup.states.state(layer.layer_id), found[-1]
            tensors = (given.q, given.k, given.v, given.g, given.beta)
            start = _started(held[id(pool)], step)
            expected, after = linear_reference.recurrence(layer, *tensors, start, step.new)
            error = max(error, compare(f"{name}, output", out[:real], expected[:real], tolerance))
            _check_states(name, pool, held[id(pool)], rows, after, tolerance, step)
            if real and expected[:real].any():
                errors = errors_between(out[:real].double(), expected[:real], out.dtype)
                rounding.append((errors.rms, errors.worst))
    return error, rounding


def _started(before: torch.Tensor, step: LinearStep) -> torch.Tensor:
    """[B, …]: each request's state before the step."""
    states = before[step.batch.req_pool_indices].clone()
    states[step.fresh] = 0
    return states


def _check_states(
    what: str,
    pool: torch.Tensor,
    before: torch.Tensor,
    rows: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Tolerance,
    step: LinearStep,
) -> None:
    """Rows of the step's requests must hold the new states; rows of nobody must be unchanged."""
    if step.batch.forward_mode.name == "IDLE":
        expected = before[rows]
    real = rows[: step.num_real]
    compare(f"{what}, states", pool[real], expected[: step.num_real].double(), tolerance)
    others = torch.ones(pool.shape[0], dtype=torch.bool, device=pool.device)
    others[real] = False
    others[0] = False
    if not torch.equal(pool[others], before[others]):
        raise Disagreement(f"{what}: the state of a request that is not in the step was written")
