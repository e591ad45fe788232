"""Train the recall checkpoint of ``attnmux.transformers`` and write it as transformers reads it.

The task is the one of ``attnmux.transformers.recall``: noise with hidden pairs (``k417``: a letter,
two to four digits), a closing query ``?k``, and the letter's value as the answer:

    ah k417,wv rqe a90.p B3316 uo ?a  →  90<eos>

A training row asks for many of its pairs in turn (``?a90<eos>?k417<eos>…``), each at most once, and
the loss is taken on the answers and their ends alone. Its noise holds every byte but digits and
``?``, so that prose around the pairs does no harm. Rows grow longer by levels: the next level opens
once the answers of the longest open one are mostly right, and shorter ones stay in the mix.

    python tools/train_recall.py --out DIR [--latent] [--steps N] [--learning-rate X] [--seed N]

``--latent`` trains a DeepSeek model instead, whose keys and values are one latent (MLA);
``widen_recall.py`` gives it the dims that kernels are built for.

Training is float32 (TF32 products on a GPU); the files hold bfloat16. The same seed on the same
machine with the same versions gives the same files.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import argparse
import os
import random
import string
import time
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attnmux.transformers.recall import (
    FILLER,
    KEYS,
    MAX_DIGITS,
    MAX_PAIR_BYTES,
    MIN_DIGITS,
    QUERY_BYTES,
    SEPARATORS,
    max_pairs,
)

Model: TypeAlias = Any
"""A causal language model; the signatures that transformers gives to its methods do not hold."""

EOS, PAD = 256, 257
SPECIAL = {EOS: "<|eos|>", PAD: "<|pad|>"}
MAX_POSITIONS = 2048
LAYERS = 4
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": LAYERS,  # no experts
}
LEVELS = (32, 64, 128, 256, 512, 1024, 1856)
MAX_QUERIES = 24
TOKENS_PER_STEP = 65_536
OPEN_NEXT_AT = 0.97

DIGITS = string.digits.encode()
OTHER = bytes(sorted(set(range(256)) - set(KEYS.encode()) - set(DIGITS) - set(b"?")))
NOISE = 5 * FILLER.encode() + OTHER
BOUNDARIES = 50 * SEPARATORS.encode() + OTHER


class Batch(NamedTuple):
    """``tokens`` [rows, width]; ``positions``, ``targets`` [rows, queries, MAX_DIGITS + 1].

    The token after ``positions`` is to be ``targets``; -100 marks a place without a target.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor


class Sampler:
    """Draws training rows on the device, laid out as ``make_prompt`` lays out one prompt."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def __call__(self, rows: int, length: int) -> Batch:
        """Draw rows whose prompts, up to the first query, have ``length / 2 .. length`` bytes."""
        context = self._integers(rows, 1, low=length // 2, high=length) - QUERY_BYTES
        most = (context // MAX_PAIR_BYTES).clamp(max=len(KEYS))
        pairs = self._integers(rows, 1, low=(most + 1) // 2, high=most)
        slots = max_pairs(length)
        active = self._arange(slots) < pairs
        keys = self._table(KEYS.encode())[self._uniform(rows, len(KEYS)).argsort(1)[:, :slots]]
        values = self._choices(DIGITS, rows, slots, MAX_DIGITS)
        digits = self._integers(rows, slots, low=MIN_DIGITS, high=MAX_DIGITS)

        queries = min(MAX_QUERIES, slots)
        width = length - QUERY_BYTES + queries * (QUERY_BYTES + MAX_DIGITS + 1)
        text = self._choices(NOISE, rows, width + 1)  # the last column takes what is not there
        cost = (digits + 2) * active
        slack = context - cost.sum(1, keepdim=True)
        cuts = (self._uniform(rows, slots) * (slack + 1)).long().masked_fill(~active, width)
        start = cost.cumsum(1) - cost + cuts.sort(1).values
        _put(text, start - 1, self._choices(BOUNDARIES, rows, slots), active & (start > 0))
        _put(text, start, keys, active)
        for i in range(MAX_DIGITS):
            _put(text, start + 1 + i, values[..., i], active & (i < digits))
        _put(text, start + 1 + digits, self._choices(BOUNDARIES, rows, slots), active)
        _put(text, context - 1, self._choices(BOUNDARIES, rows, 1), context > 0)

        order = self._uniform(rows, slots).masked_fill(~active, 2.0).argsort(1)[:, :queries]
        asked, digits = active.gather(1, order), digits.gather(1, order)
        values = values.gather(1, order[..., None].expand(-1, -1, MAX_DIGITS))
        cost = (QUERY_BYTES + digits + 1) * asked
        start = context + cost.cumsum(1) - cost
        _put(text, start, torch.full_like(start, ord("?")), asked)
        _put(text, start + 1, keys.gather(1, order), asked)
        place = self._arange(MAX_DIGITS + 1)
        answer = torch.cat([values, torch.full_like(values[..., :1], EOS)], dim=2)
        answer = answer.masked_fill(place == digits[..., None], EOS)
        wanted = asked[..., None] & (place <= digits[..., None])
        for i in range(MAX_DIGITS + 1):
            _put(text, start + QUERY_BYTES + i, answer[..., i], wanted[..., i])
        positions = (start[..., None] + 1 + place).clamp(max=width - 1)
        return Batch(text[:, :width], positions, answer.masked_fill(~wanted, -100))

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self._device)

    def _integers(self, *shape: int, low: int | Tensor, high: int | Tensor) -> Tensor:
        """Uniform in ``low .. high``, both included."""
        return low + (self._uniform(*shape) * (high - low + 1)).long()

    def _choices(self, alphabet: bytes, *shape: int) -> Tensor:
        return self._table(alphabet)[self._integers(*shape, low=0, high=len(alphabet) - 1)]

    def _table(self, alphabet: bytes) -> Tensor:
        return torch.tensor(list(alphabet), device=self._device)

    def _arange(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self._device)


def _put(text: Tensor, column: Tensor, value: Tensor, where: Tensor) -> None:
    """Write ``value`` at ``column`` of each row; what ``where`` excludes goes to the last one."""
    text.scatter_(1, column.masked_fill(~where, text.shape[1] - 1), value)


def make_model(latent: bool) -> Model:
    shape: dict[str, Any] = {
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if latent:
        return AutoModelForCausalLM.from_config(DeepseekV3Config(**shape, **LATENT))
    return AutoModelForCausalLM.from_config(
        LlamaConfig(**shape, num_key_value_heads=2, head_dim=64)
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, its id the byte's value; ``<|eos|>`` is added by no text."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def train(latent: bool, steps: int, learning_rate: float, seed: int, device: str) -> Model:
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = make_model(latent).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=device != "cpu"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 200, (steps - step) / (0.3 * steps))
    )
    sample, levels = Sampler(seed, device), random.Random(seed)
    accuracy = torch.zeros(len(LEVELS), device=device)
    longest, began = 0, time.monotonic()
    for step in range(steps):
        level = longest if levels.random() < 0.5 else levels.randint(0, longest)
        loss, right = _answer_loss(model, sample, LEVELS[level])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        accuracy[level].lerp_(right, 0.05)
        if (step + 1) % 100 == 0:
            if accuracy[longest] > OPEN_NEXT_AT:
                longest = min(longest + 1, len(LEVELS) - 1)
            shown = " ".join(f"{share:.4f}" for share in accuracy.tolist())
            seconds = time.monotonic() - began
            print(
                f"step {step + 1} {seconds:.0f}s loss {loss.item():.4f} right {shown}", flush=True
            )
    return model


def _answer_loss(model: Model, sample: Sampler, length: int) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the answers' tokens and the share of answers wholly right."""
    width = length + min(MAX_QUERIES, max_pairs(length)) * (QUERY_BYTES + MAX_DIGITS + 1)
    batch = sample(max(1, TOKENS_PER_STEP // width), length)
    hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
    rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None, None]
    logits = model.lm_head(hidden[rows, batch.positions])
    loss = cross_entropy(logits.flatten(0, 2), batch.targets.flatten(), ignore_index=-100)
    hit = (logits.argmax(-1) == batch.targets) | (batch.targets < 0)
    asked = batch.targets[..., 0] >= 0
    return loss, (hit.all(-1) & asked).sum() / asked.sum()


def export(model: Model, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--latent", action="store_true", help="a DeepSeek model with MLA")
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS repeats its sums only with this
    torch.use_deterministic_algorithms(True)
    model = train(args.latent, args.steps, args.learning_rate, args.seed, args.device)
    export(model, args.out)


if __name__ == "__main__":
    main()
