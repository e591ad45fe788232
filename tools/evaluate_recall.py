"""Evaluate the recall checkpoint on held-out prompts, loaded as any user would load it.

    python tools/evaluate_recall.py DIR [--prompts N] [--seed N] [--device cuda]

For bfloat16 and float32 and for each prompt length, greedy decoding by transformers itself: an
answer is *right* if the first bytes are exactly the value, and *ended* if the end of the sequence
comes right after it. As a control the same prompts are asked again with the attention mask closed
over the pair asked for: then next to nothing may be right.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from attnmux.transformers.recall import MAX_DIGITS, make_prompt

Model: TypeAlias = Any
Tokenizer: TypeAlias = Any
"""What transformers loads; the signatures that it gives to their methods do not hold."""

LENGTHS = (32, 64, 128, 256, 512, 1024, 1500, 2000)
BATCH = 250


@torch.inference_mode()
def evaluate(folder: Path, dtype: torch.dtype, prompts: int, seed: int, device: str) -> None:
    """Print, for each length, how many of ``prompts`` held-out prompts are answered right."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device).eval()
    for length in LENGTHS:
        rng = random.Random(f"held out {seed} {length}")
        cases = [make_prompt(rng, length) for _ in range(prompts)]
        counts = torch.zeros(3, dtype=torch.long)
        for first in range(0, prompts, BATCH):
            counts += count_right(model, tokenizer, cases[first : first + BATCH])
        right, ended, blind = counts.tolist()
        print(
            f"{str(dtype).removeprefix('torch.'):8} {length:5} bytes: {right}/{prompts} right, "
            f"{ended} ended ({100 * ended / prompts:.2f} %); pair hidden: {blind} right",
            flush=True,
        )


def count_right(model: Model, tokenizer: Tokenizer, cases: list[tuple[str, str]]) -> Tensor:
    """Count ``[right, right and ended, right though the pair is hidden]``.

    ``cases`` are prompts of one length, so that no padding is needed, with their answers.
    """
    ids = tokenizer([prompt for prompt, _ in cases], return_tensors="pt")["input_ids"]
    ids = ids.to(model.device)
    seen, hidden = torch.ones_like(ids), torch.ones_like(ids)
    for row, (prompt, answer) in enumerate(cases):
        pair = prompt.index(prompt[-1] + answer)
        hidden[row, pair : pair + 1 + len(answer)] = 0
    given, blind = (
        model.generate(ids, attention_mask=mask, max_new_tokens=MAX_DIGITS + 2)[:, ids.shape[1] :]
        for mask in (seen, hidden)
    )
    values = [list(answer.encode()) for _, answer in cases]
    ended = [[*value, tokenizer.eos_token_id] for value in values]
    return torch.tensor([_starts(given, values), _starts(given, ended), _starts(blind, values)])


def _starts(rows: Tensor, wanted: list[list[int]]) -> int:
    """Count the rows that start with what is wanted of them."""
    return sum(row[: len(w)] == w for row, w in zip(rows.tolist(), wanted, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the checkpoint")
    parser.add_argument("--prompts", type=int, default=2_000, help="held-out prompts per length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for dtype in (torch.bfloat16, torch.float32):
        evaluate(args.folder, dtype, args.prompts, args.seed, args.device)


if __name__ == "__main__":
    main()
