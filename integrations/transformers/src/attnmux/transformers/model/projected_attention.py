"""Attention of modules that project Q, K and V by linear layers and compute the rest themselves.

Whole families have copies of one such module. Its forward here projects alike and asks
AttentionInterface for the rest. An argument that attention cannot express is refused there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Heads = torch.Tensor
"""[1, H, T, D]"""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """How a family calls the parts of a module."""

    q: str
    k: str
    v: str
    out: str
    heads: str
    head_dim: str

    def attend(
        self,
        module: Any,  # noqa: ANN401
        config: PreTrainedConfig,
        states: torch.Tensor,
        source: torch.Tensor | None,
        mask: torch.Tensor | None,
        **given: object,
    ) -> torch.Tensor:
        """The module's output [1, T, d_model] of states [1, T, C]. source: the states of the keys;
        None: the same."""
        source = states if source is None else source
        shape = (1, -1, getattr(module, self.heads), getattr(module, self.head_dim))
        projected = ((self.q, states), (self.k, source), (self.v, source))
        q, k, v = (getattr(module, name)(x).view(shape).transpose(1, 2) for name, x in projected)
        context = attend(module, config, q, k, v, mask, **given).flatten(2)
        out: torch.Tensor = getattr(module, self.out)(context)
        return out


BART = Names(
    q="q_proj", k="k_proj", v="v_proj", out="out_proj", heads="num_heads", head_dim="head_dim"
)
T5 = Names(q="q", k="k", v="v", out="o", heads="n_heads", head_dim="key_value_proj_dim")
XLM = Names(q="q_lin", k="k_lin", v="v_lin", out="out_lin", heads="n_heads", head_dim="head_dim")


def bart(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A decoder's module; an encoder runs its own code."""
    if not module.is_decoder:
        return

    def forward(
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **given: object,
    ) -> tuple[torch.Tensor, None]:
        source, mask = key_value_states, attention_mask
        return BART.attend(module, config, hidden_states, source, mask, **given), None

    module.forward = forward


def led(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """Like BART's, but for one result more."""
    bart(module, config)
    forward = module.forward
    module.forward = lambda **given: (*forward(**given), None)


def fsmt(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """The decoder, whose attention has states [T, 1, C] and a class of too common a name."""
    for layer in module.layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            attention.forward = partial(_fsmt_attention, attention, config)


def _fsmt_attention(
    module: Any,  # noqa: ANN401
    config: PreTrainedConfig,
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    **given: object,
) -> tuple[torch.Tensor, None]:
    hidden_states, source = query.transpose(0, 1), key.transpose(0, 1)
    out = BART.attend(module, config, hidden_states, source, attn_mask, **given)
    return out.transpose(0, 1), None


def bert(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """RoFormer's has rotary embeddings, which turn V too if its config says so."""

    def forward(
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: None = None,
        sinusoidal_pos: torch.Tensor | None = None,
        **given: object,
    ) -> tuple[torch.Tensor, None]:
        heads = (1, -1, module.num_attention_heads, module.attention_head_size)
        projections = module.query, module.key, module.value
        q, k, v = (
            projection(hidden_states).view(heads).transpose(1, 2) for projection in projections
        )
        if sinusoidal_pos is not None:
            turned = (q, k, v) if module.rotary_value else (q, k)
            turned = module.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
            q, k, v = (*turned, v)[:3]
        context = attend(module, config, q, k, v, attention_mask, **given)
        return context.flatten(2), None

    module.forward = forward


def t5(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A decoder's module. The first hands its table on, in place of the biases of all positions."""
    if not module.is_decoder:
        return
    bias = _relative_bias(module)

    def forward(
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        table = bias if position_bias is None else position_bias
        given: dict[str, Any] = {"scaling": 1.0, "relative_bias": table}
        source = key_value_states
        return T5.attend(module, config, hidden_states, source, mask, **given), table, None

    module.forward = forward


def umt5(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A decoder's module. Each self-attention has a table of its own."""
    if not module.is_decoder:
        return
    given: dict[str, Any] = {"scaling": 1.0, "relative_bias": _relative_bias(module)}

    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: object = None,
        attention_mask: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        source, mask = encoder_hidden_states, attention_mask
        return T5.attend(module, config, hidden_states, source, mask, **given), None

    module.forward = forward


@torch.no_grad()
def _relative_bias(module: Any) -> torch.Tensor | None:  # noqa: ANN401
    """The table of a causal layer, as `LayerSpec.relative_bias`; None if the module has none.

    From `relative_attention_max_distance` on, all distances are in the last bucket.
    """
    if not module.has_relative_attention_bias:
        return None
    # Fewer places than buckets would leave some that are not for one distance
    reach = max(module.relative_attention_max_distance, module.relative_attention_num_buckets)
    of_last: torch.Tensor = module.compute_bias(reach + 1, reach + 1)[0, :, -1]
    return of_last.contiguous()


def xlm(module: Any, config: PreTrainedConfig) -> None:  # noqa: ANN401
    """A causal XLM, whose attention has a class of too common a name to be found by."""

    def counted(_: object, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        tokens = args[0] if args else kwargs["input_ids"]
        # Else it takes padding ids for the end of the row, wherever they are
        return args, {**kwargs, "attention_mask": torch.ones_like(tokens)}

    module.register_forward_pre_hook(counted, with_kwargs=True)
    for attention in module.attentions:
        attention.layer_idx = attention.layer_id
        attention.forward = partial(_xlm_attention, attention, config)


def _xlm_attention(
    module: Any,  # noqa: ANN401
    config: PreTrainedConfig,
    states: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor]:
    return (XLM.attend(module, config, states, None, None),)
