"""Facts that a config.json leaves to its model type: a table with a row for each family of types.

Sources: the config classes of transformers 5.24, which a test compares; for types that transformers
does not have, the code that is published with their checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Facts about the attention of some model types that their config.json does not state."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the class: a config.json may hold only those that differ, as Gemma 3's does."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The usual name of a value → the family's own; a dot leads into an object."""
    when: tuple[tuple[str, Any, Mapping[str, Any]], ...] = ()
    """(name, value, the values that it implies), for words that only this family has."""
    encoder: bool = False
    """Whether it encodes whole sequences, unless its config.json sets `is_decoder`."""
    unsayable: str = ""
    """Attention that a request cannot express."""
    relative_bias: bool = False
    """Whether logits have relative position biases. These are weights."""
    sinks: str = ""
    """The layers with sinks, "every" or "windowed". Sinks are weights."""
    recurrent: str = ""
    """The kind of its layers that config.json calls linear_attention, mamba or recurrent."""
    every_layer: str = ""
    """The kind of all layers, if config.json does not list them."""
    period: tuple[int, str, str] = (0, "", "")
    """If config.json does not list layers: the number of layers in a period, the kind of all except
    the last, which sees everything, and the name of the value that limits them."""
    windowed_kv_heads: int = 1
    """How many times the KV heads of other layers the windowed ones have by default."""


PLAIN = Family()
ALIBI = {"alibi": True}
MULTI_QUERY = {"multi_query": True}
LATER = "tokens that see later ones too"
WINDOWS = "windows in both directions"
DISTANCES = "relative position biases that depend on queries and keys"
IN_WINDOWS = "windows of an image's patches"

HEADS_32 = {"num_attention_heads": 32, "hidden_size": 4096}
QWEN = {"num_attention_heads": 32, "num_key_value_heads": 32, "use_sliding_window": False}
QWEN |= {"sliding_window": 4096, "max_window_layers": 28}
GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
GEMMA |= {"sliding_window": 4096}
MIMO = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MINICPM3 = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
BASE = {"num_attention_heads": 12, "hidden_size": 768}
T5 = {"num_heads": 6, "d_kv": 64, "is_encoder_decoder": True}

GPT2 = {"num_attention_heads": "n_head", "hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
BART = {"num_attention_heads": "decoder_attention_heads", "hidden_size": "d_model"}
T5_NAMES = {"num_attention_heads": "num_heads", "hidden_size": "d_model", "head_dim": "d_kv"}
MPT = {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"}
MPT |= {"num_key_value_heads": "attn_config.kv_n_heads"}
XLM = {"num_attention_heads": "n_heads", "hidden_size": "emb_dim"}
GROUPS = {"num_key_value_heads": "num_attention_groups"}

ROWS: tuple[tuple[str, Family], ...] = (
    # Decoders of plain attention
    ("llama", Family(defaults=HEADS_32)),
    ("qwen2", Family(defaults={**QWEN, "hidden_size": 4096})),
    ("qwen3", Family(defaults={**QWEN, "head_dim": 128})),
    ("mistral", Family(defaults={**HEADS_32, "num_key_value_heads": 8, "sliding_window": 4096})),
    ("gpt2 gptj codegen openai-gpt codeshell", Family(names=GPT2)),
    ("gpt_bigcode", Family(names=GPT2, defaults=MULTI_QUERY)),
    ("xglm", Family(names={"num_attention_heads": "attention_heads", "hidden_size": "d_model"})),
    ("falcon", Family(names={"num_key_value_heads": "num_kv_heads"}, defaults=MULTI_QUERY)),
    ("dbrx", Family(names=MPT)),
    ("jetmoe qwen", Family(names={"head_dim": "kv_channels"})),
    ("hunyuan", Family(names={"head_dim": "attention_head_dim"})),
    ("step3_text step3p5", Family(names=GROUPS)),
    ("exaone", Family(names={"num_hidden_layers": "num_layers"})),
    (
        "chatglm",
        Family(
            names={
                "head_dim": "kv_channels",
                "num_hidden_layers": "num_layers",
                "num_key_value_heads": "multi_query_group_num",
            },
            # Without groups, config.json still has their number
            when=(("multi_query_attention", False, {"num_key_value_heads": None}),),
        ),
    ),
    (
        "aquila arctic baichuan_m1 deepseek deepseek_vl_v2 grok-1 h2ovl_chat internlm internlm2 "
        "internlm3 internvl_chat kimi_vl mimo minicpm minicpmo minicpmv molmo nemotron-nas NVLM_D "
        "openelm orion ovis phi-msft phi3_v phi4mm plamo solar stablelm_epoch telechat xverse Yi "
        "bailing_moe bailing_moe_v2",
        PLAIN,
    ),
    # ALiBi
    (
        "bloom",
        Family(names={"num_attention_heads": "n_head", "hidden_size": "n_embed"}, defaults=ALIBI),
    ),
    (
        "mpt",
        Family(
            names=MPT,
            defaults=ALIBI,
            when=(
                ("attn_config.alibi", False, {"alibi": False}),
                ("attn_config.attn_type", "multiquery_attention", MULTI_QUERY),
            ),
        ),
    ),
    ("baichuan", Family(when=(("hidden_size", 5120, ALIBI),))),  # of 13B, not of 7B
    ("btlm jais", Family(names=GPT2, when=(("position_embedding_type", "alibi", ALIBI),))),
    # Windows and chunks
    (
        "gemma2",
        Family(
            defaults={**GEMMA, "attn_logit_softcapping": 50.0},
            period=(2, "sliding_attention", "sliding_window"),
        ),
    ),
    ("gemma3_text", Family(defaults=GEMMA, period=(6, "sliding_attention", "sliding_window"))),
    ("cohere2", Family(period=(4, "sliding_attention", "sliding_window"))),
    (
        "llama4_text",
        Family(
            defaults={
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_chunk_size": 8192,
            },
            period=(4, "chunked_attention", "attention_chunk_size"),
        ),
    ),
    (
        "gpt_neo",
        Family(
            names={
                "num_attention_heads": "num_heads",
                "num_hidden_layers": "num_layers",
                "sliding_window": "window_size",
            }
        ),
    ),
    # Sinks
    (
        "gpt_oss",
        Family(
            defaults={
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "sliding_window": 128,
            },
            sinks="every",
        ),
    ),
    ("flint granite_swa granitemoe_swa hy_v4 hy_v4_vl_text", Family(sinks="every")),
    ("mimo_v2_flash", Family(defaults=MIMO, sinks="windowed", windowed_kv_heads=2)),
    # One latent for K and V
    ("deepseek_v2", Family(defaults={**LATENT, "num_attention_heads": 32})),
    ("deepseek_v3 deepseek_v32 kimi_k2", Family(defaults={**LATENT, "num_attention_heads": 128})),
    ("sarvam_mla", Family(defaults={**LATENT, "num_attention_heads": 64})),
    ("minicpm3", Family(defaults=MINICPM3)),
    (
        "deepseek_v4",
        Family(
            defaults={
                "num_attention_heads": 64,
                "num_key_value_heads": 1,
                "head_dim": 512,
                "sliding_window": 128,
            },
            sinks="every",
        ),
    ),
    # Layers without softmax attention
    ("qwen3_next", Family(recurrent="gdn", defaults={"full_attention_interval": 4})),
    ("qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text lara_mini", Family(recurrent="gdn")),
    ("olmo_hybrid qwen4_exp qwen4_exp_text", Family(recurrent="gdn")),
    ("kimi_linear bailing_hybrid", Family(recurrent="kda")),
    ("minimax minimax_text_01 minimax_m1 bailing_moe_linear", Family(recurrent="lightning")),
    ("bamba nemotron_h granitemoehybrid", Family(recurrent="mamba2")),
    (
        "plamo2",
        Family(
            names={"head_dim": "hidden_size_per_head", "sliding_window": "attention_window_size"},
            recurrent="mamba2",
        ),
    ),
    ("falcon_h1", Family(recurrent="mamba2", every_layer="hybrid")),
    ("mamba2", Family(recurrent="mamba2", every_layer="mamba")),
    ("xlstm", Family(recurrent="mamba2", every_layer="recurrent")),
    ("rwkv", Family(every_layer="recurrent")),
    ("jamba", Family(recurrent="mamba1")),
    ("mamba falcon_mamba", Family(recurrent="mamba1", every_layer="mamba")),
    ("zamba", Family(names={"head_dim": "attention_head_dim"}, recurrent="mamba1")),
    ("zamba2", Family(names={"head_dim": "attention_head_dim"}, recurrent="mamba2")),
    (
        "recurrent_gemma",
        Family(names={"sliding_window": "attention_window_size"}, recurrent="mamba1"),
    ),
    ("zaya", Family(recurrent="conv")),
    # Decoders that see an encoder
    ("bart blenderbot m2m_100 marian mbart pegasus whisper", Family(names=BART)),
    ("t5", Family(names=T5_NAMES, defaults={**T5, "num_heads": 8}, relative_bias=True)),
    ("mt5 umt5", Family(names=T5_NAMES, defaults=T5, relative_bias=True)),
    (
        "switch_transformers",
        Family(names=T5_NAMES, defaults={**T5, "num_heads": 12}, relative_bias=True),
    ),
    ("idefics", Family(defaults={"cross_layer_interval": 1})),
    # Encoders
    (
        "bert roberta vit siglip_text_model siglip_vision_model clip_vision_model",
        Family(encoder=True, defaults=BASE),
    ),
    (
        "clip_text_model",
        Family(encoder=True, defaults={"num_attention_heads": 8, "hidden_size": 512}),
    ),
    (
        "distilbert",
        Family(encoder=True, names={"num_attention_heads": "n_heads", "hidden_size": "dim"}),
    ),
    ("nomic_bert", Family(encoder=True, names=GPT2)),
    ("flaubert", Family(encoder=True, names=XLM)),
    ("xlm", Family(encoder=True, names=XLM, when=(("causal", True, {"is_decoder": True}),))),
    ("mpnet", Family(encoder=True, relative_bias=True)),
    (
        "albert audio-spectrogram-transformer camembert clip data2vec-audio data2vec-text deit "
        "dinov2 dinov2_with_registers dinov3_vit electra ernie esm eurobert gte hubert ijepa "
        "jina_embeddings_v3 layoutlm megatron-bert new rembert roberta-prelayernorm roformer "
        "siglip siglip2 siglip2_text_model siglip2_vision_model unispeech vit_msn wav2vec2 "
        "xlm-roberta xlm-roberta-xl xmod yolos",
        Family(encoder=True),
    ),
    # Attention that no request expresses
    (
        "beit data2vec-vision layoutlmv3 wavlm wav2vec2-bert wav2vec2-conformer",
        Family(unsayable="relative position biases of its own, over whole sequences"),
    ),
    ("big_bird bigbird_pegasus", Family(unsayable="blocks of keys, some of them drawn at random")),
    ("blt", Family(unsayable="bytes that attend to patches, and patches to bytes")),
    ("cpmant xlnet", Family(unsayable=LATER)),
    ("deberta deberta-v2", Family(encoder=True, unsayable=DISTANCES)),
    ("doge", Family(unsayable="a bias for each key")),
    (
        "glm5_next glm5_next_text",
        Family(
            unsayable="a latent without rotary dims, of whose keys an indexer picks pools",
            recurrent="kda",
        ),
    ),
    (
        "inkling inkling_text inkling2 inkling2_text inkling2_loop inkling2_loop_text prophetnet",
        Family(unsayable="a bias by distance that depends on the query"),
    ),
    ("longformer", Family(unsayable=f"{WINDOWS} and tokens that all others see")),
    ("longt5", Family(unsayable="relative position biases and windows in both directions")),
    ("modernbert embedding_gemma2 embedding_gemma2_text", Family(encoder=True, unsayable=WINDOWS)),
    ("phi3small", Family(unsayable="blocks of keys that differ by head in every other layer")),
    ("phi4flash", Family(unsayable="differences of two softmaxes, and layers that share K and V")),
    ("reformer", Family(unsayable="keys that are hashed to a query's bucket")),
    ("swin swinv2 donut-swin", Family(unsayable=IN_WINDOWS)),
)
"""A row: model types, with spaces between them, and their common values."""


def _by_type(rows: Iterable[tuple[str, Family]]) -> Mapping[str, Family]:
    pairs = [(name, family) for names, family in rows for name in names.split()]
    by_type = dict(pairs)
    assert len(by_type) == len(pairs), "a model type in two rows"
    return by_type


FAMILIES = _by_type(ROWS)


def family_of(values: Mapping[str, Any]) -> Family:
    return FAMILIES.get(str(values.get("model_type")), PLAIN)
