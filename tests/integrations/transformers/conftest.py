"""Tiny random models of every architecture, and the machinery to run them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnmux.core import Offer, Plugins
from attnmux.core.find.cpu import probe_cpu
from attnmux.testing import fake_card, fake_platform
from attnmux.transformers import (
    Engine,
    ModelProposer,
    ModelRunner,
    Prompt,
    RunnerOptions,
    load_head,
    load_head_runner,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.draft.pace import DraftPace
from attnmux.transformers.load.checkpoint import quiet_transformers

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA3 = {**BASE, "head_dim": 16, "sliding_window": 5, "layer_types": ALTERNATING}
DEEPSEEK = {
    **BASE,
    **MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE_TOKENS = {"image_token_id": 90}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}


MIXED = {**BASE, "num_hidden_layers": 4}
STATES = {
    **{name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"]),
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"num_experts": 4, **MOE}
MINIMAX = {
    **MIXED,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
    "head_dim": 16,
    "num_local_experts": 2,
    "block_size": 8,
}
HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **MIXED, **EXPERTS, **GDN, head_dim=16, shared_expert_intermediate_size=16
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**MIXED, **GDN, head_dim=16),
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(**MIXED, **GDN),
    "kimi-linear": lambda: transformers.KimiLinearConfig(
        **{**MIXED, "num_key_value_heads": 4},
        **LATENT,
        **EXPERTS,
        linear_head_dim=16,
        linear_num_heads=2,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
    ),
    "bamba": lambda: transformers.BambaConfig(
        **MIXED, **MAMBA2, attn_layer_indices=[1], mamba_expand=2, mamba_chunk_size=16
    ),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **MIXED, **MAMBA2, mamba_d_ssm=64, mamba_chunk_size=16
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **{name: value for name, value in BASE.items() if name != "num_hidden_layers"},
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=16,
        head_dim=16,
    ),
    "granite-4": lambda: transformers.GraniteMoeHybridConfig(
        **MIXED,
        **MAMBA2,
        layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2],
        mamba_expand=2,
        mamba_chunk_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "jamba": lambda: transformers.JambaConfig(
        **MIXED, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **MIXED, layer_types=["conv", "conv", "full_attention", "conv"]
    ),
    "minimax": lambda: transformers.MiniMaxConfig(**MINIMAX),
    "minimax-windows": lambda: transformers.MiniMaxConfig(**MINIMAX, sliding_window=5),
    "zamba": lambda: transformers.ZambaConfig(
        **{**MIXED, "num_key_value_heads": 4, "num_hidden_layers": 5},
        layers_block_type=[*["linear_attention", "hybrid"] * 2, "linear_attention"],
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        **STATES,
        num_heads=8,
        head_dim=8,
        expand=2,
        n_groups=2,
        state_size=16,
        chunk_size=16,
    ),
    "falcon-mamba": lambda: transformers.FalconMambaConfig(**STATES, state_size=16),
    "recurrent-gemma": lambda: transformers.RecurrentGemmaConfig(
        **MIXED, head_dim=16, attention_window_size=5, block_types=["recurrent", "attention"]
    ),
    "zaya": lambda: transformers.ZayaConfig(
        **MIXED,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=16,
        router_hidden_size=16,
        sliding_window=5,
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        cca_time1=3,
    ),
    "xlstm": lambda: transformers.xLSTMConfig(
        **STATES, num_heads=2, qk_dim_factor=0.5, chunk_size=16
    ),
}
"""Models with layers that have no softmax attention."""


def config(name: str) -> PreTrainedConfig:
    """The tiny config of an architecture; windows are shorter than the tests' sequences."""
    makers: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: transformers.LlamaConfig(**BASE),
        "qwen2": lambda: transformers.Qwen2Config(
            **BASE, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
        "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=5),
        "gemma2": lambda: transformers.Gemma2Config(
            **BASE, head_dim=16, sliding_window=5, attn_logit_softcapping=2.0
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA3),
        "gemma3-nested": lambda: transformers.Gemma3Config(
            text_config=GEMMA3, vision_config=TINY_VISION, mm_tokens_per_image=4
        ),
        "gemma3-images": lambda: transformers.Gemma3Config(
            text_config={**GEMMA3, "sliding_window": 6, "vocab_size": 97},
            vision_config={**TINY_VISION, "patch_size": 4},
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
            **IMAGE_TOKENS,
        ),
        "qwen2.5-vl": lambda: transformers.Qwen2_5_VLConfig(
            text_config={**BASE, "rope_parameters": MROPE},
            vision_config=QWEN_VISION,
            **IMAGE_TOKENS,
            vision_start_token_id=92,
            vision_end_token_id=93,
        ),
        "llava": lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**BASE),
            vision_config=transformers.CLIPVisionConfig(**TINY_VISION),
            vision_feature_layer=-1,
            **IMAGE_TOKENS,
        ),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **BASE,
            head_dim=16,
            sliding_window=5,
            layer_types=ALTERNATING,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        "deepseek-v2": lambda: transformers.DeepseekV2Config(
            **DEEPSEEK, q_lora_rank=None, topk_method="greedy"
        ),
        "deepseek-v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=16),
        "llama4": lambda: transformers.Llama4TextConfig(
            **BASE,
            head_dim=16,
            intermediate_size_mlp=32,
            num_local_experts=2,
            attention_chunk_size=4,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=97,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            bos_token_id=None,
            eos_token_id=None,
        ),
    }
    return {**makers, **HYBRIDS}[name]()


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Weights far from zero, so that attention is far from uniform; sinks that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "sinks" in name:
                parameter.normal_(0, 1)
    return model.eval()


@pytest.fixture(autouse=True)
def _drafts_in_every_step(monkeypatch):
    """Whether drafts pay on this machine must not decide what is tested. `test_draft_pace` has this
    fixture without the patch."""
    monkeypatch.setattr(DraftPace, "drafts", lambda *_: True)


@pytest.fixture(autouse=True)
def without_trials(no_trial: None) -> None:
    """`generate` tries no backend first."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[PreTrainedModel, Path]]:
    """(the model with transformers' own eager attention, its checkpoint's folder), by name."""
    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def make(name: str) -> tuple[PreTrainedModel, Path]:
        if name not in made:
            torch.manual_seed(0)
            with quiet_transformers(progress=False):
                wanted = config(name)
                auto = AutoModelForImageTextToText
                if type(wanted) in MODEL_FOR_CAUSAL_LM_MAPPING:
                    auto = AutoModelForCausalLM
                model = randomise(auto.from_config(wanted, attn_implementation="eager"))
                folder = tmp_path_factory.mktemp(name)
                model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def run_on() -> Callable[..., ModelRunner]:
    """(a checkpoint's folder, a backend's name) to a runner on the CPU."""
    fake = Offer(card=fake_card(), plugin="fake", distribution="attnmux-fake", version="1.0")

    def make(folder: Path, backend: str = "torch_native", **changes: object) -> ModelRunner:
        given = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 192, **changes}
        options = RunnerOptions(**{"debug": True, **given})
        if backend == "fake":
            return load_runner(open_checkpoint(folder), fake_platform(), [fake], options)
        offers = [offer for offer in Plugins.load().offers() if offer.card.name == backend]
        return load_runner(open_checkpoint(folder), probe_cpu(), offers, options)

    return make


@pytest.fixture(scope="session")
def small():
    """What configs of BART's family have in common, for a model of a few thousand weights."""
    return {
        "vocab_size": 97,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }


@pytest.fixture(scope="session")
def run_hybrid():
    """(a checkpoint's folder) to a runner on the plain backends of the CPU."""
    names = ("torch_native", "torch_linear")
    offers = [offer for offer in Plugins.load().offers() if offer.card.name in names]

    def make(folder, **changes):
        given = {"max_batch_size": 4, "max_context_len": 64, "max_total_tokens": 192, **changes}
        options = RunnerOptions(**{"debug": True, **given})
        return load_runner(open_checkpoint(folder), probe_cpu(), offers, options)

    return make


def some_prompts(num=6):
    rng = random.Random(5)
    prompts = [
        [rng.randrange(BASE["vocab_size"]) for _ in range(rng.randrange(1, 20))] for _ in range(num)
    ]
    return [*prompts, *([*ids[:9], 4] for ids in prompts[:2])]


@pytest.fixture(scope="session")
def alone():
    """(model, prompts, number) to the tokens that transformers itself generates after each prompt,
    greedily. They are kept: many tests ask for the same ones."""
    known: dict[tuple[PreTrainedModel, tuple[int, ...], bool], tuple[int, ...]] = {}

    def texts(model, prompts, num=11, *, use_cache=True):
        for ids in prompts:
            key = model, tuple(ids), use_cache
            if len(known.get(key, ())) < num:
                given = {"max_new_tokens": num, "do_sample": False, "use_cache": use_cache}
                with quiet_transformers(progress=False):
                    whole = model.generate(torch.tensor([ids]), **given)
                known[key] = tuple(whole[0, len(ids) :].tolist())
        return [known[model, tuple(ids), use_cache][:num] for ids in prompts]

    return texts


def texts_of(engine, prompts, num=11):
    asked = [Prompt(token_ids=ids, max_new_tokens=num) for ids in prompts]
    return [one.token_ids for one in run_prompts(engine, asked).results]


def a_head(runner, folder, **changes):
    """A runner of the head, on a backend that graphs can record."""
    card = changes.pop("card", None) or fake_card()
    offer = Offer(card=card, plugin="fake", distribution="attnmux-fake", version="1.0")
    given = {"max_batch_size": 6, "max_context_len": 64, "max_total_tokens": 1024, **changes}
    options = RunnerOptions(hidden_states=True, draft_tokens=4, graph=False, **given)
    head = load_head(folder, runner.model)
    return load_head_runner(head, fake_platform(), [offer], options)


def a_proposer(drafter, runner, topk):
    num = 8 if topk > 1 else 4
    return ModelProposer(
        drafter, vocabulary_size=BASE["vocab_size"], steps=3, topk=topk, draft_token_num=num,
        target=runner.steps,
    )  # fmt: skip


def path_of(parents, tokens, number):
    path = []
    while number >= 0:
        path.insert(0, int(tokens[number]))
        number = int(parents[number])
    return path


class Counted:
    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args, **given):
        self.count += 1
        return self.function(*args, **given)


def check_scores(drafts, statement, runner, expected):
    """Run prompts twice, the second time with reused prefixes, and compare the scores of drafts
    with a statement's, and the text with what is expected of the prompts."""
    checked, draft = [], drafts._draft

    def compared(states, num_steps):
        found = draft(states, num_steps)
        for state, scores, tokens, parents in zip(
            states, found.scores, found.tokens, found.parents, strict=True
        ):
            for number in random.Random(len(checked)).choices(range(len(tokens)), k=2):
                path = path_of(parents, tokens, number)
                total = 0.0
                for place, token in enumerate(path):
                    total += float(statement.scores(state.token_ids, path[:place])[token])
                assert float(scores[number]) == pytest.approx(total, rel=1e-3, abs=1e-3)
                checked.append(len(path))
        return found

    drafts._draft = compared
    engine = Engine(runner, drafts=drafts)
    prompts = some_prompts(3)
    for _ in range(2):  # the second time, prefixes are reused
        for ids in prompts:
            engine.add(ids, max_new_tokens=7)
        while engine.has_work:
            engine.step()
    assert len(checked) > 20
    assert max(checked) == 3
    assert texts_of(engine, prompts, 7) == expected


@pytest.fixture(scope="session")
def eagle(alone):
    """What tests of EAGLE heads share."""
    shared = (some_prompts, texts_of, a_head, a_proposer, check_scores, Counted)
    return SimpleNamespace(alone=alone, **{each.__name__: each for each in shared})
