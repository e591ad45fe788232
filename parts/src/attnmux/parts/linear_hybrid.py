"""Attention and linear layers of one model: every step is prepared once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Choice,
    Decision,
    DispatchingBackend,
    ForwardBatch,
    ForwardMode,
    FrozenMapping,
    InvalidInput,
    LinearLayerSpec,
    Request,
    make_linear,
)
from attnmux.core.plugin import (
    ConvCall,
    LinearAttentionBackend,
    LinearCall,
    MakeBackend,
    MemberSteps,
    Served,
)
from attnmux.parts.states import LinearStatePool


class LinearByPhase(LinearAttentionBackend):
    """Sends decode steps to one backend and all others to another, over the same states.

    Steps that verify drafts go to the one that the request's `speculative_attention_mode` names.
    """

    def __init__(self, *, extend: LinearAttentionBackend, decode: LinearAttentionBackend) -> None:
        super().__init__(decode.context, decode.options)
        self.extend = extend
        self.decode = decode
        mode = self.context.request.speculative_attention_mode
        self.verify = decode if mode == "decode" else extend

    def _serving(self, batch: ForwardBatch) -> LinearAttentionBackend:
        if batch.forward_mode.is_target_verify():
            return self.verify
        return self.decode if batch.forward_mode.is_decode_or_idle() else self.extend

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._serving(batch).init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self._serving(batch).init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.decode.init_cuda_graph_state(max_bs, max_num_tokens)
        if self.context.request.spec_topk and self.verify is self.extend:
            self.verify.init_cuda_graph_state(max_bs, max_num_tokens)

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        self.decode.forward_decode(call, batch)

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        self.verify.forward_verify(call, batch)

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self.verify.verify_conv(call, batch)

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        self.extend.forward_extend(call, batch)

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._serving(batch).forward_conv(call, batch)


class HybridLinearAttnBackend(DispatchingBackend):
    """A model's attention backend, which also prepares the backends of its linear layers.

    Attention layers call it as any backend. Linear layers call `linear(kind)` with the same batch.
    """

    def __init__(
        self, full: AttentionBackend, linear: Mapping[str, LinearAttentionBackend]
    ) -> None:
        """linear: by kind. Raises InvalidInput without one."""
        if not linear:
            raise InvalidInput("linear", got="none", expected="a backend for each kind of layer")
        super().__init__(full.context, (full,))
        self.full = full
        self._linear: Mapping[str, LinearAttentionBackend] = FrozenMapping(linear)

    def linear(self, kind: str) -> LinearAttentionBackend:
        try:
            return self._linear[kind]
        except KeyError:
            expected = f"one of {', '.join(self._linear)}"
            raise InvalidInput("kind", got=kind, expected=expected) from None

    def select(self, mode: ForwardMode) -> AttentionBackend:
        child = self.full.select(mode)
        return self if child is self.full else HybridLinearAttnBackend(child, self._linear)

    def parts(self, batch: ForwardBatch, *, eager: bool) -> MemberSteps:
        return ((backend, batch) for backend in (self.full, *self._linear.values()))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in (self.full, *self._linear.values()):
            backend.init_cuda_graph_state(max_bs, max_num_tokens)


def make_linear_layers(
    inner: MakeBackend, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `linear_layers`: the attention backend, which also prepares the
    decided backends of the linear layers.

    Raises InvalidInput for a context without states, for layers of other kinds or dims than the
    decision's, and for states without room for the request's draft tokens.
    """
    served = decision.parts["linear_layers"]
    if context.linear_states is None:
        if not served:
            return inner(context, phases)
        expected = f"a LinearStatePool for the model's {', '.join(served)} layers"
        raise InvalidInput("context.linear_states", got=None, expected=expected)
    states = LinearStatePool.of(context)
    drafts = decision.request.spec_draft_tokens or 0
    if states.draft_tokens < drafts:
        got = f"room for the states of {states.draft_tokens} draft tokens"
        expected = f"a LinearStatePool with draft_tokens={drafts}, as the request verifies"
        raise InvalidInput("context.linear_states", got=got, expected=expected)
    for layer in states.layers:
        _check(layer, decision.request, served)
    backends: dict[str, LinearAttentionBackend] = {
        kind: _by_phase(served[kind], context)
        for kind in dict.fromkeys(layer.kind for layer in states.layers)
    }
    return HybridLinearAttnBackend(inner(context, phases), backends)


def _by_phase(served: Mapping[str, Choice], context: BackendContext) -> LinearAttentionBackend:
    leaves = {choice.address: make_linear(choice, context) for choice in served.values()}
    if len(leaves) == 1:
        return next(iter(leaves.values()))
    extend, decode = (leaves[served[phase].address] for phase in ("extend", "decode"))
    return LinearByPhase(extend=extend, decode=decode)


def _check(layer: LinearLayerSpec, request: Request, served: Served) -> None:
    name = f"linear layer {layer.layer_id}"
    if layer.kind not in served:
        expected = f"a kind that the decision serves: {', '.join(served) or 'none'}"
        raise InvalidInput(name, got=layer.kind, expected=expected)
    k_dim, v_dim = request.linear_head_dim, request.linear_v_head_dim
    dims = (layer.head_k_dim, k_dim), (layer.head_v_dim, v_dim or k_dim)
    for got, decided in dims if layer.has_state else ():
        if decided is not None and got != decided:
            raise InvalidInput(name, got=f"a head of {got} dims", expected=f"{decided}, as decided")
