"""Running a backend of linear layers on a case, and comparing it with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from attnmux.core import (
    BackendContext,
    ForwardBatch,
    LinearAttentionBackend,
    LinearLayerSpec,
    LinearStatePool,
    MHATokenToKVPool,
    Platform,
    ReqToTokenPool,
    TunedLaunch,
    Workspace,
    device_graphs,
    torch_dtype,
)
from attnmux.core.graph.devices import CapturedGraph, GraphStep
from attnmux.testing import linear_reference
from attnmux.testing.candidate import Candidate, StepFigures
from attnmux.testing.cases import Step
from attnmux.testing.comparison import (
    OUTPUT_TOLERANCE,
    Disagreement,
    Tolerance,
    compare,
    errors_between,
)
from attnmux.testing.linear_cases import LinearCase
from attnmux.testing.recording import RecordingGraphs

PRODUCTS = 4
"""Chunked kernels round a chunk's products to the dtype of the call before they multiply them
again, so that errors of a few such roundings add up."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearInput:
    """The tensors of one layer's calls."""

    layer: LinearLayerSpec
    silu: bool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None
    convs: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], ...]
    """(x, weight, bias) of each convolution."""

    def tensors(self) -> list[torch.Tensor]:
        """Those that differ from step to step."""
        parts = [self.q, self.k, self.v, self.g, *(x for x, _, _ in self.convs)]
        return parts if self.beta is None else [*parts, self.beta]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearStep:
    """A step that is ready to run: its batch, and each layer's tensors."""

    batch: ForwardBatch
    inputs: tuple[LinearInput, ...]
    new: tuple[int, ...]
    """New tokens of each request, those of padding included."""
    fresh: torch.Tensor
    """[B] bool: requests that start from zeros."""
    num_real: int
    """Requests without padding."""

    @property
    def num_real_tokens(self) -> int:
        return sum(self.new[: self.num_real])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearSetup:
    """A case with the context of its backend and the generator of its random numbers."""

    case: LinearCase
    context: BackendContext
    states: LinearStatePool
    generator: torch.Generator

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal float32 values on the device, the same for a seed on every device."""
        return torch.randn(shape, generator=self.generator).to(self.context.device)

    def tensor(self, *shape: int) -> torch.Tensor:
        """The same in the case's dtype."""
        return self.random(*shape).to(torch_dtype(self.case.dtype))


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


def make_linear_setup(
    case: LinearCase,
    platform: Platform,
    device: torch.device | str,
    *,
    seed: int = 0,
    launches: tuple[TunedLaunch, ...] = (),
) -> LinearSetup:
    """Two layers and the states of twice as many requests as the largest step has."""
    device = torch.device(device)
    size = max(2, 2 * max(len(step.lens) + step.padding for step in case.steps))
    dtype = torch_dtype(case.dtype)
    layers = tuple(
        LinearLayerSpec(
            layer_id=2 * index + 1,
            kind=case.kind,
            num_k_heads=case.num_k_heads,
            num_v_heads=case.num_v_heads,
            head_k_dim=case.head_k_dim,
            head_v_dim=case.head_v_dim,
            scaling=(index + 1) * (case.head_k_dim or 1) ** -0.5,
            qk_l2norm=case.qk_l2norm,
            conv_dims=case.conv_dims,
            conv_size=case.conv_size,
        )
        for index in range(2)
    )
    states = LinearStatePool(size=size, layers=layers, conv_dtype=dtype, device=device)
    pool = MHATokenToKVPool(
        size=1, page_size=1, dtype=dtype, layer_ids=[0], num_kv_heads=1, head_dim=8, device=device
    )
    context = BackendContext(
        request=case.request,
        platform=platform,
        device=device,
        layers=(),
        req_to_token_pool=ReqToTokenPool(size, 1, device),
        token_to_kv_pool=pool,
        linear_states=states,
        workspace=Workspace(device),
        max_batch_size=size,
        max_context_len=1,
        launches=launches,
    )
    generator = torch.Generator().manual_seed(seed)
    return LinearSetup(case=case, context=context, states=states, generator=generator)


def prepare_linear(setup: LinearSetup, lengths: Step, *, host_lens: bool) -> LinearStep:
    """Draw states, rows and inputs. Rows of requests that start from zeros hold NaN."""
    device, is_extend = setup.context.device, lengths.mode.is_extend()
    pads = lengths.padding
    new = (*lengths.new, *[int(not is_extend)] * pads)
    cached = (*lengths.cached, *[0] * pads)
    count, num_tokens = len(new), sum(new) + lengths.trailing

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    picked = torch.randperm(setup.states.size, generator=setup.generator)[: len(lengths.new)] + 1
    rows = torch.cat([picked, torch.zeros(pads, dtype=torch.int64)]).to(device)
    new_lens, cached_lens = ints(new), ints(cached)
    seq_lens = cached_lens + new_lens
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        forward_mode=lengths.mode,
        batch_size=count,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=zeros,
        positions=zeros,
        seq_lens_cpu=seq_lens.cpu() if host_lens else None,
        extend_seq_lens=new_lens if is_extend else None,
        extend_seq_lens_cpu=new_lens.cpu() if is_extend and host_lens else None,
        extend_prefix_lens=cached_lens if is_extend else None,
        extend_prefix_lens_cpu=cached_lens.cpu() if is_extend and host_lens else None,
        extend_num_tokens=num_tokens if is_extend else None,
    )
    fresh = cached_lens <= 0
    for buffer in setup.states.buffers:
        buffer.copy_(setup.random(*buffer.shape))
        buffer[rows[fresh & (rows > 0)]] = torch.nan
    return LinearStep(
        batch=batch,
        inputs=tuple(_inputs(setup, layer, num_tokens) for layer in setup.states.layers),
        new=new,
        fresh=fresh,
        num_real=len(lengths.new),
    )


def _inputs(setup: LinearSetup, layer: LinearLayerSpec, count: int) -> LinearInput:
    """Random tensors of a layer. Q, K and V are slices of one row, as after a projection."""
    case, heads = setup.case, (layer.num_k_heads, layer.num_k_heads, layer.num_v_heads)
    dims = (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim)
    sizes = [number * dim for number, dim in zip(heads, dims, strict=True)]
    parts = setup.tensor(count, sum(sizes)).split(sizes, dim=1)  # type: ignore[no-untyped-call]  # torch's own
    q, k, v = (part.unflatten(1, shape) for part, *shape in zip(parts, heads, dims, strict=True))
    if not layer.qk_l2norm:  # a delta rule needs keys of about unit length
        k.mul_(max(layer.head_k_dim, 1) ** -0.5)
    g = -torch.nn.functional.softplus(setup.random(count, *layer.decay_shape))
    if case.strong_decay:
        g = torch.where(setup.random(*g.shape) > 1, -200.0, g)
    beta = None
    if layer.kind != "lightning":
        beta = setup.random(count, layer.num_v_heads).sigmoid()
        beta = beta if layer.kind.startswith("mamba") else beta.to(q.dtype)
    convs = []
    for dim in layer.conv_dims:
        x = setup.tensor(count, dim + 8)[:, :dim]
        weight = setup.tensor(dim, layer.conv_size)
        convs.append((x, weight, setup.tensor(dim) if case.conv_bias else None))
    return LinearInput(
        layer=layer, silu=case.conv_bias, q=q, k=k, v=v, g=g, beta=beta, convs=tuple(convs)
    )


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
