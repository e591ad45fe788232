"""Running a backend of linear layers on a case, and comparing it with the reference."""

from __future__ import annotations

import time

import torch

from attnmux.core import torch_dtype
from attnmux.testing import reference
from attnmux.testing.cases.linear import LinearCase
from attnmux.testing.run.candidate import Candidate, StepFigures
from attnmux.testing.run.comparison import (
    OUTPUT_TOLERANCE,
    Disagreement,
    Tolerance,
    compare,
    errors_between,
)
from attnmux.testing.run.linear_drafts import EXACT, DraftCheck
from attnmux.testing.run.linear_execution import EagerLinear, LinearExecution, LinearGraphs, Outputs
from attnmux.testing.run.side_effects import SideEffects
from attnmux.testing.setup.linear import (
    LinearSetup,
    LinearStep,
    make_linear_setup,
    prepare_linear,
)

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
    effects = SideEffects(setup.context.device)
    with effects.watch("building the backend"):
        backend = candidate.build_linear(setup.context)
    host_lens = case.host_lens or candidate.card.needs_cpu_seq_lens
    execution: LinearExecution = EagerLinear(setup, backend)
    if case.graph:
        with effects.watch("capturing graphs"):
            execution = LinearGraphs(setup, backend, host_lens=host_lens)
    max_error, figures = 0.0, []
    for number, lengths in enumerate(case.steps, start=1):
        step = prepare_linear(setup, lengths, host_lens=host_lens)
        before = [buffer.clone() for buffer in setup.states.buffers]
        drafts = DraftCheck(setup, step) if lengths.mode.is_target_verify() else None
        given = [tensor.clone() for tensor in _tensors(step)]
        begin = time.perf_counter()
        with effects.watch("the step"):
            outputs = execution.run(step)
        if setup.context.device.type != "cpu":
            torch.accelerator.synchronize(setup.context.device)
        ms = (time.perf_counter() - begin) * 1e3
        try:
            if not all(map(torch.equal, given, _tensors(step))):
                raise Disagreement("an input was written, and a backend only reads it")
            error, rounding = _check(setup, step, before, outputs)
            if drafts is not None:
                drafts.check(execution, _tolerance(case))
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


def _check(
    setup: LinearSetup, step: LinearStep, before: list[torch.Tensor], outputs: Outputs
) -> tuple[float, list[tuple[float, float]]]:
    """The largest absolute error, and (rms, worst) of each recurrence in roundings."""
    rows, real = step.batch.req_pool_indices, step.num_real_tokens
    held = dict(zip(map(id, setup.states.buffers), before, strict=True))
    own, tolerance = OUTPUT_TOLERANCE[torch_dtype(setup.case.dtype)], _tolerance(setup.case)
    is_verify = step.batch.forward_mode.is_target_verify()
    error, rounding = 0.0, []
    for given, found in zip(step.inputs, outputs, strict=True):
        layer, name = given.layer, f"layer {given.layer.layer_id}"
        for index, (x, weight, bias) in enumerate(given.convs):
            pool, out = setup.states.conv(layer.layer_id, index), found[index]
            start = _started(held[id(pool)], step)
            expected, after = reference.convolution(
                x, weight, bias, silu=given.silu, states=start, new=step.new
            )
            what = f"{name}, convolution {index}"
            error = max(error, compare(what, out[:real], expected[:real], own))
            if not is_verify:
                _check_states(what, pool, held[id(pool)], rows, after, EXACT, step)
        if layer.has_state:
            pool, out = setup.states.state(layer.layer_id), found[-1]
            tensors = (given.q, given.k, given.v, given.g, given.beta)
            start = _started(held[id(pool)], step)
            expected, after = reference.recurrence(layer, *tensors, start, step.new)
            error = max(error, compare(f"{name}, output", out[:real], expected[:real], tolerance))
            if not is_verify:
                _check_states(name, pool, held[id(pool)], rows, after, tolerance, step)
            if real and expected[:real].any():
                errors = errors_between(out[:real].double(), expected[:real], out.dtype)
                rounding.append((errors.rms, errors.worst))
    return error, rounding


def _tolerance(case: LinearCase) -> Tolerance:
    """Tolerance of the outputs and states of recurrences."""
    own = OUTPUT_TOLERANCE[torch_dtype(case.dtype)]
    return Tolerance(atol=PRODUCTS * own.atol, rtol=PRODUCTS * own.rtol)


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
