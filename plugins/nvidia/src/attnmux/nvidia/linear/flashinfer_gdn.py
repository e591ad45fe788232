"""The gated delta rule on flashinfer's kernels.

Facts of the kernels, from flashinfer/gdn_prefill.py, flashinfer/gdn_decode.py and gdn_kernels/ of
flashinfer-python 0.6.13 and 0.7.2:

- `chunk_gated_delta_rule` takes packed requests: q and k [T, Hk, 128], v [T, Hv, 128], contiguous,
fp16 or bf16; g is the decay itself, not its logarithm, and beta, both float32 [T, Hv]. States are
float32 [n, Hv, V, K], those afterwards in memory of their own. 0.6 does not look at
`use_qk_l2norm_in_kernel` on SM90: q and k are normalised here. A decay is at least 1e-10. In 0.7 it
is of CuTe DSL, and cuts long requests if requests times heads are fewer than half of the
multiprocessors. - `gated_delta_rule_decode` takes one token of each request and states [n, Hv, K,
V], which it overwrites; `gated_delta_rule_mtp` takes T tokens and states [n, Hv, V, K], which it
leaves, and writes those after each token, [n, T, Hv, V, K]. Both compute the gates from the model's
own numbers, g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b); see `gdn_inputs.py`.
They normalise q and k with the same constant as `LinearLayerSpec.L2_EPS`. Outputs are bf16. - Both
are compiled for each batch size, number of tokens and scale, for the strides and dtypes of their
first call. A call with others is not compiled anew, so that tensors here are always dense and gates
always float32.

The states of a pool are [rows, Hv, K, V], so that each call copies those of its requests, and
transposes them if the kernel wants it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnmux.core import AttnmuxError, BackendFailed, InvalidInput
from attnmux.core.plugin import (
    KernelLibrary,
    LinearAttentionBackend,
    NewTokens,
    PlainConvolutions,
    Rows,
    ShortConvolutions,
    StatePool,
    rehearse_convolutions,
    shared_kernel,
)
from attnmux.nvidia.linear.causal_convolutions import CausalConvolutions, ConvKernels
from attnmux.nvidia.linear.gdn_inputs import (
    STEEP,
    by_request,
    decode_gates,
    dense,
    draft_gates,
    normed,
    transposed,
)
from attnmux.nvidia.linear.packed_requests import PackedRequests
from attnmux.nvidia.linear.rehearsal import rehearse_linear

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch
    from attnmux.core.plugin import ConvCall, LinearCall

DIM = 128
"""Dim of a head of K and of V: a tile of the kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrenceKernels:
    """Functions of `flashinfer`."""

    chunk_gated_delta_rule: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Prompts."""
    gated_delta_rule_decode: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """One token a request."""
    gated_delta_rule_mtp: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Drafts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GDNKernels:
    """The kernels of a layer."""

    recurrence: RecurrenceKernels
    convolutions: Callable[[BackendContext], ShortConvolutions]


class FlashInferGDNBackend(LinearAttentionBackend):
    """Layers of kind "gdn" with heads of 128 dims on SM90. beta is at most 1."""

    _step: PackedRequests

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: GDNKernels
    ) -> None:
        """Raises InvalidInput for heads of other dims."""
        super().__init__(context, options)
        layers = [layer for layer in self.states.layers if layer.kind == "gdn"]
        for layer in layers:
            if (layer.head_k_dim, layer.head_v_dim) != (DIM, DIM):
                got = f"heads of {layer.head_k_dim} and {layer.head_v_dim} dims"
                raise InvalidInput(
                    f"linear layer {layer.layer_id}", got=got, expected=f"{DIM} of K and of V"
                )
        self.kernels = kernels.recurrence
        self._convolutions = kernels.convolutions(context)
        heads = max((layer.num_v_heads for layer in layers), default=1)
        gates = partial(torch.full, (heads,), dtype=torch.float32, device=context.device)
        self._flat, self._steep = gates(fill_value=0.0), gates(STEEP)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        mode = batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            self._step = PackedRequests.of(NewTokens.of(batch))
            self._convolutions.prepare(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: a captured step's tensors belong to its graph."""

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows, count = call.layer, batch.req_pool_indices, batch.batch_size
        if not count:
            return
        _check_dtype(call, torch.bfloat16)
        pool = self.states.state(layer.layer_id)
        states = StatePool.read(pool, rows, batch.seq_lens <= 1)
        inputs = (call.q, call.k, call.v, *decode_gates(call))
        q, k, v, a, b, out, states = _deducible(
            [*(by_request(tensor, count) for tensor in inputs), _room(call, count), states],
            is_one_value=count * layer.num_v_heads == 1,
        )
        self.kernels.gated_delta_rule_decode(
            q,
            k,
            v,
            states,
            self._steep[: layer.num_v_heads],
            a,
            self._flat[: layer.num_v_heads],
            b,
            scale=layer.scaling,
            output=out,
            use_qk_l2norm=layer.qk_l2norm,
        )
        _put(call, out[:count])
        pool.index_copy_(0, rows, states[:count])

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows, count = call.layer, batch.req_pool_indices, batch.batch_size
        if not count:
            return
        _check_dtype(call, torch.bfloat16)
        num, heads = batch.drafts().draft_token_num, layer.num_v_heads
        pool = self.states.state(layer.layer_id)
        states = transposed(StatePool.read(pool, rows, batch.seq_lens <= 0))
        inputs = (call.q, call.k, call.v, *draft_gates(call))
        q, k, v, a, b, out, states = _deducible(
            [*(by_request(tensor, count) for tensor in inputs), _room(call, count), states],
            is_one_value=count * num == 1,
        )
        after = states.new_empty((len(states), num, heads, DIM, DIM))
        self.kernels.gated_delta_rule_mtp(
            q,
            k,
            v,
            states,
            torch.arange(len(states), dtype=torch.int32, device=rows.device),
            self._flat[:heads],
            a,
            self._flat[:heads],
            b,
            scale=layer.scaling,
            output=out,
            intermediate_states_buffer=after,
            disable_state_update=True,
            use_qk_l2norm=layer.qk_l2norm,
        )
        _put(call, out[:count])
        drafted = self.states.draft_state(layer.layer_id)
        drafted[:, :num].index_copy_(0, rows, after[:count].transpose(-1, -2))

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows, step = call.layer, batch.req_pool_indices, self._step
        _check_dtype(call, torch.bfloat16, torch.float16)
        num, pool = step.tokens.num_tokens, self.states.state(layer.layer_id)
        assert call.beta is not None  # of the delta rule
        before = step.start(pool, rows)
        states = step.of_active(before)
        call.out[num:].zero_()
        if num:
            out = call.out[:num]
            result, after = self.kernels.chunk_gated_delta_rule(
                normed(call.q[:num], layer),
                normed(call.k[:num], layer),
                dense(call.v[:num]),
                dense(call.g[:num].exp()),
                dense(call.beta[:num].float()),
                layer.scaling,
                transposed(states),
                True,
                step.indptr.long(),
                output=out if Rows.is_writable(out) else None,
            )
            if not Rows.is_writable(out):
                out.copy_(result)
            states = after.transpose(-1, -2)
        step.finish(pool, rows, before, states)

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.run(call, batch)

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.verify(call, batch)


def _check_dtype(call: LinearCall, *served: torch.dtype) -> None:
    if call.q.dtype not in served:
        expected = f"{' or '.join(map(str, served))}, as the kernel of the phase takes"
        raise InvalidInput("q", got=call.q.dtype, expected=expected)


def _deducible(tensors: Sequence[torch.Tensor], *, is_one_value: bool) -> Sequence[torch.Tensor]:
    """The tensors [B, …]; the request twice if a tensor of several dimensions has one value.

    flashinfer 0.7.2 asks the CuTe DSL to deduce which dimension of such a tensor is contiguous,
    which raises RuntimeError.
    """
    return [torch.cat([tensor, tensor]) for tensor in tensors] if is_one_value else tensors


def _room(call: LinearCall, count: int) -> torch.Tensor:
    """Where the kernel writes its output, [B, T / B, Hv, V]: `call.out` if it can."""
    out = call.out if Rows.is_writable(call.out) else call.out.new_empty(call.out.shape)
    return by_request(out, count)


def _put(call: LinearCall, out: torch.Tensor) -> None:
    if out.data_ptr() != call.out.data_ptr():
        call.out.copy_(out.view(call.out.shape))


def convolutions(context: BackendContext) -> ShortConvolutions:
    """Convolutions that a plugin offers for the device, attnmux-triton's; else sgl_kernel's, which
    want tokens transposed; else plain ones.

    Warns if sgl_kernel is installed and does not run.
    """
    shared: ShortConvolutions | None = shared_kernel("short_convolutions", context)
    if shared is not None:
        return shared
    try:
        kernels = KernelLibrary.imported(ConvKernels, "sgl_kernel")
        with KernelLibrary.trying("sgl_kernel", context.device):
            return rehearse_convolutions(partial(CausalConvolutions, kernels=kernels), context)
    except ModuleNotFoundError:
        pass
    except (ImportError, OSError, AttributeError, BackendFailed) as error:
        warnings.warn(
            f"convolutions are plain operations: {AttnmuxError.in_brief(error)}", stacklevel=2
        )
    return PlainConvolutions(StatePool.of(context))


def of_flashinfer() -> GDNKernels:
    """Raises ImportError and AttributeError as `imported` does."""
    modules = "flashinfer.gdn_prefill", "flashinfer.gdn_decode"
    return GDNKernels(
        recurrence=KernelLibrary.imported(RecurrenceKernels, *modules), convolutions=convolutions
    )


make = KernelLibrary(
    address="nvidia/flashinfer_gdn",
    backend=FlashInferGDNBackend,
    providers={"flashinfer": of_flashinfer},
    trial=partial(rehearse_linear, kind="gdn"),
    hint="flashinfer compiles its kernels on first use, with nvcc and ninja",
)
