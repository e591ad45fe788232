"""vLLM with attnmux gives the text that it gives with its own backend, token for token."""

from __future__ import annotations

import gc
import importlib.metadata
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")
distributed = pytest.importorskip("vllm.distributed")

# vLLM and its dependencies warn of themselves
pytestmark = pytest.mark.filterwarnings("ignore")

GIB = 2**30
CHUNKED = {"max_num_batched_tokens": 48}
"""Prompts are longer: they are read in chunks, next to others that decode."""


def texts(
    model: Path, backend: str, prompts: Sequence[Any], *, rounds: int = 1, **engine: Any
) -> list[list[int]]:
    """The greedy tokens of prompts, asked `rounds` times; the engine keeps their prefixes."""
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": GIB // 8,
        **engine,
    }
    llm = vllm.LLM(str(model), attention_backend=backend, seed=0, **arguments)
    try:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        sampling.detokenize = not arguments["skip_tokenizer_init"]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = []
        for _ in range(rounds):
            results = llm.generate(asked, sampling, use_tqdm=False)
            found += [list(result.outputs[0].token_ids) for result in results]
        return found
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        distributed.cleanup_dist_env_and_memory()
        gc.collect()


@pytest.mark.parametrize("family", ["gqa", "windows", "sinks", "soft_cap", "mla", "mixed_windows"])
def test_families(family, checkpoint, prompts):
    model = checkpoint(family)
    own = texts(model, "CPU_MLA" if family == "mla" else "CPU_ATTN", prompts)
    ours = texts(model, "ATTNMUX", prompts, rounds=2, **CHUNKED)
    assert ours == own + own
    assert len({tuple(text) for text in own}) == len(prompts)
