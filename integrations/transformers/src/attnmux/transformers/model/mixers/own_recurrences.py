"""Recurrences of models that compute them in their own code, led to the mixer.

An adapter makes a module's forward: it projects as the module does, and asks the mixer for the
rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.model.layer_call import replace_function
from attnmux.transformers.model.mixers.mixer import Convolution, Mixer, Recurrence
from attnmux.transformers.model.mixers.mixer_calls import (
    ACTIVATIONS,
    refuse_padding,
    row_of,
)

BASE = 256


def ngram_features(mixer: Mixer) -> Callable[..., Any]:
    """Qwen4-Exp's: hashed n-grams choose embeddings, which a dilated convolution mixes.

    An n-gram does not reach over an end of text. If there is no token, it has that one's id.
    """
    module: Any = mixer.module
    embedding = module.ple_embedding
    spaced = module.conv1d.dilation[0]
    taps = (module.conv1d.kernel_size[0] - 1) * spaced + 1
    # All convolutions of a layer have as many taps
    width = max(taps, 2)
    end = embedding.eos_token_id
    # One more than an id, so that 0 is no token
    places = [1]
    while places[-1] * BASE <= embedding.unigram_vocab_size:
        places.append(places[-1] * BASE)

    def before(ids: torch.Tensor) -> torch.Tensor:
        """The id of the token before each, for ids [T]."""
        digits = torch.stack([(ids + 1) // place % BASE for place in places], dim=1)
        x = digits.to(module.conv1d.weight.dtype)
        weight = x.new_zeros((len(places), width))
        weight[:, -2] = 1
        earlier = mixer.convolve(Convolution(x=x, weight=weight, bias=None, silu=False)).long()
        known = earlier[:, 0] - 1
        for n, place in enumerate(places[1:], start=1):
            known = known + earlier[:, n] * place
        return torch.where(known < 0, end, known)

    def convolve(hidden_states: torch.Tensor, _: None) -> torch.Tensor:
        x, conv_weight = row_of(mixer, hidden_states).contiguous(), module.conv1d.weight.squeeze(1)
        weight = x.new_zeros((conv_weight.shape[0], width))
        weight[:, width - taps :: spaced] = conv_weight
        convolution = Convolution(x=x, weight=weight, bias=None, silu=True)
        return mixer.convolve(convolution).unsqueeze(0)

    def forward(
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        past_key_values: None = None,
        conv_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse_padding(mixer, conv_mask)
        ids = row_of(mixer, input_ids).long()
        ngram = [ids]
        for _ in range(embedding.context_len):
            ngram.append(before(torch.where(ids == end, end, ngram[-1])))
        embedding._shift_right_ignore_eos = lambda _, shift: ngram[shift].unsqueeze(0)
        output: torch.Tensor = type(module).forward(module, hidden_states, input_ids, None)
        return output

    module._short_conv = convolve
    return forward


def _lightning(mixer: Mixer) -> Callable[..., Any]:
    """MiniMax's: a head's state decays by the same factor at every token."""
    module: Any = mixer.module
    heads, dim = module.num_attention_heads, module.head_dim

    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, None]:
        refuse_padding(mixer, attention_mask)
        qkv = module.act_fn(module.qkv_proj(row_of(mixer, hidden_states)))
        q, k, v = qkv.view(-1, heads, 3 * dim).split(dim, dim=2)
        recurrence = Recurrence(
            kind="lightning",
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g=-module.slope_rate.view(heads).float().expand(q.shape[0], -1),
            beta=None,
            scaling=1.0,
            qk_l2norm=False,
        )
        out = module.norm(mixer.recur(recurrence).flatten(1).unsqueeze(0))
        return module.out_proj(module.output_gate(hidden_states).sigmoid() * out), None

    return forward


def _zamba(mixer: Mixer) -> Callable[..., Any]:
    """Mamba in several heads, each of which the module scans by itself."""
    module: Any = mixer.module
    heads, states = module.n_mamba_heads, module.ssm_state_size
    if module.activation not in ACTIVATIONS:
        raise InvalidInput(f"{mixer.name}, activation", got=module.activation, expected="silu")

    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        refuse_padding(mixer, attention_mask)
        projected = module.in_proj(row_of(mixer, hidden_states))
        x, gate = projected.view(projected.shape[0], -1, 2).unbind(2)
        weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
        x = mixer.convolve(Convolution(x=x.contiguous(), weight=weight, bias=bias, silu=True))
        by_head = x.view(x.shape[0], heads, -1).transpose(0, 1)
        dt, k, q = (by_head @ module.x_proj_weight.mT).split(
            [module.time_step_rank, states, states], dim=-1
        )
        dt = dt @ module.dt_proj_weight.mT + module.dt_proj_bias[:, None]
        dt = torch.nn.functional.softplus(dt).transpose(0, 1).flatten(1).float()
        recurrence = Recurrence(
            kind="mamba1",
            q=q.transpose(0, 1).contiguous(),
            k=k.transpose(0, 1).contiguous(),
            v=x.unsqueeze(-1),
            g=dt.unsqueeze(-1) * -module.A_log.float().exp().flatten(0, 1),
            beta=dt,
            scaling=1.0,
            qk_l2norm=False,
        )
        out = mixer.recur(recurrence).squeeze(-1) + x * module.D.flatten()
        return module.out_proj((out * torch.nn.functional.silu(gate)).unsqueeze(0))  # type: ignore[no-any-return]  # a tensor

    return forward


def _rg_lru(mixer: Mixer) -> Callable[..., Any]:
    """RecurrentGemma's: each channel decays by a gate of its own. Its code resets the state at
    position 0, where a request's state is 0 already."""
    block: Any = mixer.module

    def convolve(x: torch.Tensor) -> torch.Tensor:
        weight, bias = block.conv_1d.weight.squeeze(1), block.conv_1d.bias
        rows = row_of(mixer, x).t().contiguous()
        convolution = Convolution(x=rows, weight=weight, bias=bias, silu=False)
        return mixer.convolve(convolution).t().unsqueeze(0)

    def scan(
        hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, None]:
        x, decay = row_of(mixer, hidden_states), row_of(mixer, recurrent_gate).float()
        ones = x.new_ones((x.shape[0], 1, 1))
        recurrence = Recurrence(
            kind="mamba1",
            q=ones,
            k=ones,
            v=x.unsqueeze(-1).contiguous(),
            g=decay.clamp_min(torch.finfo(torch.float32).tiny).log().unsqueeze(-1),
            beta=None,
            scaling=1.0,
            qk_l2norm=False,
        )
        return mixer.recur(recurrence).squeeze(-1).unsqueeze(0), None

    block.conv_1d.forward = convolve
    replace_function(block.rg_lru, "_rnn_scan", scan)
    return partial(type(block).forward, block)


def _mlstm(mixer: Mixer) -> Callable[..., Any]:
    """xLSTM's: values are divided by the sum of their weights, or by 1 if that is less.

    The sum is a column of ones beside V. Weights are e^gate, capped, so that they need no running
    maximum here; the module's eps, which it adds in units of that maximum, is left out.
    """
    module: Any = mixer.module
    cap = module.config.gate_soft_cap
    if cap is None:
        raise InvalidInput(f"{mixer.name}, gate_soft_cap", got=None, expected="a cap of the gates")
    # Steps are cut by the runner, which calls each layer once
    module.config.max_inference_chunksize = sys.maxsize

    def forward(
        *,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        igate: torch.Tensor,
        fgate: torch.Tensor,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (row_of(mixer, tensor).transpose(0, 1) for tensor in (query, key, value))
        gates, decays = (row_of(mixer, gate).t().float() for gate in (igate, fgate))
        recurrence = Recurrence(
            kind="mamba2",
            q=q.contiguous(),
            k=k.contiguous(),
            v=torch.nn.functional.pad(v, (0, 1), value=1.0),
            g=torch.nn.functional.logsigmoid(decays),
            beta=(gates - cap).exp(),
            scaling=q.shape[-1] ** -0.5,
            qk_l2norm=False,
        )
        out = mixer.recur(recurrence).float()
        mean = out[..., :-1] / out[..., -1:].abs().clamp_min(math.exp(-cap))
        return mean.to(v.dtype).transpose(0, 1).unsqueeze(0), None

    return forward


def _cca(mixer: Mixer) -> Callable[..., Any]:
    """Zaya's projections, which mix a token with those just before it by two convolutions, and
    take half of V from the token before. The second convolution joins the channels of a head: it
    gets earlier tokens through convolutions that only delay."""
    module: Any = mixer.module
    depthwise, grouped = module.conv_qk_depthwise, module.conv_qk_grouped
    taps = max(2, module.depthwise_kernel_size, module.grouped_kernel_size)
    kv_heads, dim = module.num_key_value_heads, module.head_dim

    def delayed(x: torch.Tensor, by: int, before: torch.Tensor) -> torch.Tensor:
        """x [T, C] of the token that is `by` places earlier; `before` [C] before the first."""
        weight = x.new_zeros((x.shape[1], taps))
        weight[:, -1 - by] = 1
        convolution = Convolution(x=x - before, weight=weight, bias=None, silu=False)
        return mixer.convolve(convolution) + before

    def forward(
        hidden_states: torch.Tensor,
        past_key_values: None = None,
        conv_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        refuse_padding(mixer, conv_mask)
        x = row_of(mixer, hidden_states)
        projected = torch.cat([module.q_proj(x), module.k_proj(x)], dim=-1)
        heads = projected.view(len(x), -1, dim)
        q, k = heads[:, :-kv_heads], heads[:, -kv_heads:]
        q = (q + k.repeat_interleave(module.num_key_value_groups, dim=1)) * 0.5
        k = q.reshape(len(x), kv_heads, -1, dim).mean(dim=2)

        depth_weight = depthwise.weight.squeeze(1)
        weight = torch.nn.functional.pad(depth_weight, (taps - depth_weight.shape[1], 0))
        mixed = mixer.convolve(Convolution(x=projected, weight=weight, bias=None, silu=False))
        mixed = mixed + depthwise.bias
        places = range(module.grouped_kernel_size - 1, 0, -1)
        near = [*(delayed(mixed, by, depthwise.bias) for by in places), mixed]
        mixed = torch.nn.functional.conv1d(
            torch.stack(near, dim=-1), grouped.weight, grouped.bias, groups=grouped.groups
        )
        mixed = mixed.view(len(x), -1, dim)

        of_none = module.v_proj_delayed(x.new_zeros(x.shape[1]))
        earlier = delayed(module.v_proj_delayed(x), 1, of_none)
        v = torch.cat([module.v_proj_current(x), earlier], dim=-1).view(len(x), kv_heads, dim)
        parts = mixed[:, :-kv_heads] + q, mixed[:, -kv_heads:] + k, v
        return tuple(tensor.unsqueeze(0) for tensor in parts)

    return forward


ADAPTERS: Mapping[str, Callable[[Mixer], Callable[..., Any]]] = MappingProxyType(
    {
        "MiniMaxLightningAttention": _lightning,
        "Qwen4ExpTextPLELayer": ngram_features,
        "RecurrentGemmaRecurrentBlock": _rg_lru,
        "ZambaMambaMixer": _zamba,
        "ZayaCCAProjection": _cca,
        "xLSTMBackend": _mlstm,
    }
)
"""By the class of a module."""
