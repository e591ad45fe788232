"""The setup of a case of linear layers, and steps that are ready to run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import (
    BackendContext,
    ForwardBatch,
    LinearLayerSpec,
    MHATokenToKVPool,
    Platform,
    ReqToTokenPool,
    SpecInput,
    TunedLaunch,
    Workspace,
    torch_dtype,
)
from attnmux.parts import LinearStatePool
from attnmux.testing.cases.case import Step
from attnmux.testing.cases.linear import LinearCase

SPARE_DRAFTS = 1
"""A step of fewer draft tokens than there is room for must leave that room alone."""


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
        """Tensors that differ from step to step."""
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


def make_linear_setup(
    case: LinearCase,
    platform: Platform,
    device: torch.device | str,
    *,
    seed: int = 0,
    num_layers: int = 2,
    launches: tuple[TunedLaunch, ...] = (),
) -> LinearSetup:
    """Layers and the states of twice as many requests as the largest step has, with room for
    `SPARE_DRAFTS` more draft tokens than its steps verify."""
    device = torch.device(device)
    size = max(2, 2 * max(len(step.lens) + step.padding for step in case.steps))
    dtype = torch_dtype(case.dtype)
    drafts = case.request.spec_draft_tokens
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
        for index in range(num_layers)
    )
    states = LinearStatePool(
        size=size,
        layers=layers,
        conv_dtype=dtype,
        device=device,
        draft_tokens=0 if drafts is None else drafts + SPARE_DRAFTS,
    )
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
    pads, drafts = lengths.padding, 0
    if lengths.mode.is_target_verify():
        drafts = lengths.new[0]
    new = (*lengths.new, *[drafts or int(not is_extend)] * pads)
    cached = (*lengths.cached, *[0] * pads)
    count, num_tokens = len(new), sum(new) + lengths.trailing

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    picked = torch.randperm(setup.states.size, generator=setup.generator)[: len(lengths.new)] + 1
    rows = torch.cat([picked, torch.zeros(pads, dtype=torch.int64)]).to(device)
    new_lens, cached_lens = ints(new), ints(cached)
    seq_lens = cached_lens if drafts else cached_lens + new_lens
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
        spec_info=SpecInput(draft_token_num=drafts) if drafts else None,
    )
    fresh = cached_lens <= 0
    for buffer in setup.states.draft_buffers:
        buffer.copy_(setup.random(*buffer.shape))
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
