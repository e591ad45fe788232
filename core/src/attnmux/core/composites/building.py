"""From a decision to a backend that runs it, and to the next candidate if one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TypeVar

from attnmux.core.adapters.shared_kernels import with_shared_kernels
from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.composites.dispatch import BatchSizeAttnBackend, HybridAttnBackend, Sizes
from attnmux.core.composites.factories import around, make_backend
from attnmux.core.composites.layer_groups import LayerGroupsBackend, group_contexts
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.engines.device_platforms import check_device
from attnmux.core.facts.errors import BackendFailed, InvalidInput
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.request import Request
from attnmux.core.find.plugins import Plugins
from attnmux.core.find.settings import Settings
from attnmux.core.measured.measurement import Measurement
from attnmux.core.measured.ranking import accuracy_by

T = TypeVar("T")


def build(decision: Decision, context: BackendContext) -> AttentionBackend:
    """Make the backend of a decision.

    It is a single backend, a `HybridAttnBackend` if decode and extend differ, and a
    `BatchSizeAttnBackend` if the decision has other backends for some sizes of decode steps. The
    decision's parts are built around it, see `Part`.
    A context with an encoder's layers gets the backend of the phase "encoder".
    A context without a `kv_writer` gets the one that an installed plugin offers for its device.
    A `LayerGroupsBackend` has one of these for each group of layers whose heads, dims or KV dtype
    differ; each reads its layers' part of the pool (`KVPool.of_layers`).
    Raises InvalidInput when a layer of the context has a feature or dims that the request of the
    decision lacks, when context and decision differ in page size, KV dtype or the request, or when
    torch reports another architecture of the context's device than that of the decision.
    Raises BackendFailed when a chosen backend cannot be imported or made.
    A decision that was read from text is checked first, against this machine's devices and
    measurements and the plugins that the configuration admits; InvalidInput names every difference.
    """
    if not decision.is_checked:
        _check(decision)
    _check_context(decision, context)
    check_device(context.device, decision.platform)
    phases = ("extend", "decode") if context.layers[0].is_causal else ("encoder",)
    if decision.phases.keys().isdisjoint(phases):
        raise InvalidInput(
            "decision", got=f"phases {sorted(decision.phases)}", expected=" or ".join(phases)
        )
    differences = _differences(context.request, decision.request)
    if differences:
        raise InvalidInput("context.request", got=differences, expected="the decision's request")
    context = with_shared_kernels(context)

    def of_group(group: Decision, own: BackendContext) -> AttentionBackend:
        whole = around(partial(_assemble, group), group, "layers")
        return whole(own, [phase for phase in phases if phase in group.phases])

    def of_layers(context: BackendContext, phases: Sequence[str]) -> AttentionBackend:
        first, *others = (of_group(*pair) for pair in group_contexts(decision, context))
        for other, backend in zip(decision.others, others, strict=True):
            _check_padding(first, backend, other.phases["decode"])
        return LayerGroupsBackend(context, (first, *others)) if others else first

    return around(of_layers, decision, "model")(context, phases)


def _check_padding(first: AttentionBackend, other: AttentionBackend, choice: Choice) -> None:
    """Raise BackendFailed if one graph runner cannot pad for both, so that an automatic choice
    continues without `choice`, the other one's."""
    known, padding = (backend.get_cuda_graph_seq_len_fill_value() for backend in (first, other))
    if padding != known:
        reason = f"it has padding rows of {padding} tokens, and the other backend of {known}"
        raise BackendFailed(choice.address, reason)


def _assemble(
    decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The main backends of a decision as one. phases: those of the context's layers."""
    leaves: dict[str, AttentionBackend] = {}

    def leaf(choice: Choice) -> AttentionBackend:
        if choice.address not in leaves:
            leaves[choice.address] = make_backend(choice, context)
        return leaves[choice.address]

    by_phase = {phase: leaf(decision.phases[phase]) for phase in phases}
    if len(leaves) > 1:
        usual: AttentionBackend = HybridAttnBackend(
            prefill=by_phase["extend"], decode=by_phase["decode"]
        )
    else:
        usual = next(iter(leaves.values()))
    if "decode" not in phases or not decision.decode_sizes:
        return usual
    sizes = []
    for size in decision.decode_sizes:
        backend = leaf(size.choice)
        _check_padding(usual, backend, size.choice)
        sizes.append(Sizes(least=size.least, most=size.most, backend=backend))
    return BatchSizeAttnBackend(usual=usual, sizes=sizes)


def _check(decision: Decision) -> None:
    """Check a decision against this machine, its measurements and the configured plugins."""
    settings = Settings.load()
    plugins = Plugins.load(settings=settings)
    wanted = f"{decision.platform.vendor}:{decision.platform.arch}"
    platform, offers = plugins.detect().pick(wanted), plugins.offers()
    measurements = Measurement.read(settings.measurements_file()).found
    decision.check(platform, offers, accuracy=accuracy_by(measurements, platform, offers))


def _check_context(decision: Decision, context: BackendContext) -> None:
    pool = context.token_to_kv_pool
    if len({layer.is_causal for layer in context.layers}) != 1:
        raise InvalidInput(
            "context.layers",
            got="none, or an encoder's and a decoder's together",
            expected="the layers of one or the other: each gets a backend of its own",
        )
    if context.linear_states is not None and not decision.request.linear_layers:
        expected = "none: the decision has no linear layers"
        raise InvalidInput("context.linear_states", got="states of layers", expected=expected)
    _check_pool("page size", pool.page_size, decision.page_size)
    if pool.is_strided and not decision.request.strided_kv:
        raise InvalidInput(
            "context.token_to_kv_pool",
            got="slots or heads with gaps between them",
            expected="none, as in the request: choose again with strided_kv set",
        )
    for group, own in group_contexts(decision, context):
        for dtype in own.token_to_kv_pool.dtypes:
            _check_pool("KV dtype", Request.canonical_dtype(dtype), group.kv_dtype)
        _check_layers(own.layers, group.request)


def _check_pool(what: str, got: object, decided: object) -> None:
    if got != decided:
        expected = f"the decision's {what}, {decided}"
        raise InvalidInput("context.token_to_kv_pool", got=got, expected=expected)


def _check_layers(layers: Sequence[LayerSpec], request: Request) -> None:
    """Refuse layers with dims or features that the request of their group lacks."""
    for layer in layers:
        name = f"layer {layer.layer_id}"
        kv_dtypes = "kv_dtype", layer.kv_dtype or request.kv_dtype, request.kv_dtype
        for field, has, decided in (kv_dtypes, *_dims(layer, request)):
            if decided is not None and has != decided:
                raise InvalidInput(name, got=f"{field} {has}", expected=f"{decided}, as decided")
        for feature in _unasked(layer, request):
            expected = f"no more than the request asks for: choose again with {feature} set"
            raise InvalidInput(name, got=feature, expected=expected)


def _differences(ours: Request, decided: Request) -> str:
    """The fields in which two requests differ, apart from their origins."""
    names = [field.name for field in fields(ours) if field.name != "origins"]
    pairs = [(name, getattr(ours, name), getattr(decided, name)) for name in names]
    return ", ".join(f"{name} {mine!r}, not {own!r}" for name, mine, own in pairs if mine != own)


def _dims(layer: LayerSpec, request: Request) -> tuple[tuple[str, int, int | None], ...]:
    """(request field, the layer's value, the request's)."""
    if not layer.is_causal:
        return (("encoder_head_dim", layer.qk_head_dim, request.encoder_head_dim),)
    if layer.kind == "mla":
        return (
            ("kv_lora_rank", layer.v_head_dim, request.kv_lora_rank),
            ("qk_rope_head_dim", layer.qk_rope_head_dim, request.qk_rope_head_dim),
        )
    return (
        ("head_dim", layer.qk_head_dim, request.head_dim),
        ("v_head_dim", layer.v_head_dim, request.v_head_dim or request.head_dim),
    )


def _unasked(layer: LayerSpec, request: Request) -> list[str]:
    """The layer's kind and features that the request does not ask for, as text of a request."""
    kinds = {"mla": ("mla", "nsa"), "dual_chunk": ("dual_chunk",)}.get(layer.kind, (request.kind,))
    found = [] if request.kind in kinds else [f"kind={layer.kind}"]
    features = sorted(layer.features - {"bidirectional"})
    return found + [name for name in features if not getattr(request, name)]


def make_first(
    decide: Callable[[Mapping[str, BackendFailed]], Decision],
    make: Callable[[Decision], T],
    on_fallback: Callable[[BackendFailed, Decision], None],
) -> T:
    """Decide and make a backend; if it fails, repeat without it.

    decide: solves with the given `Policy.failed`. make: calls `build`, and drops its allocations if
    that fails. on_fallback: called with each failure and the decision that replaces it, to tell the
    user.
    A backend that the user named is not replaced: `decide` then raises NoBackend, whose reasons
    contain the failure and its hint.
    """
    failed: dict[str, BackendFailed] = {}
    decision = decide(FrozenMapping(failed))
    while True:
        try:
            return make(decision)
        except BackendFailed as failure:
            if failure.address in failed:
                raise
            # A copy without the traceback, whose frames keep the allocations of `make` alive
            copy = BackendFailed(failure.address, failure.reason, hint=failure.hint)
            failed[failure.address] = copy
            try:
                decision = decide(FrozenMapping(failed))
            except Exception as refusal:
                raise refusal from failure
            on_fallback(copy, decision)
