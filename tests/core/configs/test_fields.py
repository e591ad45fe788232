from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.configs import UnknownModel, request_from_model
from attnmux.core import InvalidInput, Request

DATA = Path(__file__).parents[1] / "data"

BF16 = {"dtype": "bfloat16"}
LATENT = {
    **BF16,
    "num_kv_heads": 1,
    "head_dim": 192,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
EXPECTED = {
    "llama-3.1-8b": {**BF16, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "qwen2.5-7b": {**BF16, "num_q_heads": 28, "num_kv_heads": 4, "head_dim": 128},
    "qwen3-0.6b": {**BF16, "num_q_heads": 16, "num_kv_heads": 8, "head_dim": 128},
    "mistral-7b-v0.1": {
        **BF16,
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "sliding_window": 4095,
    },
    "mistral-7b-v0.3": {**BF16, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "gemma-2-9b-it": {
        **BF16,
        "num_q_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 256,
        "sliding_window": 4095,
        "logit_cap": 50.0,
    },
    "gemma-3-4b-it": {
        **BF16,
        "num_q_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "sliding_window": 1023,
        "multimodal": True,
        "encoder_head_dim": 72,
    },
    "gemma-3-1b-it": {
        **BF16,
        "num_q_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "sliding_window": 511,
    },
    "gpt-oss-20b": {
        "num_q_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "sliding_window": 127,
        "sinks": True,
    },
    "deepseek-v2-lite": {**LATENT, "kind": "mla", "num_q_heads": 16},
    "deepseek-v3": {**LATENT, "kind": "mla", "num_q_heads": 128},
    "deepseek-v3.2-exp": {**LATENT, "kind": "nsa", "index_topk": 2048, "num_q_heads": 128},
    "qwen2.5-14b-1m": {
        **BF16,
        "kind": "dual_chunk",
        "num_q_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
    "whisper-large-v3": {
        "dtype": "float16",
        "num_q_heads": 20,
        "num_kv_heads": 20,
        "head_dim": 64,
        "cross_attention": True,
    },
    "llama-4-scout": {
        **BF16,
        "num_q_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
        "attention_chunk": 8192,
        "multimodal": True,
        "encoder_head_dim": 88,
    },
}


SMALL = {"num_attention_heads": 8, "hidden_size": 512}


def test_every_recorded_config_is_expected() -> None:
    assert {path.parent.name for path in DATA.glob("*/config.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_from_model(name) -> None:
    request = request_from_model(DATA / name)
    plain = Request(**EXPECTED[name]).to_dict()
    read = request.to_dict()
    origins = read.pop("origins")
    del plain["origins"]
    assert read == plain
    assert {origins[field] for field in EXPECTED[name]} == {"model"}
    assert request_from_model(DATA / name / "config.json") == request


def config(name: str) -> dict:
    return json.loads((DATA / name / "config.json").read_text())


def from_config(folder: Path, values: object) -> Request:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return request_from_model(folder, assume='"model_type"' not in json.dumps(values))


def test_dtype_has_an_older_name_and_may_be_absent(tmp_path) -> None:
    values = config("llama-3.1-8b")
    del values["torch_dtype"]
    assert from_config(tmp_path, values).dtype is None
    assert from_config(tmp_path, {**values, "dtype": "float16"}).dtype == "float16"
    silent = {**values, "dtype": None, "torch_dtype": "torch.bfloat16"}
    assert from_config(tmp_path, silent).dtype == "bfloat16"
    assert from_config(tmp_path, {**values, "dtype": "auto"}).dtype is None


@pytest.mark.parametrize(
    ("stated", "tensors", "dtype"),
    [
        ({}, {"a": "BF16", "b": "F32"}, "bfloat16"),
        ({}, {"a": "F8_E4M3", "b": "F16"}, "float16"),
        ({}, {"a": "I64"}, None),
        ({"dtype": None}, {"a": "BF16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, {"a": "F32"}, "float16"),
    ],
)
def test_a_dtype_that_is_not_stated_is_the_weights(tmp_path, stated, tensors, dtype) -> None:
    header = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": each, "shape": [0]} for name, each in tensors.items()}
    content = json.dumps(header).encode()
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    assert from_config(tmp_path, {**SMALL, "model_type": "llama", **stated}).dtype == dtype
    assert request_from_model(tmp_path / "config.json").dtype == dtype
    for wrong in (b"", b"\xff" * 9, (2).to_bytes(8, "little") + b"[]"):
        file.write_bytes(wrong)
        assert from_config(tmp_path, {**SMALL, "model_type": "llama"}).dtype is None


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}, 4095),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}, None),
        ({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 14}, None),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": True}, 131071),
        ({"layer_types": ["full_attention"], "use_sliding_window": True}, None),
    ],
)
def test_a_window_is_asked_where_a_layer_uses_it(tmp_path, changes, window) -> None:
    values = {**config("qwen2.5-7b"), **changes}
    assert from_config(tmp_path, values).sliding_window == window


def test_defaults_of_a_config_without_values(tmp_path) -> None:
    request = from_config(tmp_path, {"model_type": "qwen2"})
    assert (request.num_q_heads, request.head_dim, request.sliding_window) == (32, 128, None)
    request = from_config(tmp_path, {"model_type": "gemma2"})
    assert (request.sliding_window, request.logit_cap) == (4095, 50.0)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"head_dim": 192, "v_head_dim": 128}, {"head_dim": 192, "v_head_dim": 128}),
        ({"head_dim": 64, "v_head_dim": 64}, {"v_head_dim": None}),
        ({"multi_query": True}, {"num_kv_heads": 1}),
        (
            {"vision_config": {"hidden_size": 3584, "embed_dim": 1280, "num_heads": 16}},
            {"multimodal": True, "encoder_head_dim": 80},
        ),
        ({"vision_config": {"head_dim": 64}}, {"encoder_head_dim": 64}),
        ({"vision_config": {}}, {"multimodal": True, "encoder_head_dim": None}),
        # Of several stages, each with its own heads
        ({"vision_config": {"embed_dim": 96, "num_heads": [3, 6]}}, {"encoder_head_dim": None}),
        (
            {"multi_query": True, "new_decoder_architecture": True, "num_key_value_heads": 4},
            {"num_kv_heads": 4},
        ),
        ({"model_type": "falcon", "num_kv_heads": 8}, {"num_kv_heads": 1}),
        ({"model_type": "granite_swa"}, {"sinks": True}),
        ({"dual_chunk_attention_config": None}, {"kind": "mha"}),
        ({"cross_layer_interval": 4}, {"cross_attention": True}),
        (
            {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 128},
            {"sliding_window": 127},
        ),
        ({"layer_types": ["attention", "mamba", "mlp"]}, {"kind": "mha"}),
        ({"per_layer_config": {"1": {"intermediate_size": 4}}}, {"head_dim": 64}),
    ],
)
def test_other_values_of_heads_and_layers(tmp_path, changes, asked) -> None:
    request = from_config(tmp_path, {**SMALL, **changes})
    assert {name: getattr(request, name) for name in asked} == asked


HYBRIDS = {
    "qwen3-next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4},
        {"gdn": 36},
    ),
    "qwen3-next-by-default": (
        {"model_type": "qwen3_next", "num_hidden_layers": 8},
        {"gdn": 6},
    ),
    "jamba": (
        {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4},
        {"mamba1": 28},
    ),
    "unnamed": ({"layer_types": [*["mamba"] * 9, "attention"] * 4}, {"mamba": 36}),
    "granite-4": (
        {"model_type": "granitemoehybrid", "layer_types": [*["mamba"] * 9, "attention"] * 4},
        {"mamba2": 36},
    ),
    "minimax-by-name": (
        {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]},
        {"lightning": 1},
    ),
    "lfm2": ({"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}, {"conv": 10}),
    "falcon-h1": ({"model_type": "falcon_h1", "num_hidden_layers": 24}, {"mamba2": 24}),
    "nemotron-h": ({"hybrid_override_pattern": "M-M-M*-ME"}, {"mamba2": 4}),
    "minimax": ({"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 2}, {"lightning": 14}),
    "kimi-linear": (
        {
            "num_hidden_layers": 8,
            "linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]},
        },
        {"kda": 6},
    ),
    "bamba": ({"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]}, {"mamba2": 29}),
    "zamba2": ({"layers_block_type": ["mamba", "mamba", "hybrid"]}, {"mamba": 3}),
    "recurrent-gemma": (
        {
            "model_type": "recurrent_gemma",
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_hidden_layers": 26,
            "attention_window_size": 2048,
        },
        {"mamba1": 18},
    ),
    "zaya": ({"model_type": "zaya", "layer_types": ["hybrid", "hybrid"]}, {"conv": 2}),
    "both": ({"layer_types": ["conv", "mamba", "full_attention", "moe"]}, {"conv": 1, "mamba": 1}),
    "dense": ({"layer_types": ["full_attention", "mlp"]}, {}),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_linear_layers_are_counted_by_kind(tmp_path, name) -> None:
    changes, counted = HYBRIDS[name]
    request = from_config(tmp_path, {**SMALL, **changes})
    assert dict(request.linear_layers) == counted
    assert (request.num_q_heads, request.head_dim) == (8, 64)
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    assert request.sliding_window == (2047 if name == "recurrent-gemma" else None)


SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
COMPRESSED = {
    "by types": ({"layer_types": ["sliding_attention", SPARSE, HEAVY]}, {SPARSE: 1, HEAVY: 1}),
    "by ratios": ({"compress_ratios": [0, 4, 4, 128]}, {SPARSE: 2}),  # the last one drafts
    "by its class": ({"num_hidden_layers": 5}, {SPARSE: 1, HEAVY: 4}),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_layers_with_keys_of_blocks_are_counted_by_kind(tmp_path, name) -> None:
    changes, counted = COMPRESSED[name]
    values = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "sliding_window": 16, **changes}
    request = from_config(tmp_path, values)
    assert dict(request.compressed_layers) == counted
    assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == (64, 1, 512)
    assert (request.sliding_window, request.lse) == (15, True)
    assert request.sinks == (name != "by its class")  # those of a layer without other keys
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request


def test_an_unknown_ratio_of_tokens_to_keys_is_refused(tmp_path) -> None:
    values = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [4, 7]}
    with pytest.raises(InvalidInput, match="compress_ratios 7"):
        from_config(tmp_path, values)


@settings(max_examples=60, deadline=None)
@given(
    types=st.lists(
        st.sampled_from(["full_attention", "attention", "mamba", "conv", "linear_attention", "mlp"])
    ),
    heads=st.sampled_from([4, 8, 16]),
    nested=st.booleans(),
)
def test_random_hybrids_are_counted_or_refused(tmp_path_factory, types, heads, nested) -> None:
    folder = tmp_path_factory.mktemp("model")
    values = {"num_attention_heads": heads, "hidden_size": 64 * heads, "layer_types": types}
    content = {"text_config": values} if nested else values
    if types and not {"full_attention", "attention"} & set(types):
        with pytest.raises(InvalidInput, match="no attention"):
            from_config(folder, content)
        return
    counts = Counter(each for each in types if each in ("mamba", "conv", "linear_attention"))
    assert dict(from_config(folder, content).linear_layers) == counts


@pytest.mark.parametrize(
    ("stated", "dims"),
    [
        ({"linear_key_head_dim": 128, "linear_value_head_dim": 128}, (128, None)),
        ({"linear_key_head_dim": 96, "linear_value_head_dim": 192}, (96, 192)),
        ({"linear_attn_config": {"head_dim": 64, "full_attn_layers": [1]}}, (64, None)),
        ({"mamba_d_state": 256, "mamba_d_head": 64}, (256, 64)),
        ({"mamba_d_state": 256, "mamba_d_head": "auto"}, (256, None)),
        ({}, (None, None)),
    ],
)
def test_the_dims_of_recurrent_states_are_read(tmp_path, stated, dims) -> None:
    changes = {"layer_types": ["mamba", "full_attention"], **stated}
    request = from_config(tmp_path, {**SMALL, **changes})
    assert (request.linear_head_dim, request.linear_v_head_dim) == dims
    dense = from_config(tmp_path, {**SMALL, **stated, "layer_types": ["full_attention"]})
    assert dense.linear_head_dim is None


def test_linear_layers_are_read_from_text() -> None:
    request = Request.parse("linear_layers=mamba:36+conv:2")
    assert request.linear_layers == (("conv", 2), ("mamba", 36))
    assert Request.parse("linear_layers=none").linear_layers == ()
    assert Request(linear_layers={"conv": 2}).linear_layers == (("conv", 2),)
    for wrong in ("mamba", "mamba:x", "mamba:1:2"):
        with pytest.raises(InvalidInput, match="linear_layers"):
            Request.parse(f"linear_layers={wrong}")


TOWER = {"num_attention_heads": 12, "hidden_size": 768}


@pytest.mark.parametrize(
    ("content", "head_dim"),
    [
        ({"model_type": "bert"}, 64),
        ({"model_type": "roberta", "num_attention_heads": 16, "hidden_size": 512}, 32),
        ({"model_type": "distilbert", "n_heads": 12, "dim": 768}, 64),
        ({"model_type": "siglip_vision_model", **TOWER}, 64),
        ({"model_type": "clip", "text_config": {}, "vision_config": TOWER}, None),
        (
            {
                "model_type": "clip",
                "text_config": {"model_type": "clip_text_model"},
                "vision_config": TOWER,
            },
            64,
        ),
    ],
)
def test_encoders_ask_for_the_encoder_phase(tmp_path, content, head_dim) -> None:
    if head_dim is None:
        with pytest.raises(InvalidInput, match="without num_attention_heads"):
            from_config(tmp_path, content)
        return
    request = from_config(tmp_path, content)
    assert (request.phases, request.encoder_head_dim) == (("encoder",), head_dim)


def test_a_bert_that_decodes_asks_for_decode(tmp_path) -> None:
    request = from_config(tmp_path, {"model_type": "bert", "is_decoder": True})
    assert request.phases == ("extend", "decode")


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"), [(1, 32, 8), (4, 8, 2), (8, 4, 1), (16, 2, 1), (32, 1, 1)]
)
def test_tp_divides_the_heads_and_replicates_kv_heads(tp, heads, kv_heads) -> None:
    request = request_from_model(DATA / "llama-3.1-8b", tp=tp)
    assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == (heads, kv_heads, 128)


def test_tp_leaves_the_latent_whole() -> None:
    request = request_from_model(DATA / "deepseek-v3", tp=8)
    assert (request.num_q_heads, request.num_kv_heads) == (16, 1)


@pytest.mark.parametrize(
    ("name", "tp"), [("llama-3.1-8b", 3), ("qwen2.5-7b", 8), ("qwen2.5-7b", 14)]
)
def test_tp_must_divide(name, tp) -> None:
    with pytest.raises(InvalidInput, match=r"^tp: expected a divisor"):
        request_from_model(DATA / name, tp=tp)


BLOOM = {"model_type": "bloom", "n_head": 16, "hidden_size": 1024}
MPT = {"model_type": "mpt", "n_heads": 32, "d_model": 4096}
FALCON = {"model_type": "falcon", **SMALL}


@pytest.mark.parametrize(
    ("content", "heads", "has_alibi"),
    [
        (BLOOM, (16, 16, 64), True),
        ({"model_type": "bloom", "n_head": 112, "n_embed": 14336}, (112, 112, 128), True),
        (MPT, (32, 32, 128), True),
        ({**MPT, "attn_config": {"alibi": True}}, (32, 32, 128), True),
        ({**MPT, "attn_config": {"alibi": False}}, (32, 32, 128), False),
        ({**FALCON, "alibi": True, "multi_query": False}, None, True),
        ({**FALCON, "alibi": False}, None, False),
        ({**SMALL, "alibi": True}, None, True),
        (SMALL, None, False),
    ],
)
def test_models_with_a_bias_by_distance(tmp_path, content, heads, has_alibi) -> None:
    request = from_config(tmp_path, content)
    assert request.alibi is has_alibi
    assert request.origins.get("alibi") == ("model" if has_alibi else None)
    if heads is not None:
        assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == heads


T5_SMALL = {"model_type": "t5", "num_heads": 8, "d_model": 512, "d_kv": 64}
MPNET = {"model_type": "mpnet", "num_attention_heads": 12, "hidden_size": 768}


@pytest.mark.parametrize(
    ("content", "heads", "cross_attention"),
    [
        ({**T5_SMALL, "is_encoder_decoder": True}, (8, 8, 64), True),
        ({**T5_SMALL, "num_heads": 128, "d_kv": 128}, (128, 128, 128), True),
        ({"model_type": "t5"}, (8, 8, 64), True),
        ({"model_type": "mt5", "num_heads": 12}, (12, 12, 64), True),
        ({"model_type": "umt5", "d_model": 512}, (6, 6, 64), True),
        ({"model_type": "switch_transformers"}, (12, 12, 64), True),
        (MPNET, (12, 12, 64), False),
    ],
)
def test_models_with_relative_position_biases(tmp_path, content, heads, cross_attention) -> None:
    request = from_config(tmp_path, content)
    assert request.relative_bias
    assert request.origins["relative_bias"] == "model"
    assert request.cross_attention is cross_attention
    assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == heads
    assert request.phases == (("extend", "decode") if cross_attention else ("encoder",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "which is not JSON"),
        ("[]", "which is not a JSON object"),
        ({"model_type": "llama", "num_attention_heads": 0}, "num_attention_heads=0"),
        ({"model_type": "longt5", "num_heads": 8}, "longt5, whose attention has relative"),
        ({"model_type": "deberta-v2", **SMALL}, "deberta-v2, whose attention has relative"),
        ({"model_type": "bloom", "n_head": 8}, "bloom without hidden_size"),
        ({"model_type": "mpt", "n_heads": 8}, "mpt without hidden_size"),
        (
            {"model_type": "mpt", "d_model": 64, "attn_config": {"alibi": False}},
            "mpt without num_attention_heads",
        ),
        ({"model_type": "modernbert", **SMALL}, "windows in both directions"),
        ({"model_type": "mamba", "num_hidden_layers": 64}, "64 mamba1 layers and no attention"),
        ({"model_type": "rwkv", "n_layer": 12}, "12 recurrent layers and no attention"),
        ({**SMALL, "attn_layer_period": 8}, "num_hidden_layers=None"),
        ({**SMALL, "attn_layer_period": 8, "num_hidden_layers": 10**12}, "10,000 at most"),
        ({**SMALL, "hybrid_override_pattern": "M?*"}, "layer_types ?"),
        (
            {
                **{"model_type": "clip", "text_config": {"model_type": "clip_text_model"}},
                "vision_config": {"num_attention_heads": 16, "hidden_size": 1280},
            },
            "towers with head_dim 64 and 80",
        ),
        ({**SMALL, "swa_head_dim": 32}, "layers that differ in head_dim"),
        (
            {**SMALL, "num_key_value_heads": [4, 8], "layer_types": ["attention"]},
            "layers that differ in num_key_value_heads",
        ),
        (
            {**SMALL, "attention_other_setting": {"num_attention_heads": 96}},
            "layers that differ in num_attention_heads",
        ),
        ({"num_attention_heads": "many", "hidden_size": 8}, "a positive num_attention_heads"),
        ({"num_attention_heads": 4}, "a positive hidden_size"),
        ({"model_type": "llama", "torch_dtype": "complex64"}, "dtype: expected one of"),
        ("[" * 100_000, "which is not JSON"),
        ({**SMALL, "num_key_value_heads": 3}, "8 heads over 3 KV heads"),
        ({**SMALL, "hidden_size": 7}, "hidden_size=7 for 8 heads"),
        ({**SMALL, "num_attention_heads": [8, 8]}, "num_attention_heads=[8, 8]"),
        ({**SMALL, "sliding_window": [4096]}, "sliding_window=[4096]"),
        ({**SMALL, "sliding_window": 4096.0}, "sliding_window=4096.0"),
        ({**SMALL, "sliding_window": -1}, "sliding_window=-1"),
        ({**SMALL, "layer_types": 3}, "layer_types=3"),
        ({**SMALL, "attention_chunk_size": "all"}, "attention_chunk_size='all'"),
        ({**SMALL, "layer_types": ["minimax_m3_sparse"]}, "a positive sparse_topk_blocks"),
        ({**SMALL, "layer_types": ["indexed_attention"]}, "layer_types indexed_attention"),
        (
            {**SMALL, "layer_types": ["full_attention"], "indexer_budget": 64},
            "a positive indexer_compress_ratio",
        ),
        ({**SMALL, "layer_types": [["full_attention"]]}, "layer_types=[['full_attention']]"),
        ({**SMALL, "layer_types": ["sliding_attention"]}, "a positive sliding_window"),
        ({**SMALL, "layer_types": ["chunked_attention"]}, "a positive attention_chunk_size"),
        ({**SMALL, "index_topk": 512}, "index_topk without kv_lora_rank"),
        ({"model_type": "bert", **SMALL, "alibi": True}, "an encoder with a bias by distance"),
        ({**SMALL, "vision_config": {"head_dim": "wide"}}, "head_dim='wide' in the vision_config"),
        ({**SMALL, "vision_config": {"head_dim": [64]}}, "head_dim=[64] in the vision_config"),
        ({**SMALL, "vision_config": {"head_dim": 72.5}}, "head_dim=72.5 in the vision_config"),
        ({**SMALL, "head_dim": 64, "global_head_dim": 512}, "layers that differ in head_dim"),
        (
            {**SMALL, "per_layer_config": {"03": {"num_key_value_heads": 2}}},
            "layers that differ in num_key_value_heads",
        ),
    ],
)
def test_unusable_configs(tmp_path, content, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_config(tmp_path, content)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


GEMMA4 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
SHAPED = {
    "openelm": (
        {"num_query_heads": [12, 12, 16], "num_kv_heads": [3, 3, 4], "head_dim": 64},
        (12, 3, 64, None, False),
        [(1, 16, 4, 64, None, False)],
    ),
    "nemotron-nas": (
        {**SMALL, "block_configs": [{"attention": {"n_heads_in_group": n}} for n in (4, None, 8)]},
        (8, 2, 64, None, False),
        [(1, 8, 1, 64, None, False)],
    ),
    "step3p5": (
        {
            **{"num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 512,
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
        },
        (64, 8, 128, None, False),
        [(2, 96, 8, 128, 511, False)],
    ),
    "gemma4_text": (
        {
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            **GEMMA4,
            **{"sliding_window": 512, "attention_k_eq_v": True},
            **{"global_head_dim": 512, "num_global_key_value_heads": 2},
        },
        (8, 4, 256, 511, False),
        [(1, 8, 2, 512, None, False)],
    ),
    "gemma4_text with layers stated": (
        {
            **GEMMA4,
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"],
            **{"sliding_window": 512, "per_layer_config": {"01": {"head_dim": 512}}},
        },
        (8, 4, 256, 511, False),
        [(1, 8, 4, 512, None, False)],
    ),
    "mimo_v2_flash": (
        {"layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 128},
        (64, 4, 192, None, False),
        [(3, 64, 8, 192, 127, True)],
    ),
}
"""By model type: a config.json, the heads, dims and window of the first layers and whether they
have sinks, and those of the others after their number."""


@pytest.mark.parametrize("name", SHAPED)
def test_layers_that_differ(tmp_path, name) -> None:
    content, first, others = SHAPED[name]
    request = from_config(tmp_path, {"model_type": name, **content})

    def stated(each) -> tuple:
        heads = each.num_q_heads, each.num_kv_heads, each.head_dim
        return (*heads, each.sliding_window, each.sinks)

    assert stated(request) == first
    assert [(each.layers, *stated(each)) for each in request.other_layers] == others
    assert [stated(each) for each in request.groups()] == [
        first,
        *(one[1:] for one in others),
    ]
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "mystery"}, "unknown model type mystery: read as causal MHA"),
        ({"text_config": {"model_type": "mystery"}}, "unknown model type mystery: read as causal"),
        ({"model_type": "swin2sr"}, "swin2sr, which is no decoder: read as plain attention over"),
        ({}, "no model_type: read as causal MHA"),
    ],
)
def test_an_unknown_model_type_is_assumed_only_if_asked(tmp_path, content, said) -> None:
    inner = content.get("text_config", content)
    (tmp_path / "config.json").write_text(
        json.dumps({**content, **SMALL, "text_config": inner | SMALL})
    )
    with pytest.raises(UnknownModel, match=said) as caught:
        request_from_model(tmp_path)
    assert str(caught.value).endswith("only with --assume (in Python: assume=True)")
    request = request_from_model(tmp_path, assume=True)
    assert (request.num_q_heads, request.head_dim) == (8, 64)
    assert request.phases == (("encoder",) if "swin" in said else ("extend", "decode"))


def test_paths_that_are_no_model(tmp_path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        request_from_model(tmp_path / "absent")
    with pytest.raises(InvalidInput, match=r"has no config\.json"):
        request_from_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"the base model.*holds an adapter"):
        request_from_model(tmp_path)


QUARK = {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}


@pytest.mark.parametrize(
    ("quantisation", "kv_dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "fp4_e2m1"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, None),
        ({"export": {"kv_cache_group": ["*k_proj"]}, "layer_quant_config": QUARK}, "fp8_e4m3"),
        ({"export": {"kv_cache_group": []}, "layer_quant_config": QUARK}, None),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_the_kv_dtype_is_the_checkpoint_s(tmp_path, quantisation, kv_dtype) -> None:
    values = {**SMALL, "model_type": "llama", **BF16}
    request = from_config(tmp_path, {**values, "quantization_config": quantisation})
    assert request.kv_dtype == kv_dtype
    assert request.origins.get("kv_dtype") == (kv_dtype and "model")
    named = request_from_model(tmp_path, kv_dtype="bfloat16")
    assert (named.kv_dtype, named.origins["kv_dtype"]) == ("bfloat16", "user")


def test_modelopt_has_a_file_of_its_own(tmp_path) -> None:
    said = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert from_config(tmp_path, {**SMALL, "model_type": "llama"}).kv_dtype == "fp8_e4m3"
    (tmp_path / "hf_quant_config.json").write_text("[]")
    assert from_config(tmp_path, {**SMALL, "model_type": "llama"}).kv_dtype is None


def test_a_kv_scheme_that_no_cache_has(tmp_path) -> None:
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}
    values = {**SMALL, "model_type": "llama", **scheme}
    with pytest.raises(InvalidInput, match=r"kv_dtype: .*or state kv_dtype, got .* int8"):
        from_config(tmp_path, values)
    assert request_from_model(tmp_path, kv_dtype="bf16").kv_dtype == "bfloat16"


LATENT_HEADS = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def test_layers_whose_indexer_picks_blocks(tmp_path) -> None:
    """By MiniMax-M3's own names, and by those of transformers."""
    own = {
        "sparse_attention_freq": [0, 1, 1],
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
    }
    ours = {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_topk_blocks": 16,
        "index_block_size": 128,
    }
    for content in ({"sparse_attention_config": own}, ours):
        request = from_config(tmp_path, {**SMALL, **content})
        assert (request.kind, request.index_topk, request.index_block_size) == ("mha", 16, 128)
        assert request.index_reach == 2048
    in_keys = {"indexer_budget": 2048, "indexer_compress_ratio": 128}
    for kind in ("full_attention", "indexed_attention"):
        request = from_config(tmp_path, {**SMALL, **in_keys, "layer_types": [kind] * 2})
        assert (request.kind, request.index_topk, request.index_block_size) == ("mha", 16, 128)
    dense = from_config(tmp_path, {**SMALL, **ours, "layer_types": ["full_attention"] * 3})
    assert dense.index_topk is None
    with pytest.raises(InvalidInput, match="layer_types minimax_m3_sparse"):
        from_config(tmp_path, {**SMALL, **LATENT_HEADS, **ours})
