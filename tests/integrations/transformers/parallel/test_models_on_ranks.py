"""Models that are split over two ranks by more than one rule: the text is that of one rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import AttnmuxError, Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.distributed import RankGroup, RanksDiffer
from attnmux.emulators.ranks import run_ranks
from attnmux.transformers import (
    Engine,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.parallel.data_parallel import DataParallelRanks
from attnmux.transformers.parallel.ranks import InterleavedRanks, TensorParallelRanks

RANKS = 2
NEW_TOKENS = 8
BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"] * 2
MAKERS = {
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **BASE,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_hidden_layers=4,
        layer_types=KINDS,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
    ),
    "mimo": lambda: transformers.MiMoV2FlashConfig(
        **{**BASE, "num_key_value_heads": 1},
        head_dim=24,
        v_head_dim=16,
        num_hidden_layers=4,
        layer_types=KINDS,
        mlp_layer_types=["dense"] * 4,
    ),
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
TOPK = 12
INDEXED = {"index_topk": TOPK, "index_head_dim": 16, "index_n_heads": 32}
MAKERS["deepseek"] = lambda: transformers.DeepseekV32Config(
    **{**BASE, **LATENT, **INDEXED},
    num_hidden_layers=3,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
MAKERS["minimax"] = lambda: transformers.MiniMaxConfig(
    **{**BASE, "num_key_value_heads": 1},
    head_dim=16,
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    num_local_experts=2,
    block_size=8,
)
MAKERS["compressed"] = lambda: transformers.DeepseekV4Config(
    **{**BASE, "num_key_value_heads": 1},
    head_dim=16,
    partial_rotary_factor=0.5,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    mlp_layer_types=["moe"] * 2,
)
SHAPES = {"minimax": {(1, 16, 16)}, "gemma4": {(1, 16, 16), (1, 32, 32)}, "mimo": {(1, 24, 16)}}
"""KV heads of one rank, and dims of K and V."""


PICTURED = ("qwen2.5-vl", "gemma3-images", "llava")
IMAGE, BEGIN, END = 90, 92, 93
COMPRESSED = "ranks: expected 1: the rows for keys are not split, got 2"
REFUSED = {
    ("compressed", "tp"): COMPRESSED,
    ("compressed", "dp"): COMPRESSED,
    ("compressed", "dcp"): "dcp: expected a model whose heads are split",
    ("deepseek", "dcp"): "request: expected self attention of kind mha or mla",
    ("llava", "dcp"): "images: expected a model with a vision tower",
    ("llava", "dp"): "images: expected a model with a vision tower",
}
RANKS_OF = {
    "tp": TensorParallelRanks,
    "dcp": InterleavedRanks,
    "dp": lambda group, _: DataParallelRanks(group),
}


def asked_of(
    folder: Path, inputs: list[dict[str, torch.Tensor]], ranks: str = "tp"
) -> SimpleNamespace:
    """What the ranks run. inputs: of each prompt, as a processor makes them."""
    return SimpleNamespace(folder=folder, inputs=inputs, ranks=ranks)


def some_prompts(seed: int) -> list[dict[str, torch.Tensor]]:
    """Some begin alike."""
    rng = random.Random(seed)
    found = [[rng.randrange(97) for _ in range(length)] for length in (17, 1, 40, 9)]
    found += [[*found[0][:9], 5], [*found[2][:33], 7, 8]]
    return [{"input_ids": torch.tensor([ids])} for ids in found]


def some_pictures(name: str, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Prompts about an image each, and one of text alone."""
    draw = torch.Generator().manual_seed(seed)

    def text(num: int) -> list[int]:
        return torch.randint(1, 80, (num,), generator=draw).tolist()

    found = []
    for before, after in ((3, 5), (0, 9), (6, 2)):
        given = {"pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}
        if name == "qwen2.5-vl":
            given["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=draw)
            given["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        ids = torch.tensor([[*text(before), BEGIN, *[IMAGE] * 4, END, *text(after)]])
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        kinds = {"qwen2.5-vl": "mm_token_type_ids", "gemma3-images": "token_type_ids"}
        if name in kinds:
            given[kinds[name]] = (ids == IMAGE).int()
        found.append(given)
    return [*found, {"input_ids": torch.tensor([text(11)])}]


def runner_of(group: RankGroup, asked: SimpleNamespace) -> Any:
    checkpoint = open_checkpoint(asked.folder)
    names = ("torch_native", "torch_linear")
    offers = [one for one in Plugins.load().offers() if one.card.name in names]
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=64,
        max_total_tokens=256,
        page_size=4,
        images=any("pixel_values" in one for one in asked.inputs),
        ranks=RANKS_OF[asked.ranks](group, checkpoint.config),
    )
    return load_runner(checkpoint, probe_cpu(), offers, options)


def served(group: RankGroup, asked: SimpleNamespace) -> Any:
    """The text, and the shapes of the layers; an error of attnmux instead."""
    try:
        runner = runner_of(group, asked)
    except AttnmuxError as error:
        return str(error)
    prompts = []
    for one in asked.inputs:
        images = runner.read_images(one) if "pixel_values" in one else None
        ids = one["input_ids"][0].tolist()
        prompts.append(Prompt(token_ids=ids, max_new_tokens=NEW_TOKENS, images=images))
    engine = Engine(runner, prefill_tokens=7)
    results = run_prompts(engine, prompts).results
    layers = runner.context.layers
    shapes = {(each.tp_k_head_num, each.qk_head_dim, each.v_head_dim) for each in layers}
    return [result.token_ids for result in results], shapes


def other_images(group: RankGroup, asked: SimpleNamespace) -> str:
    """The error where one rank has another image."""
    pictured = dict(asked.inputs[0])
    pictured["pixel_values"] = pictured["pixel_values"] + group.rank
    try:
        runner_of(group, asked).read_images(pictured)
    except RanksDiffer as error:
        return str(error)
    return ""


def served_each(group: RankGroup, asked: Mapping[str, SimpleNamespace]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {name: served(group, one) for name, one in asked.items()}
    return {**found, "other images": other_images(group, asked["llava"])}


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    made = {name: tiny(name) for name in PICTURED}
    with quiet_transformers(progress=False):
        for name, maker in MAKERS.items():
            torch.manual_seed(0)
            one = AutoModelForCausalLM.from_config(maker(), attn_implementation="eager").eval()
            with torch.no_grad():
                for name_of, parameter in one.named_parameters():
                    if parameter.dim() > 1 or "sinks" in name_of:
                        parameter.normal_(0, 0.3)
            folder = tmp_path_factory.mktemp(name)
            one.save_pretrained(folder)
            made[name] = one, folder
    return made


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """What each rank found, all in one start of the ranks."""
    folders = {name: folder for name, (_, folder) in models.items()}
    asked = {name: asked_of(folders[name], some_prompts(3)) for name in MAKERS}
    for name in PICTURED:
        asked[name] = asked_of(folders[name], some_pictures(name))
    for name, ranks in REFUSED:
        asked[f"{name} {ranks}"] = asked_of(folders[name], asked[name].inputs, ranks)
    return run_ranks(served_each, RANKS, tmp_path_factory.mktemp("ranks"), asked)


def alone(model, inputs, use_cache=True):
    """What transformers' own attention generates for each."""
    texts = []
    for one in inputs:
        whole = model.generate(
            **one, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=use_cache
        )
        texts.append(tuple(whole[0].tolist()[one["input_ids"].shape[1] :]))
    assert len({token for text in texts for token in text}) > 12, "text that says something"
    return texts


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.turns(3)
def test_layers_of_several_shapes(models, found, name) -> None:
    """Each rank keeps MiniMax's lightning layers whole, since its plan does not name them."""
    # With its cache, MiniMax's text is not that of its forward over the whole text
    expected = alone(models[name][0], some_prompts(3), use_cache=name != "minimax")
    for of_rank in found:
        assert of_rank[name] == (expected, SHAPES[name])


@pytest.mark.parametrize("name", PICTURED)
def test_prompts_with_images(models, found, name) -> None:
    expected = alone(models[name][0], some_pictures(name))
    assert [of_rank[name][0] for of_rank in found] == [expected] * RANKS


def test_other_images_on_a_rank_are_an_error_on_each(found) -> None:
    first, second = (of_rank["other images"] for of_rank in found)
    assert first == second
    assert "images of" in first


def test_an_indexer_on_each_rank(models, found) -> None:
    expected = alone(models["deepseek"][0], some_prompts(3))
    for of_rank in found:
        assert of_rank["deepseek"] == (expected, {(1, 48, 40)})


@pytest.mark.parametrize(("name", "ranks"), REFUSED)
def test_ranks_that_cannot_run_it(found, name, ranks) -> None:
    for of_rank in found:
        assert of_rank[f"{name} {ranks}"].startswith(REFUSED[name, ranks])
