"""Models that are split over two ranks by more than one rule: the text is that of one rank."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import RankGroup, load_plugins
from attnmux.core.choosing.machine.cpu import probe_cpu
from attnmux.emulators.ranks import run_ranks
from attnmux.transformers import (
    Engine,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.checkpoint import quiet_transformers
from attnmux.transformers.parallel.ranks import TensorParallelRanks

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
SHAPES = {"gemma4": {(1, 16, 16), (1, 32, 32)}, "mimo": {(1, 24, 16)}}
"""KV heads of one rank, and dims of K and V."""


def served(group: RankGroup, folder: Path, prompts: Sequence[Prompt]) -> list[object]:
    """The text, and the shapes of the layers."""
    checkpoint = open_checkpoint(folder)
    offers = [one for one in load_plugins().offers() if one.card.name == "torch_native"]
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=64,
        max_total_tokens=192,
        page_size=4,
        ranks=TensorParallelRanks(group, checkpoint.config),
    )
    runner = load_runner(checkpoint, probe_cpu(), offers, options)
    results = run_prompts(Engine(runner, prefill_tokens=7), prompts).results
    layers = runner.context.layers
    shapes = {(each.tp_k_head_num, each.qk_head_dim, each.v_head_dim) for each in layers}
    return [[result.token_ids for result in results], shapes]


def served_each(
    group: RankGroup, asked: Mapping[str, tuple[Path, list[Prompt]]]
) -> dict[str, list[object]]:
    torch.set_num_threads(1)
    return {name: served(group, *one) for name, one in asked.items()}


def some_prompts(seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    found = [[rng.randrange(97) for _ in range(length)] for length in (17, 1, 30, 9)]
    found += [[*found[0][:9], 5], [*found[0], 7, 8]]
    return [Prompt(token_ids=ids, max_new_tokens=NEW_TOKENS) for ids in found]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
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
    asked = {name: (folder, some_prompts(3)) for name, (_, folder) in models.items()}
    return run_ranks(served_each, RANKS, tmp_path_factory.mktemp("ranks"), asked)


def alone(model, prompts):
    """What transformers' own attention generates for each."""
    texts = []
    for each in prompts:
        ids = list(each.token_ids)
        whole = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(tuple(whole[0].tolist()[len(ids) :]))
    return texts


@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_several_shapes(models, found, name) -> None:
    model, _ = models[name]
    expected = alone(model, some_prompts(3))
    assert len({token for text in expected for token in text}) > 12, "text that says something"
    for of_rank in found:
        tokens, shapes = of_rank[name]
        assert tokens == expected
        assert shapes == SHAPES[name]
