"""Small random configs of transformers' decoders, by rules over the names of their fields.

Rules know what a field such as `num_key_value_heads` or `sliding_window` means, in whichever
architecture it occurs. `OVERRIDES` holds the values of the few architectures that need others.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from tools.models.overrides import OVERRIDES

MAX_POSITIONS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """The sizes of one random model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    window: int
    experts: int
    rank: int
    rope_dim: int
    vocab: int

    @classmethod
    def drawn(cls, rng: random.Random, *, tied: bool, grouped: bool) -> Dims:
        """tied: the hidden size is that of all heads. grouped: heads may share K and V."""
        kv_heads, head_dim = rng.choice((1, 2, 3)), rng.choice((8, 16, 32))
        heads = max(2, kv_heads * rng.choice((1, 2, 4)))
        if not grouped:
            heads = kv_heads = rng.choice((2, 4))
        return cls(
            layers=3,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=heads * head_dim if tied else rng.choice((32, 48, 64)),
            inner=rng.choice((32, 48, 64)),
            window=rng.randint(4, 9),
            experts=rng.choice((4, 6)),
            rank=rng.choice((16, 24)),
            rope_dim=rng.choice((4, 8)),
            vocab=rng.choice((97, 128, 150)),
        )


VARIANTS = ({"tied": False, "grouped": True}, {"tied": True, "grouped": True}) + (
    {"tied": True, "grouped": False},
)
"""How dims are drawn, from the freest on: the first that an architecture accepts is taken."""

RULES: Mapping[str, Callable[[Dims], object]] = {
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
        "num_decoder_layers num_encoder_layers num_layers_per_stack max_window_layers".split(),
        lambda dims: dims.layers,
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads linear_num_heads".split(),
        lambda dims: dims.heads,
    ),
    **dict.fromkeys(
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups "
        "num_global_key_value_heads".split(),
        lambda dims: dims.kv_heads,
    ),
    **dict.fromkeys(
        "head_dim d_head dim_head kv_channels attention_head_dim attention_head_size swa_head_dim "
        "global_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim".split(),
        lambda dims: dims.head_dim,
    ),
    **dict.fromkeys(
        "hidden_size d_model n_embd emb_dim embedding_size embedding_dim input_embedding_size "
        "output_embedding_size word_embed_proj_dim".split(),
        lambda dims: dims.hidden,
    ),
    **dict.fromkeys(
        "intermediate_size n_inner d_inner ffn_dim d_ff dff dim_ff decoder_ffn_dim encoder_ffn_dim "
        "ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size "
        "expert_ffn_hidden_size".split(),
        lambda dims: dims.inner,
    ),
    **dict.fromkeys(
        "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size".split(),
        lambda dims: 16,
    ),
    **dict.fromkeys(
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
        "max_source_positions context_length model_max_length "
        "original_max_position_embeddings".split(),
        lambda dims: MAX_POSITIONS,
    ),
    **dict.fromkeys(
        "sliding_window window_size attention_window_size sliding_window_size local_attention "
        "attention_chunk_size keep_window_size".split(),
        lambda dims: dims.window,
    ),
    **dict.fromkeys(
        "num_experts num_local_experts n_routed_experts moe_num_experts".split(),
        lambda dims: dims.experts,
    ),
    **dict.fromkeys(
        "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts".split(),
        lambda dims: 2,
    ),
    **dict.fromkeys(
        "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group "
        "num_expert_group first_k_dense_replace num_dense_layers zero_expert_num".split(),
        lambda dims: 1,
    ),
    **dict.fromkeys(
        "kv_lora_rank q_lora_rank o_lora_rank laurel_rank hc_lowrank gated_norm_rank "
        "router_hidden_size".split(),
        lambda dims: dims.rank,
    ),
    **dict.fromkeys(
        "qk_rope_head_dim rotary_dim swa_rope_head_dim".split(), lambda dims: dims.rope_dim
    ),
    **dict.fromkeys("qk_nope_head_dim v_head_dim".split(), lambda dims: dims.head_dim),
    **dict.fromkeys("linear_num_key_heads n_mamba_heads".split(), lambda dims: 2),
    **dict.fromkeys("linear_num_value_heads".split(), lambda dims: 4),
    **dict.fromkeys(
        "mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size".split(),
        lambda dims: 16,
    ),
    "vocab_size": lambda dims: dims.vocab,
    "decoder_vocab_size": lambda dims: dims.vocab,
    "is_decoder": lambda dims: True,
    "attention_dropout": lambda dims: 0.0,
}
"""The value of a field, wherever it occurs with a value that is not None."""

OFTEN_NONE = frozenset({"num_key_value_heads", "num_kv_heads", "head_dim"})
"""Fields that get their value also where their default is None."""

ROPE_THETA = 10_000.0

TOWER: Mapping[str, object] = {
    **dict.fromkeys("hidden_size embed_dim output_dim out_hidden_size d_model".split(), 32),
    **dict.fromkeys("intermediate_size encoder_ffn_dim mlp_dim".split(), 32),
    **dict.fromkeys("num_hidden_layers depth encoder_layers num_blocks decoder_layers".split(), 1),
    **dict.fromkeys(
        "num_attention_heads num_heads encoder_attention_heads num_key_value_heads".split(), 2
    ),
    **dict.fromkeys("head_dim".split(), 16),
}
"""The same for the towers of images and sounds, which never run."""


def random_config(
    config_class: type[PreTrainedConfig], seed: int, variant: Mapping[str, bool]
) -> PreTrainedConfig:
    """A small config of a class. variant: one of VARIANTS.

    Raises whatever the class raises for dims that it does not accept.
    """
    rng = random.Random(f"{config_class.__name__} {seed}")
    dims = Dims.drawn(rng, **variant)
    given = _values(config_class, dims)
    return config_class(**{**given, **OVERRIDES.get(config_class.__name__, {})})


def _values(config_class: type[PreTrainedConfig], dims: Dims) -> dict[str, object]:
    default = _default(config_class)
    stated = {**vars(default)}
    layers = _num_layers(stated, config_class.attribute_map)
    kinds = [len(set(value)) for value in stated.values() if _one_each(value, layers)]
    dims = replace(dims, layers=max([dims.layers, *kinds]))
    given: dict[str, object] = {}
    for name, value in stated.items():
        if isinstance(value, PreTrainedConfig):
            given[name] = _nested(name, value, dims)
        elif name in RULES and (value is not None or name in OFTEN_NONE):
            given[name] = RULES[name](dims)
        elif name == "rope_parameters" and _lacks_theta(value):
            given[name] = {**value, "rope_theta": ROPE_THETA}
        elif name.endswith("token_id") and isinstance(value, int) and value >= dims.vocab:
            given[name] = dims.vocab - 1
        elif _one_each(value, layers):
            given[name] = list(_spread(value, dims.layers))
    _set_derived(given, stated)
    return given


def _lacks_theta(value: object) -> bool:
    return isinstance(value, dict) and value.get("rope_theta", 0) is None


def _default(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    try:
        return config_class()
    except Exception:  # validators raise errors of their own
        return config_class(**OVERRIDES.get(config_class.__name__, {}))


def _nested(name: str, value: PreTrainedConfig, dims: Dims) -> PreTrainedConfig:
    own: Any = type(value)
    if name in ("vision_config", "audio_config", "vq_config", "audio_encoder_config"):
        given = {key: TOWER[key] for key in vars(value) if key in TOWER}
    else:
        given = _values(own, dims)
    return own(**{**given, **OVERRIDES.get(own.__name__, {})})


def _num_layers(stated: Mapping[str, object], renamed: Mapping[str, str]) -> int:
    value = stated.get(renamed.get("num_hidden_layers", "num_hidden_layers"), 0)
    return value if isinstance(value, int) else 0


def _one_each(value: object, layers: int) -> bool:
    """Whether a field names a kind for each layer."""
    is_list = isinstance(value, list | tuple) and len(value) == layers > 1
    return is_list and all(isinstance(each, str) for each in value)  # type: ignore[attr-defined]  # a list


def _spread(value: list[str], layers: int) -> Iterator[str]:
    """All kinds of the list, in as many layers."""
    kinds = list(dict.fromkeys(value))
    return (kinds[index % len(kinds)] for index in range(layers))


def _set_derived(given: dict[str, Any], stated: Mapping[str, object]) -> None:
    """Dims of latent attention that a config may also compute from others."""
    rope_dim = given.get("qk_rope_head_dim")
    if rope_dim is None:
        return
    dims = {stated["qk_rope_head_dim"]: rope_dim}
    if "qk_nope_head_dim" in given:
        dims[stated.get("qk_head_dim", -1)] = rope_dim + given["qk_nope_head_dim"]
    for name in ("head_dim", "qk_head_dim"):
        given.pop(name, None)
        if stated.get(name) is not None and stated[name] in dims:
            given[name] = dims[stated[name]]
    if stated.get("num_key_value_heads") == stated.get("num_attention_heads"):
        given["num_key_value_heads"] = given["num_attention_heads"]
