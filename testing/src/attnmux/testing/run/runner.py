"""Running a backend on a case, and comparing its results and writes with the reference."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import torch

from attnmux.testing import reference
from attnmux.testing.cases.case import Case
from attnmux.testing.cases.linear import AnyCase, LinearCase
from attnmux.testing.run.candidate import Candidate, Outcome, StepFigures
from attnmux.testing.run.comparison import (
    Disagreement,
    Errors,
    compare,
    errors_between,
    lse_tolerance,
    output_tolerance,
)
from attnmux.testing.run.execution import EXECUTIONS, Execution, LayerOutput
from attnmux.testing.run.growth import check_steady
from attnmux.testing.run.linear_runner import run_linear
from attnmux.testing.run.side_effects import SideEffects
from attnmux.testing.setup.case import CaseSetup, make_setup
from attnmux.testing.setup.placement import (
    buffers,
    fill_reserved_page,
    places_in_use,
    put,
    rows_in_use,
    slots_of,
)
from attnmux.testing.setup.prepared import LayerInput, PreparedStep, kv_rows, prepare_step

MEMORY = "K", "V", "scales of K", "scales of V"
"""The contents of a slot of a pool, in the order of `KVPool.memory`."""
MOST_LOGITS = 1 << 21
"""Most logits of the reference in a layer of a step: 16 MiB in float64."""


def run_case(candidate: Candidate, case: AnyCase, *, seed: int = 0) -> Outcome:
    """Run the case if the selector admits it. Otherwise the outcome is "refused", with the reasons.

    All steps run on one backend instance, eagerly or, if the case says so, from graphs. After each
    step, output and LSE are compared with the reference and the KV pool bit by bit; the step's
    inputs must be unchanged. Outputs must also be unchanged after the last step. Whatever the
    backend raises is the outcome "failed".
    """
    outcome = Outcome(case=case.name, execution=case.execution, status="passed")
    reasons = candidate.refusals(case.request)
    if reasons:
        return replace(outcome, status="refused", reasons=reasons)
    try:
        run = run_linear if isinstance(case, LinearCase) else _run
        # A mode that a backend leaves off shows only if it was on
        with torch.set_grad_enabled(isinstance(case, Case) and case.repeats > 0 and not case.graph):
            max_error, steps = run(candidate, case, seed)  # type: ignore[arg-type]  # of its type
        return replace(outcome, max_error=max_error, steps=steps)
    except Exception as error:  # a backend may raise anything
        message = str(error)
        if not isinstance(error, Disagreement):
            message = f"{type(error).__name__}: {message}"
        return replace(outcome, status="failed", message=message, error=error)


def _run(candidate: Candidate, case: Case, seed: int) -> tuple[float, tuple[StepFigures, ...]]:
    """The largest absolute error, and the figures of the steps."""
    setup = make_setup(
        case,
        candidate.platform,
        candidate.device,
        seed=seed,
        launches=candidate.launches,
        graphs=candidate.graphs,
    )
    host_lens = case.host_lens or candidate.card.needs_cpu_seq_lens
    effects = SideEffects(setup.context.device)
    with effects.watch("building the backend"):
        backend = candidate.build_with(case.options, setup.context)
    with effects.watch("capturing graphs"):
        execution = EXECUTIONS[case.execution](setup, backend, host_lens=host_lens)
    max_error = 0.0
    figures: list[StepFigures] = []
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    zeroed: torch.Tensor | None = None
    for number, lengths in enumerate(case.steps, start=1):
        step = prepare_step(
            setup,
            lengths,
            seq_len_fill=backend.select(lengths.mode).get_cuda_graph_seq_len_fill_value(),
            host_lens=host_lens,
            zeroed=zeroed,
        )
        if number == 1 and case.nan_request is not None:
            step = step.with_nan(case.nan_request)
        if execution.pads:
            fill_reserved_page(setup)
        pool = _pool_after(setup, step)
        given_before = [(name, tensor.clone()) for name, tensor in _read_only(setup, step)]
        relative: list[Errors] = []
        try:
            with effects.watch("the step"):
                outputs, ms = _timed(execution, step)
            _check_unchanged(given_before, _read_only(setup, step))
            _check_pool(setup, step, pool, pads=execution.pads)
            for given, output in zip(step.inputs, outputs, strict=True):
                error, errors = _check_output(
                    setup, step, given, output, fp8_products=candidate.fp8_products
                )
                max_error = max(max_error, error)
                relative += [errors] if errors is not None else []
        except Disagreement as fault:
            raise Disagreement(f"step {number}, {lengths.mode.name}: {fault}") from fault
        if relative:
            figures.append(
                StepFigures(
                    dtype=case.dtype,
                    keys=max(lengths.totals),
                    ms=ms,
                    rms=max(each.rms for each in relative),
                    worst=max(each.worst for each in relative),
                )
            )
        if case.deterministic:
            _check_alone(step, outputs, execution)
        real = [output.out[: step.num_real_tokens] for output in outputs]
        kept += [(out, out.clone()) for out in real]
        zeroed = _zero_nan(setup, step)
    if not all(_same_bits(out, copy) for out, copy in kept):
        raise Disagreement("an output changed after its step, and it belongs to the caller")
    check_steady(candidate, execution, effects, host_lens=host_lens)
    return max_error, tuple(figures)


def _timed(execution: Execution, step: PreparedStep) -> tuple[list[LayerOutput], float]:
    """The outputs, and the milliseconds until the device has finished."""
    start = time.perf_counter()
    outputs = execution.run(step)
    if step.inputs[0].q.device.type != "cpu":
        torch.accelerator.synchronize(step.inputs[0].q.device)
    return outputs, (time.perf_counter() - start) * 1e3


def _check_alone(step: PreparedStep, outputs: list[LayerOutput], execution: Execution) -> None:
    """Each request must have the same bits without the others."""
    for request in range(step.batch.batch_size):
        part, rows = step.of_request(request)
        for given, output, whole in zip(step.inputs, execution.run(part), outputs, strict=True):
            if not torch.equal(output.out, whole.out[rows]):
                raise Disagreement(
                    f"layer {given.layer.layer_id}: request {request} has other bits alone than "
                    "in its batch, and the decision was for deterministic results"
                )


def _read_only(setup: CaseSetup, step: PreparedStep) -> list[tuple[str, torch.Tensor]]:
    """Tensors that a backend must not write, by name: inputs, batch and request table."""
    named: list[tuple[str, object]] = [
        (f"layer {given.layer.layer_id}: {item.name}", getattr(given, item.name))
        for given in step.inputs
        for item in fields(given)
    ]
    named += [
        (f"layer {given.layer.layer_id}: {name}", getattr(given.layer, name))
        for given in step.inputs
        for name in ("sinks", "alibi_slopes", "relative_bias")
    ]
    batch = step.batch
    # Without the batch's topk_indices, which every layer's indexer writes
    for part in (replace(batch, topk_indices=None), batch.spec_info, batch.multi_item):
        if part is not None:
            named += [(item.name, getattr(part, item.name)) for item in fields(part)]
    named.append(("req_to_token", setup.context.req_to_token_pool.req_to_token))
    return [(name, value) for name, value in named if isinstance(value, torch.Tensor)]


def _check_unchanged(
    before: list[tuple[str, torch.Tensor]], after: list[tuple[str, torch.Tensor]]
) -> None:
    for (name, copy), (_, tensor) in zip(before, after, strict=True):
        if not _same_bits(copy, tensor):
            raise Disagreement(f"{name} was written, and a backend only reads it")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape and dtype are equal. NaN equals itself."""
    raw = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*raw)


def _zero_nan(setup: CaseSetup, step: PreparedStep) -> torch.Tensor | None:
    """The pages of the request with NaN, [n] int64, zeroed as an engine does before it frees them;
    None without one."""
    index, pool = step.nan_request, setup.context.token_to_kv_pool
    if index is None:
        return None
    row, length = int(step.batch.req_pool_indices[index]), int(step.batch.seq_lens[index])
    held = setup.context.req_to_token_pool.req_to_token[row, :length].long()
    pages: torch.Tensor = torch.unique(held // pool.page_size)
    pool.zero(slots_of(pages, pool.page_size))
    return pages


def _pool_after(setup: CaseSetup, step: PreparedStep) -> list[tuple[torch.Tensor, ...]]:
    """The contents of every layer's buffers after the step."""
    pools = []
    for given in step.inputs:
        loc, rows = kv_rows(setup, given, step.batch)
        copies = tuple(
            rows_in_use(setup, buffer).clone() for buffer in buffers(setup, given.layer.layer_id)
        )
        for copy, new in zip(copies, rows, strict=False):
            put(copy, places_in_use(setup, loc), new)
        pools.append(copies)
    return pools


def _check_pool(
    setup: CaseSetup, step: PreparedStep, expected: list[tuple[torch.Tensor, ...]], *, pads: bool
) -> None:
    """The new tokens' K and V must be in their slots, and all other slots unchanged."""
    # Rows that share slot 0 write it in any order, or not at all
    first = int(pads or bool((step.batch.out_cache_loc == 0).any()))
    for given, copies in zip(step.inputs, expected, strict=True):
        actual = buffers(setup, given.layer.layer_id)
        for name, buffer, copy in zip(MEMORY, actual, copies, strict=False):
            rows = rows_in_use(setup, buffer).view(torch.uint8)
            changed = (rows != copy.view(torch.uint8)).flatten(1).any(1)
            wrong = changed[first:].nonzero().flatten() + first
            if len(wrong):
                loc = places_in_use(setup, kv_rows(setup, given, step.batch)[0])
                slot = int(wrong[0])
                fault = (
                    "does not hold the values of the call"
                    if bool((loc == slot).any())
                    else "was written, and no token of the step has that slot"
                )
                raise Disagreement(
                    f"layer {given.layer.layer_id}: {name} of slot {slot} {fault} "
                    f"({len(wrong)} slots are wrong)"
                )


def _compared(setup: CaseSetup, step: PreparedStep) -> torch.Tensor:
    """[T] bool: the tokens that are compared with the reference.

    These are all of the requests' tokens. Where they would take more than `MOST_LOGITS`, they are
    the first, the last and some of the others. A request with NaN is left out.
    """
    batch, count = step.batch, step.num_real_tokens
    chosen = torch.zeros(batch.num_tokens, dtype=torch.bool, device=setup.context.device)
    longest = max((max(lengths.totals, default=1) for lengths in setup.case.steps), default=1)
    most = MOST_LOGITS // (setup.case.num_q_heads * max(longest, 1))
    if count <= most:
        chosen[:count] = True
    elif count:
        chosen[torch.randperm(count, generator=setup.generator)[:most].to(chosen.device)] = True
        chosen[0] = chosen[count - 1] = True
    if step.nan_request is not None:
        chosen[step.rows_of(step.nan_request)] = False
    return chosen


def _check_output(
    setup: CaseSetup,
    step: PreparedStep,
    given: LayerInput,
    output: LayerOutput,
    *,
    fp8_products: bool,
) -> tuple[float, Errors | None]:
    """The largest absolute error of the real rows, and their errors in roundings.

    None where all expected outputs are 0. Padding must be finite.
    """
    layer, context = given.layer, setup.context
    name = f"layer {layer.layer_id}"
    shape = (*given.q.shape[:2], layer.v_head_dim)
    if output.out.shape != shape or output.out.dtype != given.q.dtype:
        got = f"{tuple(output.out.shape)} {output.out.dtype}"
        raise Disagreement(f"{name}: output is {got}, not {shape} {given.q.dtype}")
    if not bool(output.out[step.num_real_tokens : output.num_defined_rows].isfinite().all()):
        raise Disagreement(f"{name}: a padding row of the output is not finite")
    unsaved = {"k": given.k, "v": given.v, "k_rope": given.k_rope}
    compared = _compared(setup, step)
    expected, expected_lse = reference.attention(
        given.q,
        layer,
        replace(step.batch, topk_indices=given.topk_indices),
        context.req_to_token_pool.req_to_token,
        context.token_to_kv_pool,
        q_rope=given.q_rope,
        only=compared,
        **({} if step.save_kv_cache else unsaved),
    )
    dtypes = given.q.dtype, context.token_to_kv_pool.dtype
    tolerance = output_tolerance(*dtypes, fp8_products=fp8_products)
    out, expected = output.out[compared], expected[compared]
    max_error = compare(f"{name}, output", out, expected, tolerance)
    if output.lse is not None:
        tolerance = lse_tolerance(layer, *dtypes, fp8_products=fp8_products)
        error = compare(f"{name}, LSE", output.lse[compared], expected_lse[compared], tolerance)
        max_error = max(max_error, error)
    errors = errors_between(out.double(), expected, out.dtype) if expected.any() else None
    return max_error, errors
