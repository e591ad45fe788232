"""Attention of models that compute it in their own code, led through AttentionInterface.

An adapter replaces a function of each attention module, on the instance: the whole `forward`, or
only the part between the rotated queries and keys and the context. It projects as the module does
and asks the interface for the rest, so that probes and backends see an ordinary layer.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnmux.transformers.model.layer_call import replace_function
from attnmux.transformers.model.mixers.mixers import calls
from attnmux.transformers.model.projected_attention import (
    Heads,
    attend,
    bart,
    bert,
    fsmt,
    led,
    t5,
    umt5,
    xlm,
)

SWITCH = "_can_set_attn_implementation"
"""The method by which a model says that it calls AttentionInterface."""


ALIGNED = 8
"""Dims of a head come in multiples of so many."""


def has_adapter(model_class: type[torch.nn.Module]) -> bool:
    """Whether `adapt` leads the attention of models of this class through the interface."""
    beside = vars(sys.modules[model_class.__module__])
    return any(name in beside for name in ADAPTERS)


def adapt(model: PreTrainedModel) -> None:
    """Replace the attention of a model that `has_adapter` serves, and let the model switch its
    implementation as others do. Does nothing for other models, and for one that is adapted."""
    if not has_adapter(type(model)) or SWITCH in vars(model):
        return
    for module in model.modules():
        adapter = ADAPTERS.get(type(module).__name__)
        if adapter is not None:
            adapter(module, model.config)
    setattr(model, SWITCH, lambda: True)


def _bloom(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    arguments = {"scaling": module.inv_norm_factor, "alibi_slopes": _slopes(module)}

    def forward(
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        context = attend(module, config, q, k, v, attention_mask, **arguments)
        return module.dense(context.flatten(2)) + residual, None

    module.forward = forward


def _falcon(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    heads, dim = module.num_heads, module.head_dim
    kv_heads = module.num_kv_heads
    if not module.new_decoder_architecture:
        kv_heads = 1 if module.multi_query else heads
    arguments: dict[str, Any] = {"scaling": module.inv_norm_factor}
    if config.alibi:
        # transformers rounds slopes to bfloat16, and adds the biases before it scales
        arguments["alibi_slopes"] = _slopes(module) * module.inv_norm_factor

    def forward(
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        fused = module.query_key_value(hidden_states)
        fused = fused.view(1, -1, kv_heads, heads // kv_heads + 2, dim)
        q, k, v = fused[:, :, :, :-2].flatten(2, 3), fused[:, :, :, -2], fused[:, :, :, -1]
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if position_embeddings is not None and alibi is None:
            q, k = _beside(module, "apply_rotary_pos_emb")(q, k, *position_embeddings)
        else:
            attention_mask = None  # causal, with the biases in it
        context = attend(module, config, q, k, v, attention_mask, **arguments)
        return module.dense(context.flatten(2)), None

    module.forward = forward


def _doge(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """Each key has a bias, made of V: it becomes one more dim of K, which Q multiplies by 1. Beyond
    `keep_window_size` keys, which `check_context` refuses, those with the smallest are hidden."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, module.head_dim
    rotate, pad = _beside(module, "apply_rotary_pos_emb"), torch.nn.functional.pad

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **given: object,
    ) -> tuple[torch.Tensor, None]:
        q = module.q_norm(module.q_proj(hidden_states).view(1, -1, heads, dim)).transpose(1, 2)
        k = module.k_norm(module.k_proj(hidden_states).view(1, -1, kv_heads, dim)).transpose(1, 2)
        q, k = rotate(q, k, *position_embeddings)
        v = module.v_proj(hidden_states)
        bias = torch.exp(module.A * torch.nn.functional.softplus(module.dt_proj(v))).mT
        v = v.view(1, -1, kv_heads, dim).transpose(1, 2)
        q = pad(pad(q, (0, 1), value=1 / module.scaling), (0, ALIGNED - 1))
        k = pad(torch.cat([k, bias.unsqueeze(-1)], dim=-1), (0, ALIGNED - 1))
        given["scaling"] = module.scaling
        context = attend(module, config, q, k, v, attention_mask, **given)
        return module.o_proj(context.flatten(2)), None

    module.forward = forward


def _mpt(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    bias = _beside(module, "build_mpt_alibi_tensor")(module.n_heads, 2)
    arguments = {"scaling": module.softmax_scale, "alibi_slopes": -bias[:, 0, 0]}

    def forward(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        heads = fused.view(1, -1, 3, module.n_heads, module.head_dim).unbind(2)
        q, k, v = (head.transpose(1, 2) for head in heads)
        # The model casts its mask, which is always causal, to bool
        context = attend(module, config, q, k, v, None, **arguments)
        return module.out_proj(context.flatten(2)), None

    module.forward = forward


def _mpt_model(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """Hand the model a mask: it casts what it makes without asking whether there is one."""
    # transformers would warn at each switch that it found no model of `attn_config`
    setattr(config, "sub_configs", {})  # noqa: B010  # a class variable, to mypy

    def with_mask(_: object, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        return args, {**kwargs, "attention_mask": torch.zeros((1, 1, 1, 1), dtype=torch.bool)}

    module.register_forward_pre_hook(with_mask, with_kwargs=True)


def _between(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A module with a function of its own between the rotated queries and keys and the context."""
    if calls(type(module).forward, "ALL_ATTENTION_FUNCTIONS"):
        return  # GPT-J's and CodeGen's from transformers 5.24 on
    arguments: dict[str, Any] = {}
    is_local = False
    if type(module).__name__ == "GPTNeoSelfAttention":
        module.layer_idx = module.layer_id
        is_local = module.attention_type == "local"
        arguments = {"scaling": 1.0, "sliding_window": config.window_size if is_local else None}

    def attention(
        query: Heads, key: Heads, value: Heads, attention_mask: torch.Tensor | None = None
    ) -> tuple[Heads, None]:
        # The mask of a local layer is without the window, which the module adds itself
        mask = None if is_local else attention_mask
        return attend(module, config, query, key, value, mask, **arguments).transpose(1, 2), None

    replace_function(module, "_attn", attention)


def _openai(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """Number the layers' attention, whose classes have too common a name to be found by."""
    for layer_id, block in enumerate(module.h):
        block.attn.layer_idx = layer_id
        attention = partial(_openai_attention, block.attn, config)
        replace_function(block.attn, "_attn", attention)


def _openai_attention(
    module: Any,  # noqa: ANN401
    config: PreTrainedConfig,
    q: Heads,
    k: torch.Tensor,
    v: Heads,
    mask: torch.Tensor | None,
    _: bool,
) -> list[Heads]:
    """k: [1, H, D, T]"""
    scaling = None if module.scale else 1.0
    context = attend(module, config, q, k.transpose(2, 3), v, mask, scaling=scaling)
    return [context.transpose(1, 2)]


def _zamba(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """Number a layer's attention, whose weights layers share: the model hands the number down."""
    module.shared_transf.self_attn.layer_idx = module.mamba_decoder.layer_idx


def _slopes(module: Any) -> torch.Tensor:  # noqa: ANN401
    """[heads] float32: the bias of the second of two keys, as the module's own file has it."""
    build = _beside(module, "build_alibi_tensor")
    bias: torch.Tensor = build(torch.ones((1, 2)), module.num_heads, torch.float32)
    return bias[:, 0, 1]


def _beside(module: object, name: str) -> Callable[..., Any]:
    """A function of the module's own file."""
    function: Callable[..., Any] = pkgutil.resolve_name(f"{type(module).__module__}:{name}")
    return function


ADAPTERS: Mapping[str, Callable[[Any, PreTrainedConfig], None]] = MappingProxyType(
    {
        "BigBirdSelfAttention": bert,
        "BloomAttention": _bloom,
        "CodeGenAttention": _between,
        "DogeAttention": _doge,
        "FSMTDecoder": fsmt,
        "FalconAttention": _falcon,
        "GPTJAttention": _between,
        "GPTNeoSelfAttention": _between,
        "GPTNeoXJapaneseAttention": _between,
        "GitSelfAttention": bert,
        "LEDDecoderAttention": led,
        "LongT5Attention": t5,
        "MT5Attention": t5,
        "MegatronBertSelfAttention": bert,
        "MptAttention": _mpt,
        "MptModel": _mpt_model,
        "MvpAttention": bart,
        "OpenAIGPTModel": _openai,
        "Pop2PianoAttention": t5,
        "RemBertSelfAttention": bert,
        "RoFormerSelfAttention": bert,
        "SpeechT5Attention": bart,
        "T5Attention": t5,
        "TrOCRAttention": bart,
        "UMT5Attention": umt5,
        "XGLMAttention": bart,
        "XLMModel": xlm,
        "ZambaHybridLayer": _zamba,
    }
)
"""By the class of a module."""
