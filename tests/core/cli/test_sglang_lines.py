"""The lines of `select --engine sglang`: what they carry, and what is refused."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnmux.configs import request_from_model
from attnmux.core import (
    InvalidInput,
    LayerGroup,
    Platform,
    Plugins,
    Policy,
    Request,
    solve,
)
from attnmux.core.cli.engines import FACTS
from attnmux.core.cli.verbs import verbs

asking = pytest.importorskip("attnmux.sglang.asking")
pytest.importorskip("attnmux.nvidia.plugin", reason="the decisions are about its cards")
pytest.importorskip("attnmux.triton.plugin", reason="as above")

MODELS = Path(__file__).parents[1] / "data"
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
SHAPE = Request.parse(
    "num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bfloat16,page_size=1", origin="model"
)
DRAFTS = {"spec_topk": 1, "spec_draft_tokens": 4}
SET = {
    "dtype": ({"dtype": "float16"}, "--dtype float16"),
    "kv_dtype": ({"kv_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
    "page_size": ({"page_size": 16}, "--page-size 16"),
    "phases": ({"phases": ("extend",)}, "--prefill-attention-backend attnmux"),
    "spec_topk": (
        {"spec_topk": 4, "spec_draft_tokens": 8},
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --speculative-num-steps 2",
    ),
    "spec_draft_tokens": (
        {"spec_topk": 1, "spec_draft_tokens": 6},
        "--speculative-num-draft-tokens 6 --speculative-num-steps 5",
    ),
    "speculative_attention_mode": (
        {**DRAFTS, "speculative_attention_mode": "decode"},
        "--speculative-attention-mode decode",
    ),
    "two_batches": ({"two_batches": True}, "--enable-two-batch-overlap"),
    "multi_item": ({"multi_item": True}, "--enable-mis"),
    "deterministic": ({"deterministic": True}, "--enable-deterministic-inference"),
}
"""Fields that are an option of SGLang: the request, and the words."""
REFUSED = {
    "sparse": "quest",
    "sparse_budget": 256,
    "max_error": 4.0,
    "parts": {"acme": 1},
    "chunked_prefix": True,
    "lse": True,
    "strided_kv": True,
    "custom_mask": True,
}
"""Fields that no option states."""
UNSERVED = {
    "kind": "nsa",
    "cross_attention": True,
    "alibi": True,
    "relative_bias": True,
    "index_block_size": 64,
    "other_layers": (LayerGroup(layers=2, num_q_heads=32, num_kv_heads=4, head_dim=256),),
    "compressed_layers": (("heavily_compressed_attention", 2),),
    "linear_layers": (("gdn", 2),),
}
"""Facts of models that the bridge refuses."""


def launched(request: Request, platform: Platform = HOPPER, *, tp: int = 1) -> str:
    decision = solve(asking.ask(request, platform), platform, Plugins.load().offers())
    return shlex.join(asking.launch(decision, "MODEL", tp=tp))


def test_every_field_of_a_request_is_on_the_line_or_refused_or_the_models() -> None:
    """Of facts, those that the bridge serves are read by SGLang from the model."""
    # SGLang captures wherever it can: see the tests below
    known = {*SET, *REFUSED, *FACTS, "graph", "origins"}
    assert {field.name for field in fields(Request)} == known
    assert set(UNSERVED) < set(FACTS)


@pytest.mark.parametrize("name", SET)
def test_an_option_is_on_the_line(name: str) -> None:
    given, words = SET[name]
    assert words not in launched(SHAPE)
    assert words in launched(SHAPE.replace(**given))


@pytest.mark.parametrize("name", REFUSED)
def test_a_demand_that_no_option_states_is_refused(name: str) -> None:
    also = {"sparse": {"sparse_budget": 256}, "sparse_budget": {"sparse": "quest"}}
    request = SHAPE.replace(page_size=16, **{name: REFUSED[name]}, **also.get(name, {}))
    with pytest.raises(InvalidInput, match="^(sparse|" + name + "): expected none"):
        asking.ask(request, HOPPER)


@pytest.mark.parametrize("name", UNSERVED)
def test_a_model_that_the_bridge_refuses_is_refused(name: str) -> None:
    also = {"index_block_size": {"index_topk": 8}, "kind": {"index_topk": 2048}}
    request = SHAPE.replace(origin="model", **{name: UNSERVED[name]}, **also.get(name, {}))
    with pytest.raises(InvalidInput, match=f"^{name}: expected .*: take another"):
        asking.ask(request, HOPPER)


def test_a_line_names_the_ranks_and_the_device() -> None:
    line = launched(SHAPE, tp=8)
    expected = "--attention-backend attnmux --page-size 1 --tp-size 8 --dtype bfloat16 "
    assert line == f"python -m sglang.launch_server --model-path MODEL {expected}" + (
        "--kv-cache-dtype bfloat16"
    )
    cpu = Platform.parse("cpu:x86_64,features=avx2")
    assert " --device cpu --attention-backend " in launched(SHAPE, cpu)


def test_steps_are_captured_where_a_backend_can_be() -> None:
    assert asking.ask(SHAPE, HOPPER).graph
    assert not asking.ask(SHAPE, Platform.parse("cpu:x86_64")).graph
    with pytest.raises(InvalidInput, match=r"^graph: expected none: SGLang captures no steps"):
        asking.ask(SHAPE.replace(graph=True), Platform.parse("cpu:x86_64"))
    policy, offers = Policy(backend="torch_native"), Plugins.load().offers()
    decision = solve(asking.ask(SHAPE, HOPPER), HOPPER, offers, policy)
    words = asking.launch(decision, "MODEL")
    assert "--disable-decode-cuda-graph" in words


def test_trees_are_drafted_by_a_backend_of_sglang_over_pages_of_one_token() -> None:
    request = SHAPE.replace(origin="model", page_size=None).replace(
        spec_topk=4, spec_draft_tokens=8
    )
    made = asking.ask(request, HOPPER)
    assert (made.page_size, made.custom_mask) == (1, True)
    assert "--speculative-draft-attention-backend triton" in launched(request)
    with pytest.raises(InvalidInput, match="page_size: expected 1 with draft trees"):
        asking.ask(request.replace(page_size=16), HOPPER)
    with pytest.raises(InvalidInput, match="spec_draft_tokens: expected 2 or more"):
        asking.ask(SHAPE.replace(spec_topk=1), HOPPER)


@pytest.mark.parametrize(
    ("platform", "kv_dtype", "word"),
    [
        ("nvidia:sm90", "fp8_e5m2", "fp8_e5m2"),
        ("nvidia:sm90", "fp8_e4m3fnuz", None),
        ("nvidia:sm90", "float16", None),
        # There, SGLang's word means another format
        ("amd:gfx942", "fp8_e4m3fnuz", "fp8_e4m3"),
        ("amd:gfx942", "fp8_e4m3", None),
        ("amd:gfx950", "fp8_e4m3", "fp8_e4m3"),
        ("amd:gfx950", "fp8_e5m2", None),
        ("cpu:x86_64", "fp8_e5m2", None),
        ("nvidia:sm100", "fp4_e2m1", None),
    ],
)
def test_kv_dtypes_are_those_that_sglang_stores_there(platform, kv_dtype, word) -> None:
    request, parsed = SHAPE.replace(kv_dtype=kv_dtype), Platform.parse(platform)
    if word is None:
        with pytest.raises(InvalidInput, match=r"^kv_dtype: expected"):
            asking.ask(request, parsed)
    else:
        made = asking.ask(request, parsed)
        assert asking._kv_words(made.kv_dtype, made.dtype, parsed) == ["--kv-cache-dtype", word]


def test_layers_that_keep_their_dtype_are_refused() -> None:
    model = MODELS / "llama-3.1-8b"
    request = request_from_model(model, kv_dtype="fp8_e4m3", kv_dtype_skip="0")
    with pytest.raises(InvalidInput, match=r"^other_layers: .* got 1 layer with 32/8 heads"):
        asking.ask(request, HOPPER)


def test_images_are_encoded_by_sglang() -> None:
    made = asking.ask(request_from_model(MODELS / "gemma-3-4b-it"), HOPPER)
    assert (made.phases, made.multimodal) == (("extend", "decode"), False)


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (
            ("--platform", "nvidia:sm90,cuda=13.0"),
            [
                "pip install 'sglang>=0.5.22' attnmux-sglang 'attnmux-nvidia[fa3]' 'attnmux-triton",
                "--kv-cache-dtype bfloat16",
            ],
        ),
        (
            ("--platform", "cpu:aarch64", "--backend", "torch_native"),
            ["pip install attnmux-sglang 'attnmux-cpu[torch]'", "ATTNMUX_BACKEND=torch_native"],
        ),
    ],
)
def test_the_verb_prints_the_lines(args, lines) -> None:
    model = ("--model", str(MODELS / "llama-3.1-8b"), "--engine", "sglang")
    result = CliRunner().invoke(verbs, ["select", *model, *args], prog_name="attnmux")
    assert result.exit_code == 0, result.output
    for line in lines:
        assert line in result.stdout
