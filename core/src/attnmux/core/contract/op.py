"""How a model calls attention: the context of a step, a module, and the op for compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch.library import Library, register_fake

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.facts.errors import AttnmuxError, InvalidInput


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardContext:
    """The backend and the batch of the running step."""

    backend: AttentionBackend
    batch: ForwardBatch

    @staticmethod
    def is_running() -> bool:
        """Whether a step is running."""
        return _current.get(None) is not None

    @classmethod
    @contextmanager
    def enter(cls, backend: AttentionBackend, batch: ForwardBatch) -> Iterator[ForwardContext]:
        """Run a model's layers on `backend` and `batch`.

        The caller has prepared the step with `backend.init_forward_metadata(batch)`.
        """
        context = cls(backend=backend, batch=batch)
        token = _current.set(context)
        try:
            yield context
        finally:
            _current.reset(token)

    @staticmethod
    def current() -> ForwardContext:
        """The running step. Raises AttnmuxError outside `ForwardContext.enter`."""
        try:
            return _current.get()
        except LookupError:
            raise AttnmuxError(
                "attention was called outside a step: wrap the model's call in "
                "`with attnmux.core.ForwardContext.enter(backend, batch):`"
            ) from None


_current: ContextVar[ForwardContext] = ContextVar("attnmux_forward_context")


def _attention_with_output(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_rope: torch.Tensor | None,
    k_rope: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layer_id: torch.Tensor,
    save_kv_cache: bool,
    topk_indices: torch.Tensor | None = None,
) -> None:
    context = ForwardContext.current()
    backend, batch = context.backend, context.batch
    layer = backend.context.layer(int(layer_id))
    num_tokens = batch.num_tokens
    if topk_indices is not None:
        # A compiler may move the write to the batch after the op, so the argument counts
        batch = replace(batch, topk_indices=topk_indices)
    if q.shape[0] > num_tokens:
        # A compiled model's tokens are padded, the batch's are not; padding attends to no key
        q = q[:num_tokens]
        q_rope = None if q_rope is None else q_rope[:num_tokens]
        if not layer.is_cross_attention:  # whose k and v are the encoder's tokens
            k, v, k_rope = (
                None if tensor is None else tensor[:num_tokens] for tensor in (k, v, k_rope)
            )
        out[num_tokens:].zero_()
        out = out[:num_tokens]
        if lse is not None:
            lse[num_tokens:].fill_(-torch.inf)
            lse = lse[:num_tokens]
    backend.forward(
        q, k, v, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=out, lse=lse
    )


def _no_output(*_: object) -> None:
    """The fake implementation: the op has no result, and writes to its arguments."""


# Ops live as long as their Library object; its methods have no annotations
_library = Library("attnmux", "DEF")  # type: ignore[no-untyped-call]  # as above
_library.define(  # type: ignore[no-untyped-call]  # as above
    "attention_with_output(Tensor q, Tensor? k, Tensor? v, Tensor? q_rope, Tensor? k_rope, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor layer_id, bool save_kv_cache, "
    "Tensor? topk_indices=None) -> ()",
    # A backend may plan on the host or choose kernels by length, so that Inductor's graph partition
    # must keep the op out of CUDA graphs
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.impl(  # type: ignore[no-untyped-call]  # as above
    "attention_with_output", _attention_with_output, "CompositeExplicitAutograd"
)
register_fake("attnmux::attention_with_output", _no_output, lib=_library)

attention_with_output = torch.ops.attnmux.attention_with_output
"""`(q, k?, v?, q_rope?, k_rope?, out!, lse!?, layer_id, save_kv_cache, topk_indices?)`: attention
of the layer in the running step, written to `out` and, if given, `lse`. `layer_id` is [] int64 on
the CPU: a compiler makes other code for each int, and the same code for all tensors. `topk_indices`
replaces the batch's, which an indexer in the same compiled model may write too late for the op."""


class RadixAttention(torch.nn.Module):
    """Attention of one layer over the paged KV cache.

    It calls the backend of the surrounding `ForwardContext.enter`. Under `torch.compile` the call
    is one opaque op, so that a model compiles as a single graph with any backend.
    """

    op = attention_with_output
    """The op that a compiled model calls; see `attention_with_output`."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self._layer_id = torch.tensor(spec.layer_id)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; `AttentionBackend.forward` gives the shapes. Heads may be flattened into one dim.

        Returns [T, Hq, Dv]. k and v are None if they are already in the pool.
        Raises InvalidInput when `batch` is not the one of the forward context.
        """
        spec = self.spec
        rope_dim = spec.qk_rope_head_dim
        dim = spec.qk_head_dim - rope_dim
        q = _by_head("q", q, spec.tp_q_head_num, spec.query_dim)
        k = None if k is None else _by_head("k", k, spec.tp_k_head_num, dim)
        v = None if v is None else _by_head("v", v, spec.tp_v_head_num, spec.v_head_dim)
        if rope_dim:
            q_rope = None if q_rope is None else _by_head("q_rope", q_rope, q.shape[1], rope_dim)
            k_rope = None if k_rope is None else _by_head("k_rope", k_rope, 1, rope_dim)
        if torch.compiler.is_compiling():
            out = q.new_empty((q.shape[0], spec.tp_q_head_num, spec.v_head_dim))
            attention_with_output(
                q,
                k,
                v,
                q_rope,
                k_rope,
                out,
                None,
                self._layer_id,
                save_kv_cache,
                batch.topk_indices,
            )
            return out
        context = ForwardContext.current()
        if batch is not context.batch:
            raise InvalidInput(
                "batch", got="another batch", expected="the batch of the forward context"
            )
        return context.backend.forward(
            q, k, v, spec, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope
        )


def _by_head(argument: str, tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[T, heads, dim] of a tensor [..., heads, dim] or [..., heads * dim]."""
    if tensor.shape[-2:] != (heads, dim) and tensor.shape[-1:] != (heads * dim,):
        raise InvalidInput(
            argument,
            got=f"shape {tuple(tensor.shape)}",
            expected=f"[T, {heads}, {dim}] or [T, {heads * dim}]",
        )
    return tensor.reshape(-1, heads, dim)
