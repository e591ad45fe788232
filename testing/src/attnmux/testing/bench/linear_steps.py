"""A workload of linear layers over a pool of states, the same for every backend, and its check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from attnmux.core import Decision, ForwardBatch, LinearLayerSpec, Request, torch_dtype
from attnmux.core.plugin import LinearAttentionBackend
from attnmux.testing import (
    PRODUCTS,
    Errors,
    LinearCase,
    LinearInput,
    LinearSetup,
    decode,
    errors_between,
    extend,
    make_linear_setup,
    prepare_linear,
    reference,
    verify,
)
from attnmux.testing import LinearStep as Prepared
from attnmux.testing.bench.answers import HEADS, MAX_ERROR
from attnmux.testing.bench.linear_work import CONV_CHANNELS, CONV_SIZE, dims, linear_bytes
from attnmux.testing.bench.steps import cold_layers
from attnmux.testing.bench.timing import Run
from attnmux.testing.bench.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearStep:
    """A workload's states and inputs. Each run goes on from the states that the last one left; no
    drafts are accepted."""

    workload: Workload
    setup: LinearSetup
    prepared: Prepared
    checked: tuple[int, ...]
    """Places of the requests that are checked: the first and the last."""
    start: torch.Tensor
    """The last layer's states before the step, of the requests that are checked."""
    answers: dict[int, torch.Tensor]
    """By layer: the result of its last call."""

    @property
    def layers(self) -> tuple[LinearLayerSpec, ...]:
        return self.setup.states.layers

    @property
    def batch(self) -> ForwardBatch:
        return self.prepared.batch

    @property
    def states(self) -> torch.Tensor:
        """The last layer's: [1 + size, Hv, K, V], for kind "conv" [1 + size, W - 1, C]."""
        return _last_states(self.setup)

    @property
    def left(self) -> torch.Tensor:
        """The states after the step, in place of `states`: after drafts, those after the last
        one."""
        if self.workload.phase != "verify":
            return self.states
        layer, pool, num = self.layers[-1], self.setup.states, self.workload.new
        if layer.has_state:
            return pool.draft_state(layer.layer_id)[:, num - 1]
        return pool.draft_conv(layer.layer_id)[:, num : num + layer.conv_size - 1]

    def calls(self, backend: LinearAttentionBackend) -> list[Run]:
        """Each layer's recurrence; for kind "conv", its convolution."""
        return [partial(self._call, backend, given) for given in self.prepared.inputs]

    def _call(self, backend: LinearAttentionBackend, given: LinearInput) -> None:
        layer, batch = given.layer, self.batch
        if layer.has_state:
            qkv = given.q, given.k, given.v
            out = backend.forward(*qkv, layer, batch, g=given.g, beta=given.beta)
        else:
            ((x, weight, bias),) = given.convs
            out = backend.convolve(x, weight, layer, batch, bias=bias, silu=given.silu)
        self.answers[layer.layer_id] = out

    def reset(self) -> None:
        """Put back the states that are checked, and spoil the answers."""
        rows = self.batch.req_pool_indices[list(self.checked)]
        self.left[rows] = torch.nan
        self.states[rows] = self.start
        for answer in self.answers.values():
            answer.fill_(torch.nan)


def make_linear_step(
    workload: Workload, decision: Decision, device: torch.device, *, seed: int = 0
) -> LinearStep:
    """The workload for the shapes of a decision, in layers enough to keep caches cold.

    Raises PoolExhausted where memory does not suffice.
    """
    request = decision.request
    case = _case(workload, request)
    moved = linear_bytes(workload, request, torch_dtype(case.dtype).itemsize)
    setup = make_linear_setup(
        case,
        decision.platform,
        device,
        seed=seed,
        num_layers=cold_layers(moved, device),
    )
    prepared = prepare_linear(setup, case.steps[0], host_lens=True)
    checked = tuple(sorted({0, workload.num_requests - 1}))
    rows = prepared.batch.req_pool_indices[list(checked)]
    return LinearStep(
        workload=workload,
        setup=setup,
        prepared=prepared,
        checked=checked,
        start=_last_states(setup)[rows].clone(),
        answers={},
    )


def linear_errors(step: LinearStep) -> Errors:
    """The larger errors of the last layer: those of its answer, or of the states that it left.

    Checks the first and the last request, in some heads, against `attnmux.testing.reference`.
    """
    news, given = step.workload.new_lens, step.prepared.inputs[-1]
    layer, rows = given.layer, list(step.checked)
    device, starts = step.states.device, step.workload.starts
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1], device=device) for row in rows])
    out = step.answers[layer.layer_id][tokens]
    after = step.left[step.batch.req_pool_indices[rows]]
    start = step.start.masked_fill(
        step.prepared.fresh[rows].view(-1, *[1] * (after.dim() - 1)), 0.0
    )
    counts = [news[row] for row in rows]
    if layer.has_state:
        heads = torch.arange(0, layer.num_v_heads, -(-layer.num_v_heads // HEADS), device=device)
        shared = heads // (layer.num_v_heads // layer.num_k_heads)
        sampled = replace(layer, num_k_heads=len(heads), num_v_heads=len(heads))
        q, k = (each[tokens][:, shared] for each in (given.q, given.k))
        v, g = (each[tokens][:, heads] for each in (given.v, given.g))
        beta = None if given.beta is None else given.beta[tokens][:, heads]
        expected, left = reference.recurrence(sampled, q, k, v, g, beta, start[:, heads], counts)
        out, after = out[:, heads], after[:, heads]
    else:
        ((x, weight, bias),) = given.convs
        expected, left = reference.convolution(
            x[tokens], weight, bias, silu=given.silu, states=start, new=counts
        )
    pairs = (out, expected), (after, left)
    errors = [errors_between(got.double(), right.double(), out.dtype) for got, right in pairs]
    return max(errors, key=lambda each: each.relative)


def linear_limit(step: LinearStep) -> float:
    """The largest relative error of a right answer. Chunked kernels round products that they
    multiply again."""
    return PRODUCTS * MAX_ERROR[torch_dtype(step.setup.case.dtype)]


def _last_states(setup: LinearSetup) -> torch.Tensor:
    layer, states = setup.states.layers[-1], setup.states
    return states.state(layer.layer_id) if layer.has_state else states.conv(layer.layer_id)


def _case(workload: Workload, request: Request) -> LinearCase:
    heads, k_heads, dim, v_dim = dims(request)
    prefixes = [workload.prefix] * workload.batch_size
    beside = [(workload.ctx - 1, 1)] * workload.decoding
    lengths = extend(*[(prefix, workload.new) for prefix in prefixes], *beside)
    if workload.phase == "decode":
        lengths = decode(*workload.lengths)
    elif workload.phase == "verify":
        lengths = verify(workload.new, *prefixes)
    return LinearCase(
        name=str(workload),
        steps=(lengths,),
        kind=request.kind,  # type: ignore[arg-type]  # one of Request.LINEAR_KINDS
        num_k_heads=k_heads,
        num_v_heads=heads,
        head_k_dim=dim,
        head_v_dim=v_dim,
        qk_l2norm=request.kind in ("gdn", "kda"),
        conv_dims=(CONV_CHANNELS,) if request.kind == "conv" else (),
        conv_size=CONV_SIZE,
        dtype=request.dtype or "",
        page_size=request.page_size or 1,
    )
