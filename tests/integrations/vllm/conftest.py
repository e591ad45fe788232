"""Real engines of vLLM on the CPU, which `nox -s vllm` installs; they are skipped without it.

The checkpoints are random, small and in float32. Their weights are drawn wide, so that a wrong
mask, page, scale or sink changes the text.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

if find_spec("vllm") is not None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.pop("TRITON_INTERPRET", None)  # of our kernels' tests; vLLM's kernels are compiled

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = {
    **COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MIXED = ["sliding_attention", "full_attention"] * 2


def gqa() -> Any:
    return transformers.LlamaConfig(**GROUPED)


def windows() -> Any:
    return transformers.MistralConfig(**GROUPED, sliding_window=24)


def window_of_one() -> Any:
    """Each token sees itself alone."""
    return transformers.MistralConfig(**GROUPED, sliding_window=1)


def wide_soft_cap() -> Any:
    return soft_cap(head_dim=64)


def chunks() -> Any:
    """Three layers of four see their chunk of 32 tokens alone."""
    return transformers.Llama4TextConfig(
        **{**GROUPED, "intermediate_size": 64},
        intermediate_size_mlp=128,
        attention_chunk_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=8,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=[*["chunked_attention"] * 3, "full_attention"],
        use_qk_norm=False,
        attn_temperature_tuning=False,
    )


def soft_cap(**changes: Any) -> Any:
    return transformers.Gemma2Config(
        **{**GROUPED, "tie_word_embeddings": True, **changes},  # all that vLLM's class knows
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
        query_pre_attn_scalar=32,
        sliding_window=24,
        layer_types=MIXED,
    )


def mixed_windows() -> Any:
    return transformers.Gemma3TextConfig(
        **GROUPED, query_pre_attn_scalar=32, sliding_window=24, layer_types=MIXED
    )


def sinks() -> Any:
    return transformers.GptOssConfig(
        **GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=24,
        layer_types=MIXED,
    )


def alibi() -> Any:
    return transformers.BloomConfig(
        vocab_size=256,
        hidden_size=128,
        n_layer=4,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def mla() -> Any:
    """The dims of DeepSeek's latent, the only ones that the engine's own kernel has, and its scaled
    rotary embedding: the CPU's kernel for plain ones misreads the slices that MLA gives it."""
    return transformers.DeepseekV2Config(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=4,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    family.__name__: family
    for family in (
        *(gqa, windows, window_of_one, chunks, sinks),
        *(soft_cap, wide_soft_cap, alibi, mla, mixed_windows),
    )
}


FREEZE = gc.freeze


@pytest.fixture(scope="session", autouse=True)
def engines_share_the_process() -> Iterator[None]:
    """vLLM imports itself once more, in a process, to look at each family's class without a CUDA
    context. No GPU is used here.

    Each engine searches all modules for kernels to replace, also where an earlier one has replaced
    them. It unfreezes what is imported and searches it for garbage ten times, which takes longer
    than all else that it does, and freezes itself, so that it would never be freed.
    """
    if find_spec("vllm") is None:
        yield
        return
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    replacing = "register_triton_kernel_overrides"
    with pytest.MonkeyPatch.context() as patch:
        registry = "vllm.model_executor.models.registry"
        patch.setattr(f"{registry}._run_in_subprocess", lambda inspect: inspect())
        patch.setattr(platform, replacing, staticmethod(cache(getattr(platform, replacing))))
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


@pytest.fixture(autouse=True)
def imports_are_frozen() -> Iterator[None]:
    """Also those of the test."""
    yield
    gc.collect()
    FREEZE()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint, written when it is first asked for."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            config = FAMILIES[family]()
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, values in model.named_parameters():
                    if name.endswith("sinks"):
                        values.normal_(1.0, 1.0)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return of


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of 1 to 120 tokens, more than run at once; most share a part of one prefix."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(70)]

    def drawn(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    return [shared[: rng.randrange(70)] + drawn(rng.randrange(1, 50)) for _ in range(10)]
