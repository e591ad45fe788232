"""The attention layers of a model, recorded from the model itself.

A probe runs single tokens through the model with attention functions that write down what
transformers passes to each layer. Nothing is known about any model by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from attnmux.core import InvalidInput, LayerSpec, Request
from attnmux.transformers.model.layer_call import LayerCall
from attnmux.transformers.model.mixers.mixer import Mixer
from attnmux.transformers.model.mixers.mixers import has_attention, has_mixers
from attnmux.transformers.model.own_attention import adapt, has_adapter
from attnmux.transformers.model.positions import (
    count_from_own_start,
    scale_by_positions,
    take_positions,
)
from attnmux.transformers.model.probe import Probe, are_alike
from attnmux.transformers.model.reach import Reach
from attnmux.transformers.model.repeated import has_numbered_calls, number_calls
from attnmux.transformers.model.sparse.compressors import has_compressors
from attnmux.transformers.model.unserved_attention import check_own_attention

TOKEN_COUNTER = LayerSpec(
    layer_id=0,
    tp_q_head_num=1,
    tp_k_head_num=1,
    tp_v_head_num=1,
    qk_head_dim=64,
    v_head_dim=64,
    scaling=1.0,
)
"""The layer of a model without attention. No module calls it: its KV pool counts the tokens of
requests, and its prefixes find the states that were kept. Every backend serves its dims."""


@torch.inference_mode()
def record_layers(
    model: PreTrainedModel, *, max_context_len: int, mixers: Sequence[Mixer] = ()
) -> tuple[LayerSpec, ...]:
    """The attention layers of a decoder model, recorded while it runs.

    It is `TOKEN_COUNTER` alone for a model of mixers without attention. Windows and chunks are
    valid for sequences of up to `max_context_len` tokens. mixers: those of the model, bound; their
    layers are recorded too.
    Raises InvalidInput, with the reason, for a model whose layers the contract cannot serve.
    """
    check_servable(type(model), model.config)
    check_capacities(model)
    adapt(model)
    take_positions(model)
    scale_by_positions(model)
    probe = Probe.of(model, mixers)
    logits, recorder = probe.run([probe.token], [0])
    counts: Counter[object] = Counter(module.layer_idx for module in recorder.callers)
    if not mixers:  # whatever else mixes tokens shows when requests share a row
        _check_every_layer(probe, counts)
    if counts.total() > len(counts) and not has_numbered_calls(model):
        number_calls(model, recorder.callers)
        logits, recorder = probe.run([probe.token], [0])
    count_from_own_start(model, partial(counts_from, probe))
    check_table(probe, max_context_len)
    check_independence(probe, logits, recorder.calls)
    for mixer in mixers:
        mixer.spec = recorder.mixers.spec_of(mixer, model.dtype)
    # Those with a mask are causal by it, or `reach_of` raises
    for module, call in zip(recorder.callers, recorder.calls, strict=True):
        if call.mask is not None:
            setattr(module, "is_causal", True)  # noqa: B010  # mypy takes it for a tensor
    calls = sorted(recorder.calls, key=lambda call: call.layer_id)
    if not calls:
        return (TOKEN_COUNTER,)
    return tuple(layer_of(call, recorder.reach_of(call, max_context_len)) for call in calls)


def _check_every_layer(probe: Probe, counts: Counter[object]) -> None:
    text = probe.model.config.get_text_config(decoder=True)
    # The decoder of an encoder-decoder model alone, whose `num_hidden_layers` are the encoder's
    expected = getattr(text, "decoder_layers", None) or text.num_hidden_layers
    if expected < 1:
        raise InvalidInput(probe.name, got="none", expected="at least one layer")
    if len(counts) != expected:
        raise InvalidInput(
            probe.name,
            got=f"{counts.total()} attention calls in layers {list(counts)}",
            expected=f"some in each of {expected} layers: a layer that mixes tokens in another "
            "way cannot be served",
        )


def check_servable(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse models whose attention does not pass through transformers' attention interface.

    A model with mixers has recurrent states that can be served; what else it does, the probe finds
    out. Raises InvalidInput with the reason.
    """
    name = model_class.__name__
    if config.is_encoder_decoder:
        raise InvalidInput(name, got="an encoder-decoder model", expected="a decoder-only model")
    check_own_attention(model_class, config)
    if has_mixers(model_class) or has_compressors(model_class):
        return
    if model_class._is_stateful:
        raise InvalidInput(
            name,
            got="a model with recurrent state",
            expected="one whose memory of earlier tokens is attention's K and V, or these and the "
            "states of layers that `mixer_calls.py` knows",
        )
    text = config.get_text_config(decoder=True)
    inner = MODEL_MAPPING.get(type(text), None) if text is not config else None
    classes = [kind for kind in (model_class, inner) if isinstance(kind, type)]
    if not any(map(_calls_interface, classes)):
        raise InvalidInput(
            name,
            got="a model that computes attention by itself",
            expected="one that calls transformers' AttentionInterface",
        )


def _calls_interface(model_class: type[PreTrainedModel]) -> bool:
    # Some models call the interface without saying so
    calls = model_class._supports_attention_backend or has_attention(model_class)
    return bool(calls or has_adapter(model_class))


def check_capacities(model: torch.nn.Module) -> None:
    """Refuse experts that drop the tokens of a row beyond so many (Switch Transformers): in a row
    of many requests, one request's tokens would drop another's. Raises InvalidInput."""
    limited = [name for name, each in model.named_modules() if _drops_tokens(each)]
    if limited:
        raise InvalidInput(
            type(model).__name__,
            got=f"{limited[0]}, which drops tokens beyond the capacity of an expert",
            expected="experts that take every token that is routed to them",
        )


def _drops_tokens(module: torch.nn.Module) -> bool:
    """NLLB-MoE's experts take as large a share of a row's tokens as its config says."""
    share = getattr(module, "moe_eval_capacity_token_fraction", 0.0)
    return "expert_capacity" in vars(module) and not share >= 1


def check_independence(probe: Probe, logits: torch.Tensor, calls: list[LayerCall]) -> None:
    """Refuse a model in which requests that share a row would affect each other.

    logits, calls: from a run of the probe. Raises InvalidInput with the reason.
    """
    # First, since the next check looks for values that are not numbers
    _check_numbers(probe, [logits, *(part for call in calls for part in (call.q, call.k))])
    check_packable(probe)
    _check_positions(probe)


def _check_numbers(probe: Probe, values: list[torch.Tensor]) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise InvalidInput(
            probe.name,
            got=f"values that are not numbers, in {Request.canonical_dtype(probe.model.dtype)}",
            expected="weights that are not damaged, in a dtype that is wide enough for them",
        )


def check_packable(probe: Probe) -> None:
    """Refuse a model in which tokens of different requests meet outside of attention.

    Two requests of one token each share a row. The first has embeddings that are not numbers; the
    second stays finite unless the model mixes them.
    """
    poison = probe.embeddings.register_forward_hook(_poison_first)
    try:
        logits, _ = probe.run([probe.token] * 2, [0, 0])
    finally:
        poison.remove()
    if not bool(torch.isfinite(logits[1]).all()):
        raise InvalidInput(
            probe.name,
            got="tokens that reach other requests' tokens outside of attention",
            expected="a model in which only attention mixes the tokens of a row",
        )


def _check_positions(probe: Probe) -> None:
    """Refuse a model that does not count each request's tokens from 0 by the given positions.

    The probe runs the same token three times. Positions 0, 1, 2 must equal the model's own count,
    and position 0 for all must give three equal results, as for the first tokens of three requests.
    """
    counted, stated, first = (
        _attended(probe, positions) for positions in (None, [0, 1, 2], [0, 0, 0])
    )
    for name, tokens, expected in (
        ("another count", stated, counted),
        ("places in the row, not the positions given", first, [tensor[:1] for tensor in stated]),
    ):
        if not all(map(are_alike, expected, tokens)):
            raise InvalidInput(
                probe.name,
                got=f"positions by {name}",
                expected="a model that counts a request's tokens from 0 by its position_ids",
            )


def counts_from(probe: Probe, start: int) -> bool:
    """Whether the model's own count is the one that begins at this position."""
    try:
        stated = _attended(probe, [start, start + 1, start + 2])
    except IndexError:  # beyond a table of positions
        return False
    return all(map(are_alike, _attended(probe, None), stated))


def check_table(probe: Probe, max_context_len: int) -> None:
    """Refuse a context beyond a model's table of positions, learned or not.

    A token runs at the last place. Raises InvalidInput before the table is read there, which on a
    GPU would end the process.
    """
    with _TableLimits(max_context_len - 1):
        probe.run([probe.token], [max_context_len - 1])


class _TableLimits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Compares the rows that are looked up with those that there are."""

    def __init__(self, position: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.position = position

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # the operator's
        if func is torch.ops.aten.embedding.default:
            self._check(args[0].shape[0], args[1])
        elif func in (torch.ops.aten.gather.default, torch.ops.aten.index_select.default):
            self._check(args[0].shape[args[1]], args[2])
        elif func is torch.ops.aten.index.Tensor:
            for rows, indices in zip(args[0].shape, args[1], strict=False):
                self._check(rows, indices)
        return func(*args, **(kwargs or {}))

    def _check(self, rows: int, indices: torch.Tensor | None) -> None:
        if indices is None or indices.dtype == torch.bool or not indices.numel():
            return
        largest = int(indices.max())
        if largest < rows:
            return
        start = largest - self.position
        begin = f", which begin at {start}" if start else ""
        raise InvalidInput(
            "context",
            got=f"{self.position + 1} tokens",
            expected=f"at most {rows - start}: the model has a table of {rows} positions{begin}",
        )


def _attended(probe: Probe, positions: list[int] | None) -> list[torch.Tensor]:
    """[3, heads, dim] each: Q and K of one token, run three times, in all layers.

    Without attention, the logits [3, vocabulary].
    """
    logits, recorder = probe.run([probe.token] * 3, positions)
    parts = [part for call in recorder.calls for part in recorder.of_tokens(call)]
    return [part.float() for part in parts or [logits]]


def _poison_first(
    module: torch.nn.Module, args: tuple[object, ...], output: torch.Tensor
) -> torch.Tensor:
    poisoned = output.clone()
    poisoned[:, 0] = torch.nan
    return poisoned


def layer_of(call: LayerCall, reach: Reach) -> LayerSpec:
    return LayerSpec(
        layer_id=call.layer_id,
        tp_q_head_num=call.q.shape[1],
        tp_k_head_num=call.k.shape[1],
        tp_v_head_num=call.v.shape[1],
        qk_head_dim=call.q.shape[2],
        v_head_dim=call.v.shape[2],
        scaling=call.scaling,
        logit_cap=call.logit_cap,
        sliding_window_size=reach.sliding_window_size,
        attention_chunk_size=reach.attention_chunk_size,
        sinks=_of_heads(call.sinks, call.q.device),
        alibi_slopes=_of_heads(call.alibi_slopes, call.q.device),
        relative_bias=_of_heads(call.relative_bias, call.q.device),
    )


def _of_heads(values: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if values is None else values.detach().to(device, torch.float32, copy=True)
