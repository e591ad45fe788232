from __future__ import annotations

import pickle

import pytest

from attnmux.core import InvalidInput, Request
from attnmux.core.facts.request import READERS
from attnmux.core.facts.values import ALIASES, DTYPES
from attnmux.parts import expanded_request


def test_each_field_has_its_reader() -> None:
    assert [*READERS, "origins"] == list(Request.__slots__)


def test_nothing_asked() -> None:
    request = Request()
    assert request.phases == ("extend", "decode")
    assert set(request.origins.values()) == {"default"}
    assert Request.parse("") == request


def test_parse() -> None:
    request = Request.parse(
        "kind=mla, page_size=64,dtype=bf16,kv_dtype=float8_e4m3fn,logit_cap=30,sinks=yes,lse=0"
    )
    assert (request.kind, request.page_size, request.latent) == ("mla", 64, True)
    assert (request.dtype, request.kv_dtype) == ("bfloat16", "fp8_e4m3")
    assert (request.logit_cap, request.sinks, request.lse) == (30.0, True, False)
    assert request.origins["page_size"] == "user"
    assert "lse" not in request.origins


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("", ("extend", "decode")),
        ("spec_topk=1", ("extend", "decode", "verify", "draft")),
        ("spec_topk=0", ("extend", "decode")),
        ("multimodal=true", ("extend", "decode", "encoder")),
        ("spec_topk=4,multimodal=1", ("extend", "decode", "verify", "draft", "encoder")),
        ("spec_topk=4,phases=decode+extend", ("extend", "decode")),
    ],
)
def test_phases_follow_from_the_request(text, phases) -> None:
    assert Request.parse(text).phases == phases


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"phases": 5}, "phases: expected some of extend, decode"),
        ({"phases": (5,)}, "phases: expected one of extend, decode"),
        ({"sliding_window": []}, "sliding_window: expected a positive integer"),
        ({"page_size": [16]}, "page_size: expected a positive integer"),
        ({"origins": ["user"]}, "origins: expected a mapping of fields"),
        ({"page_size": 1, "origins": {"page_size": "nobody"}}, "each with one of user, env"),
    ],
)
def test_a_value_of_another_type_is_refused(given, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Request(**given)
    assert said in str(caught.value)


def test_derived_phases_follow_a_change_and_given_ones_stay() -> None:
    assert "verify" in Request().replace(spec_topk=2).phases
    assert "verify" not in Request.parse("spec_topk=2").replace(spec_topk=None).phases
    assert Request(phases=("decode",)).replace(spec_topk=2).phases == ("decode",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind=gqa", "one of mha, mla"),
        ("page_size=-1", "a positive integer"),
        ("page_size=1.5", "a positive integer"),
        ("page_size=many", "a positive integer"),
        ("dtype=fp8", "one of bfloat16"),
        ("kv_dtype=int4", "kv_dtype: expected one of"),
        ("sinks=maybe", "true or false"),
        ("logit_cap=inf", "a positive number"),
        ("logit_cap=nan", "a positive number"),
        ("phases=extend+prefill", "one of extend, decode"),
        ("sliding_window=0", "w >= 1"),
        ("speculative_attention_mode=both", "one of prefill, decode"),
        ("page=16", "FIELD=VALUE"),
        ("page_size", "FIELD=VALUE"),
        ("page_size=1,page_size=2", "each field once"),
    ],
)
def test_parse_refuses(text, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Request.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, -3, "x", [1]])
def test_the_constructor_refuses_invalid_counts(value) -> None:
    with pytest.raises(InvalidInput, match="num_q_heads"):
        Request(num_q_heads=value)


def test_query_heads_are_a_multiple_of_the_kv_heads() -> None:
    with pytest.raises(InvalidInput, match="num_q_heads: expected a multiple of num_kv_heads, got"):
        Request.parse("num_q_heads=32,num_kv_heads=5")
    assert Request(num_q_heads=40, num_kv_heads=5).num_kv_heads == 5
    assert Request(num_kv_heads=5).num_q_heads is None


def test_the_contract_s_word_for_no_window() -> None:
    assert Request(sliding_window=-1).sliding_window is None
    assert Request.parse("sliding_window=-1") == Request()
    assert Request.parse("sliding_window=none").sliding_window is None


def test_replace_records_the_origin_of_each_change() -> None:
    request = Request.parse("page_size=16").replace(origin="config", kv_dtype="fp16")
    assert (request.origins["page_size"], request.origins["kv_dtype"]) == ("user", "config")
    assert "kv_dtype" not in request.replace(kv_dtype=None).origins
    with pytest.raises(InvalidInput, match="'pages'"):
        request.replace(pages=3)
    with pytest.raises(InvalidInput, match="origins"):
        request.replace(origin="fate", page_size=3)


@pytest.mark.parametrize(
    "text", ["", "spec_topk=4,sinks=true", "kind=mla,kv_lora_rank=512,phases=decode,logit_cap=1.5"]
)
def test_a_dict_and_a_pickle_give_it_back(text) -> None:
    request = Request.parse(text)
    assert Request.from_dict(request.to_dict()) == request
    assert pickle.loads(pickle.dumps(request)) == request
    assert hash(Request.parse(text)) == hash(request)


def test_a_field_from_the_future_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'tree_width'"):
        Request.from_dict({"tree_width": 3})


def test_expanded_is_the_same_model_as_mha() -> None:
    latent = Request.parse(
        "kind=mla,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,"
        "kv_lora_rank=512,qk_rope_head_dim=64"
    )
    request = expanded_request(latent)
    assert (request.kind, request.num_q_heads, request.num_kv_heads) == ("mha", 16, 16)
    assert (request.head_dim, request.v_head_dim, request.kv_lora_rank) == (192, 128, None)


def test_dtype_names() -> None:
    assert all(Request.canonical_dtype(name) == name for name in DTYPES)
    assert all(Request.canonical_dtype(alias) in DTYPES for alias in ALIASES)
    assert Request.canonical_dtype("torch.bfloat16") == "bfloat16"
