"""Attention of models that compute it in their own code, led through AttentionInterface.

An adapter replaces a function of each attention module, on the instance: the whole `forward`, or
only the part between the rotated queries and keys and the context. It projects as the module does
and asks the interface for the rest, so that probes and backends see an ordinary layer.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Heads = torch.Tensor
"""[1, H, T, D]"""

SWITCH = "_can_set_attn_implementation"
"""The method by which a model says that it calls AttentionInterface."""


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


def attend(
    module: Any,  # noqa: ANN401  # each family's own class
    config: PreTrainedConfig,
    q: Heads,
    k: Heads,
    v: Heads,
    mask: torch.Tensor | None,
    **given: object,
) -> torch.Tensor:
    """The context [1, T, Hq, Dv]."""
    function = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    # Some families rotate in float32, where the cache would hold the model's dtype
    context, _ = function(module, q.to(v.dtype), k.to(v.dtype), v, mask, **given)
    assert isinstance(context, torch.Tensor)
    return context


def _bloom(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    given = {"scaling": module.inv_norm_factor, "alibi_slopes": _slopes(module)}

    def forward(
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        context = attend(module, config, q, k, v, attention_mask, **given)
        return module.dense(context.flatten(2)) + residual, None

    module.forward = forward


def _falcon(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    heads, dim = module.num_heads, module.head_dim
    kv_heads = module.num_kv_heads
    if not module.new_decoder_architecture:
        kv_heads = 1 if module.multi_query else heads
    given: dict[str, Any] = {"scaling": module.inv_norm_factor}
    if config.alibi:
        # transformers rounds slopes to bfloat16, and adds the biases before it scales
        given["alibi_slopes"] = _slopes(module) * module.inv_norm_factor

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
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if position_embeddings is not None and alibi is None:
            q, k = _beside(module, "apply_rotary_pos_emb")(q, k, *position_embeddings)
        else:
            attention_mask = None  # causal, with the biases in it
        context = attend(module, config, q, k, v, attention_mask, **given)
        return module.dense(context.flatten(2)), None

    module.forward = forward


def _mpt(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    bias = _beside(module, "build_mpt_alibi_tensor")(module.n_heads, 2)
    given = {"scaling": module.softmax_scale, "alibi_slopes": -bias[:, 0, 0]}

    def forward(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        heads = fused.view(1, -1, 3, module.n_heads, module.head_dim).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in heads)
        # The model casts its mask, which is always causal, to bool
        context = attend(module, config, q, k, v, None, **given)
        return module.out_proj(context.flatten(2)), None

    module.forward = forward


def _mpt_model(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """Hand the model a mask: it casts what it makes without asking whether there is one."""
    # transformers would warn at each switch that it found no model of `attn_config`
    config.sub_configs = {}

    def with_mask(_: object, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        return args, {**kwargs, "attention_mask": torch.zeros((1, 1, 1, 1), dtype=torch.bool)}

    module.register_forward_pre_hook(with_mask, with_kwargs=True)


def _t5(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A decoder's module. The first hands its table on, in place of the biases of all positions."""
    if not module.is_decoder:  # an encoder's own code runs one request at a time
        return
    own = _relative_bias(module)

    def forward(
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        table = own if position_bias is None else position_bias
        source = hidden_states if key_value_states is None else key_value_states
        return _t5_attention(module, config, hidden_states, source, mask, table), table, None

    module.forward = forward


def _umt5(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A decoder's module. Each self-attention has a table of its own."""
    if not module.is_decoder:
        return
    table = _relative_bias(module)

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: object = None,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return _t5_attention(module, config, hidden_states, source, attention_mask, table), None

    module.forward = forward


def _t5_attention(
    module: Any,  # noqa: ANN401
    config: PreTrainedConfig,
    hidden_states: torch.Tensor,
    source: torch.Tensor,
    mask: torch.Tensor | None,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """The module's output [1, T, d_model]. source: the states of the keys."""
    heads = (1, -1, module.n_heads, module.key_value_proj_dim)
    projected = module.q(hidden_states), module.k(source), module.v(source)
    q, k, v = (each.view(heads).transpose(1, 2) for each in projected)
    given = {"scaling": 1.0, "relative_bias": table}
    context: torch.Tensor = module.o(attend(module, config, q, k, v, mask, **given).flatten(2))
    return context


@torch.no_grad()
def _relative_bias(module: Any) -> torch.Tensor | None:  # noqa: ANN401
    """The table of a causal layer, as `LayerSpec.relative_bias`; None where the module has none.

    From `relative_attention_max_distance` on, all distances are in the last bucket.
    """
    if not module.has_relative_attention_bias:
        return None
    # Fewer places than buckets would leave some that are not for one distance
    reach = max(module.relative_attention_max_distance, module.relative_attention_num_buckets)
    of_last: torch.Tensor = module.compute_bias(reach + 1, reach + 1)[0, :, -1]
    return of_last.contiguous()


def _between(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A module with a function of its own between the rotated queries and keys and the context."""
    given: dict[str, Any] = {}
    is_local = False
    if type(module).__name__ == "GPTNeoSelfAttention":
        module.layer_idx = module.layer_id
        is_local = module.attention_type == "local"
        given = {"scaling": 1.0, "sliding_window": config.window_size if is_local else None}

    def attention(
        query: Heads, key: Heads, value: Heads, attention_mask: torch.Tensor | None = None
    ) -> tuple[Heads, None]:
        # The mask of a local layer is without the window, which the module adds itself
        mask = None if is_local else attention_mask
        return attend(module, config, query, key, value, mask, **given).transpose(1, 2), None

    module._attn = attention


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
    found: Callable[..., Any] = pkgutil.resolve_name(f"{type(module).__module__}:{name}")
    return found


ADAPTERS: Mapping[str, Callable[[Any, PreTrainedConfig], None]] = MappingProxyType(
    {
        "BloomAttention": _bloom,
        "CodeGenAttention": _between,
        "FalconAttention": _falcon,
        "GPTJAttention": _between,
        "GPTNeoSelfAttention": _between,
        "GPTNeoXJapaneseAttention": _between,
        "LongT5Attention": _t5,
        "MT5Attention": _t5,
        "MptAttention": _mpt,
        "MptModel": _mpt_model,
        "Pop2PianoAttention": _t5,
        "T5Attention": _t5,
        "UMT5Attention": _umt5,
        "ZambaHybridLayer": _zamba,
    }
)
"""By the class of a module."""
