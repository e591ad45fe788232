"""The attention layers of a model, recorded from the model itself.

A probe runs single tokens through the model with attention functions that write down what
transformers passes to each layer. Nothing is known about any model by its name.
"""

from __future__ import annotations

from collections import Counter

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnmux.core.dtypes import dtype_name
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.transformers.attention import AttentionCall
from attnmux.transformers.masks import Reach
from attnmux.transformers.probe import Recorder, recording

POSITION_TOLERANCE = 0.02
"""Share of the largest value: far above rounding in any dtype, far below one position's turn."""


@torch.inference_mode()
def record_layers(model: PreTrainedModel, *, max_context_len: int) -> tuple[LayerSpec, ...]:
    """The attention layers of a decoder model, by what it asks for when it runs.

    Window and chunk hold for sequences of up to `max_context_len` tokens.
    Raises InvalidInput for a model whose attention the contract cannot serve, saying why.
    """
    check_servable(type(model), model.config)
    recorder = Recorder()
    zero = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with recording(model, recorder):
        logits = model(input_ids=zero, position_ids=zero, use_cache=False).logits
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    counts = Counter(call.layer_id for call in recorder.calls)
    if expected < 1:
        raise InvalidInput(type(model).__name__, came="none", expected="at least one layer")
    if len(counts) != expected or len(recorder.calls) != expected:
        raise InvalidInput(
            type(model).__name__,
            came=f"{len(recorder.calls)} attention calls in layers {sorted(counts)}",
            expected=f"one in each of {expected} layers: a layer that mixes tokens in another "
            "way, or that attends twice, cannot be served",
        )
    # First of all: not a number is what the check behind it looks for.
    _check_numbers(model, [logits, *(part for call in recorder.calls for part in (call.q, call.k))])
    _check_packable(model)
    _check_positions(model)
    calls = sorted(recorder.calls, key=lambda call: call.layer_id)
    return tuple(_layer(call, recorder.reach_of(call, max_context_len)) for call in calls)


def check_servable(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse models whose attention does not pass through transformers' attention interface.

    Raises InvalidInput, saying what the class is instead.
    """
    name = model_class.__name__
    if config.is_encoder_decoder:
        raise InvalidInput(name, came="an encoder-decoder model", expected="a decoder-only model")
    if model_class._is_stateful:
        raise InvalidInput(
            name,
            came="a model with recurrent state",
            expected="one whose only memory of earlier tokens is attention's K and V",
        )
    if not model_class._supports_attention_backend:
        raise InvalidInput(
            name,
            came="a model that computes attention by itself",
            expected="one that calls transformers' AttentionInterface",
        )


def _check_numbers(model: PreTrainedModel, values: list[torch.Tensor]) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise InvalidInput(
            type(model).__name__,
            came=f"values that are not numbers, in {dtype_name(model.dtype)}",
            expected="weights that are not damaged, in a dtype that is wide enough for them",
        )


def _check_packable(model: PreTrainedModel) -> None:
    """Refuse a model in which tokens of different requests meet anywhere but in attention.

    Two requests of one token each share a row, the first with embeddings that are not numbers:
    the second stays finite unless something carries from one to the other.
    """
    zeros = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    poison = model.get_input_embeddings().register_forward_hook(_poison_first)
    try:
        with recording(model, Recorder()):
            logits = model(input_ids=zeros, position_ids=zeros, use_cache=False).logits
    finally:
        poison.remove()
    if not bool(torch.isfinite(logits[0, 1]).all()):
        raise InvalidInput(
            type(model).__name__,
            came="tokens that reach other requests' tokens outside of attention",
            expected="a model in which only attention mixes the tokens of a row",
        )


def _check_positions(model: PreTrainedModel) -> None:
    """Refuse a model that does not count each request's tokens from 0 by the positions given.

    The same token thrice: positions 0, 1, 2 must change nothing against the model's own count, and
    position 0 for each must make them equal, as first tokens of three requests are.
    """
    own, given, first = (
        _attended(model, positions) for positions in (None, [[0, 1, 2]], [[0, 0, 0]])
    )
    for name, tokens, expected in (
        ("another count", given, own),
        ("places in the row, not the positions given", first, [one[:1] for one in given]),
    ):
        for ours, theirs in zip(tokens, expected, strict=True):
            if float((ours - theirs).abs().max()) > POSITION_TOLERANCE * float(ours.abs().max()):
                raise InvalidInput(
                    type(model).__name__,
                    came=f"positions by {name}",
                    expected="a model that counts a request's tokens from 0 by its position_ids",
                )


def _attended(model: PreTrainedModel, positions: list[list[int]] | None) -> list[torch.Tensor]:
    """[3, heads, dim] each: the queries and keys of all layers for one token repeated."""
    zeros = torch.zeros((1, 3), dtype=torch.long, device=model.device)
    position_ids = None if positions is None else torch.tensor(positions, device=model.device)
    recorder = Recorder()
    with recording(model, recorder):
        model(input_ids=zeros, position_ids=position_ids, use_cache=False)
    return [part.float() for call in recorder.calls for part in (call.q, call.k)]


def _poison_first(
    module: torch.nn.Module, args: tuple[object, ...], output: torch.Tensor
) -> torch.Tensor:
    poisoned = output.clone()
    poisoned[:, 0] = torch.nan
    return poisoned


def _layer(call: AttentionCall, reach: Reach) -> LayerSpec:
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
        sinks=None if call.sinks is None else call.sinks.detach().float().clone(),
    )
