"""Our reading of config.json agrees with the config classes of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnmux.configs import request_from_model
from attnmux.configs.families import FAMILIES, family_of
from attnmux.configs.values import DECODERS as NAMED_DECODERS
from attnmux.configs.values import OTHERS
from attnmux.core import InvalidInput

transformers = pytest.importorskip("transformers")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

DECODERS = sorted(
    {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
)
WINDOWS = {"sliding_attention", "hybrid_sliding"}
WINDOWS |= {"compressed_sparse_attention", "heavily_compressed_attention"}


def types_with(field: str) -> list[str]:
    """The model types of transformers that have the field in the table."""
    return sorted(
        name
        for name, family in FAMILIES.items()
        if getattr(family, field) and name in transformers.CONFIG_MAPPING
    )


NO_FIELD = {"alibi", "full_attention_interval"}
"""Values of the table that no class keeps."""
OTHER_CODE = {"nomic_bert"}
"""Model types whose published files have the names of code that came before transformers'."""


@pytest.mark.parametrize("model_type", types_with("defaults"))
def test_the_table_says_what_the_class_does(model_type) -> None:
    config, defaults = transformers.CONFIG_MAPPING[model_type](), FAMILIES[model_type].defaults
    for name, value in defaults.items():
        if name in NO_FIELD:
            continue
        said = getattr(config, name)
        if name == "sliding_window" and defaults.get("use_sliding_window") is False:
            assert said is None  # the class forgets a window that is switched off
        else:
            assert said == value, name


@pytest.mark.parametrize("model_type", types_with("names"))
def test_a_name_of_its_own_is_the_class_s(model_type) -> None:
    if model_type in OTHER_CODE:
        return
    config = transformers.CONFIG_MAPPING[model_type]()
    for name, own in FAMILIES[model_type].names.items():
        if "." in own:
            continue
        if own not in config.to_dict():  # a class may still read a name that it no longer writes
            assert getattr(transformers.CONFIG_MAPPING[model_type](**{own: 48}), name) == 48
            continue
        assert getattr(config, name, getattr(config, own)) == getattr(config, own)


def shape(config) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim) as the class says."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon" and config.multi_query:
        kv_heads = 1  # the class leaves it to the model
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def shapes(config) -> set[tuple[int, int, int]]:
    """The shapes of all layers, in a model whose layers differ."""
    types = config.layer_types
    more = family_of({"model_type": config.model_type}).windowed_kv_heads
    if more > 1:  # by the model's own code
        heads, kv_heads, dim = shape(config)
        return {(heads, kv_heads * (more if each in WINDOWS else 1), dim) for each in types}
    return {shape(config.per_layer_config[place]) for place in range(len(types))}


def window(config) -> int | None:
    names = family_of({"model_type": config.model_type}).names
    size = getattr(config, names.get("sliding_window", "sliding_window"), None)
    types = getattr(config, "layer_types", None)
    return size if types is None or WINDOWS & set(types) else None


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_config_is_read_as_its_class_says_or_refused(model_type, tmp_path) -> None:
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
    except Exception as error:  # the class's own checks raise types of several libraries
        pytest.skip(f"no default config: {error}")
    config.save_pretrained(tmp_path)
    try:
        request = request_from_model(tmp_path)
    except InvalidInput:
        return
    text = config.get_text_config(decoder=True)
    if request.other_layers:
        groups = request.groups()
        assert {(one.num_q_heads, one.num_kv_heads, one.head_dim) for one in groups} == shapes(text)
        windows = {each in WINDOWS for each in text.layer_types}
        assert {one.sliding_window is not None for one in groups} == windows
        assert {one.sliding_window or window(text) - 1 for one in groups} == {window(text) - 1}
        return
    if not request.latent:
        assert (request.num_q_heads, request.num_kv_heads, request.head_dim) == shape(text)
        v_head_dim = request.v_head_dim or request.head_dim
        assert v_head_dim == getattr(text, "v_head_dim", request.head_dim)
    assert (request.sliding_window or -1) + 1 == (window(text) or 0)
    assert request.attention_chunk == getattr(text, "attention_chunk_size", None)
    assert request.logit_cap == getattr(text, "attn_logit_softcapping", None)


@pytest.mark.transformers("5.23")  # earlier ones lack some of these
def test_every_model_type_is_listed() -> None:
    assert set(DECODERS) <= NAMED_DECODERS
    assert set(transformers.CONFIG_MAPPING) <= NAMED_DECODERS | OTHERS


def folder_of(model_type: str) -> str:
    return str(transformers.CONFIG_MAPPING[model_type].__module__).split(".")[2]


@pytest.mark.transformers("5.23")  # earlier ones lack some of these
def test_every_decoder_with_sinks_is_known() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if re.search(r"\bs_aux=", file.read_text(encoding="utf-8"))
    }
    known = {folder_of(name) for name in types_with("sinks")}
    assert found - {"openai_privacy_filter"} == known  # it has no decoder
