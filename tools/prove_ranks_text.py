"""Compare the text of several ranks with that of one, on a random model of 2.9 B parameters.

    python tools/prove_ranks_text.py FOLDER [--dtype float32] [--prompts 16] [--length 40 400]
        [--ways tp dcp dp pcp]

Makes the model in FOLDER if it is not there. Runs `attnmux generate` on one rank, with `--tp 2`,
`--tp 2 --dcp`, `--tp 2 --dp-attention` and `--pcp 2`. Prints the share of tokens
before the first difference of each prompt, and the tokens per second of prefill and decode.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnmux.transformers import open_checkpoint, recall

LAYERS, HIDDEN, HEADS, KV_HEADS, CONTEXT = 28, 3072, 24, 8, 32768
PHASES = "prefill", "decode"
WAYS = {
    "tp": ["--tp", "2"],
    "dcp": ["--tp", "2", "--dcp"],
    "dp": ["--tp", "2", "--dp-attention"],
    "pcp": ["--pcp", "2", "--pcp-min-tokens", "32"],
}


def make_model(folder: Path, layers: int) -> None:
    """A Llama with random weights, and the tokenizer of the model that ships."""
    config = LlamaConfig(
        vocab_size=open_checkpoint(recall.PATH).vocabulary_size,
        hidden_size=HIDDEN,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers' own
    model.save_pretrained(folder)
    for file in Path(recall.PATH).glob("*token*"):
        shutil.copy(file, folder)


def generated(folder: Path, prompts: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "attnmux.core", "generate", "--model", str(folder)]
    command += ["--prompts", str(prompts), "--max-new-tokens", "64", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(options)}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def equal_tokens(found: Sequence[int], expected: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(found, expected, strict=False))
    shorter = min(len(found), len(expected))
    return next((place for place, (a, b) in pairs if a != b), shorter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, nargs=2, default=(40, 400), help="characters")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    if not (asked.folder / "config.json").exists():
        make_model(asked.folder, asked.layers)
    rng = random.Random(1)
    lines = [recall.make_prompt(rng, rng.randrange(*asked.length))[0] for _ in range(asked.prompts)]
    prompts = asked.folder / "prompts.txt"
    prompts.write_text("\n".join(json.dumps({"prompt": line}) for line in lines))
    expected: list[list[int]] = []
    for options in ([], *(WAYS[way] for way in asked.ways)):
        answer = generated(asked.folder, prompts, "--dtype", asked.dtype, *options)
        tokens = [each["token_ids"] for each in answer["results"]]
        expected = expected or tokens
        total = sum(map(len, expected))
        same = sum(map(equal_tokens, tokens, expected)) / total
        timings = answer["timings"]
        prefill, decode = (f"{timings[f'{phase}_tokens_per_second']:,.0f}" for phase in PHASES)
        served = {phase: each["backend"] for phase, each in answer["decision"]["phases"].items()}
        print(
            f"{' '.join(options) or 'one rank'}: {total} tokens, {same:.1%} as on one rank; "
            f"prefill {prefill} and decode {decode} tokens/s, "
            f"graphs {answer['graph_batch_sizes'][-1:]}, {served}",
            flush=True,
        )


if __name__ == "__main__":
    main()
