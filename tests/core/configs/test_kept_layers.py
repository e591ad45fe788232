"""Layers that keep K and V in the model's dtype, by number, range and kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnmux.configs import request_from_model
from attnmux.configs.kept import kept_layers
from attnmux.core import InvalidInput, Request

DATA = Path(__file__).parents[1] / "data"
DTYPES = {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"}
FULL, WINDOW = "full_attention", "sliding_window"
KINDS = dict(enumerate([WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL, "attention_chunk"]))


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        ("0", {0}),
        ("0-2", {0, 1, 2}),
        (" 1 , 5-6", {1, 5, 6}),
        (WINDOW, {0, 1, 3, 4}),
        (f"0,{FULL},0", {0, 2, 5}),
        ("attention_chunk", {6}),
    ],
)
def test_numbers_ranges_and_kinds(skip, kept) -> None:
    assert kept_layers(skip, KINDS, **DTYPES) == kept


def test_a_range_leaves_out_layers_without_attention() -> None:
    kinds = {3: FULL, 7: FULL, 11: FULL}
    assert kept_layers("0-7", kinds, **DTYPES) == {3, 7}
    with pytest.raises(InvalidInput, match="from 3 to 11, or full_attention, got '4'"):
        kept_layers("4", kinds, **DTYPES)


@pytest.mark.parametrize("word", ["7", "0-7", "2-1", "-1", "", "0,", "window", "0 - 1", "1.0", "²"])
def test_words_that_name_no_layer(word) -> None:
    with pytest.raises(InvalidInput) as caught:
        kept_layers(word, KINDS, **DTYPES)
    assert caught.value.argument == "kv_dtype_skip"
    said = "numbers or ranges of attention layers from 0 to 6, or sliding_window or "
    assert caught.value.expected.startswith(said)


@pytest.mark.parametrize(
    ("skip", "kinds", "dtypes", "said"),
    [
        ("0-6", KINDS, {}, "expected a layer left for fp8_e4m3: name fewer, or leave kv_dtype"),
        ("0", KINDS, {"kv_dtype": None}, "got '0' with kv_dtype None"),
        ("0", KINDS, {"kv_dtype": "bfloat16"}, "that is not the model's, bfloat16"),
        ("0", KINDS, {"dtype": None}, "dtype: expected the model's dtype"),
        ("0", {0: "mla", 1: "mla"}, {}, "got mla layers"),
        ("0", {}, {}, "got a model that lists no layers"),
    ],
)
def test_what_cannot_be_skipped(skip, kinds, dtypes, said) -> None:
    with pytest.raises(InvalidInput, match=said):
        kept_layers(skip, kinds, **{**DTYPES, **dtypes})


def groups(request: Request) -> list[tuple[object, ...]]:
    """(layers, window, KV dtype) of the groups; the first has no count."""
    first = None, request.sliding_window, request.kv_dtype
    others = [(one.layers, one.sliding_window, one.kv_dtype) for one in request.other_layers]
    return [first, *others]


@pytest.mark.parametrize(
    ("model", "skip", "expected"),
    [
        ("llama-3.1-8b", "0,31", [(None, None, "fp8_e4m3"), (2, None, "bfloat16")]),
        ("gemma-3-1b-it", WINDOW, [(None, None, "fp8_e4m3"), (22, 511, "bfloat16")]),
        ("gemma-3-1b-it", FULL, [(None, 511, "fp8_e4m3"), (4, None, "bfloat16")]),
        ("gemma-2-9b-it", "1-3", [(None, 4095, "fp8_e4m3"), (3, 4095, "bfloat16")]),
        ("gpt-oss-20b", f"1,{WINDOW}", [(None, None, "fp8_e4m3"), (13, 127, "bfloat16")]),
        ("mistral-7b-v0.1", "0", [(None, 4095, "fp8_e4m3"), (1, 4095, "bfloat16")]),
        ("llama-4-scout", "attention_chunk", [(None, None, "fp8_e4m3"), (36, None, "bfloat16")]),
    ],
)
def test_groups_of_a_model(model, skip, expected) -> None:
    given = {"dtype": "bf16", "kv_dtype": "fp8_e4m3", "kv_dtype_skip": skip}
    request = request_from_model(DATA / model, **given)
    assert groups(request) == expected
    assert request.origins["kv_dtype"] == "user"
    assert Request.from_dict(json.loads(json.dumps(request.to_dict()))) == request


def test_the_layers_keep_the_dtype_that_the_user_gives_the_model() -> None:
    given = {"dtype": "fp16", "kv_dtype": "fp8_e4m3", "kv_dtype_skip": "0"}
    request = request_from_model(DATA / "llama-3.1-8b", **given)
    assert (request.dtype, request.other_layers[0].kv_dtype) == ("float16", "float16")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("deepseek-v3", "got mla layers"),
        ("deepseek-v3.2-exp", "got nsa layers"),
        ("qwen2.5-14b-1m", "got dual_chunk layers"),
        ("whisper-large-v3", "got layers of cross attention"),
    ],
)
def test_models_whose_layers_must_be_alike(model, said) -> None:
    with pytest.raises(InvalidInput, match=said):
        request_from_model(DATA / model, kv_dtype="fp8_e4m3", kv_dtype_skip="0")


def test_an_encoder_has_no_layers_to_skip(tmp_path) -> None:
    config = {"model_type": "bert", "num_attention_heads": 2, "hidden_size": 8, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(InvalidInput, match="got an encoder"):
        request_from_model(tmp_path, kv_dtype="fp8_e4m3", kv_dtype_skip="0")
