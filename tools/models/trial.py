"""One architecture as a small random model: attnmux's engine against transformers' eager attention.

The model's own forward over each whole text says what text and logits are: eager attention, one
text at a time, without a cache. The engine runs all prompts at once, with shared prefixes and prompts in chunks, at several page sizes.
"""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)

from attnmux.core import AttnmuxError, Offer, Platform
from attnmux.transformers import (
    Engine,
    ModelRunner,
    Prompt,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.checkpoint import quiet_transformers
from tools.models.configs import VARIANTS, random_config
from tools.models.outcome import Outcome, Status

PAGE_SIZES = (1, 16)
NEW_TOKENS = 4
CHUNK = 7
"""Prompt tokens of a step, so that most prompts run in chunks."""
TOLERANCE = 1e-3
"""The largest difference of logits, as a share of their spread: float32's rounding stays far below,
and one key more or less far above."""

@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the model itself says after one prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor
    """[NEW_TOKENS, vocabulary]: those that each token was chosen by."""


class WrongAnswer(Exception):
    """attnmux and transformers disagree."""


def try_architecture(
    name: str, seed: int, platform: Platform, offers: Sequence[Offer]
) -> Outcome:
    """Build, serve and compare the architecture of a config class."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers(progress=False):
        try:
            config, wanted = build(config_class_of(name), seed, Path(folder))
        except Exception as error:  # transformers' models raise anything
            return Outcome(config=name, status="not built", reason=in_one_line(error))
        dims = _dims(config)
        backend, worst = "", 0.0
        try:
            for page_size in PAGE_SIZES:
                runner = make_runner(Path(folder), page_size, platform, offers)
                backend = ", ".join(sorted({one.backend for one in _chosen(runner)}))
                worst = max(worst, compare_logits(runner, wanted))
                compare_text(runner, wanted)
        except WrongAnswer as error:
            status: Status = "wrong"
            reason = f"{error} (page size {page_size})"
        except AttnmuxError as error:
            status, reason = "refused", in_one_line(error)
        except Exception as error:  # whatever is not typed is a fault of attnmux
            status, reason = "failed", in_one_line(error)
        else:
            return Outcome(config=name, status="served", backend=backend, worst=worst, dims=dims)
    return Outcome(config=name, status=status, reason=reason, backend=backend, dims=dims)


def config_names() -> list[str]:
    """The config classes of all decoders that transformers has, once each."""
    return list(dict.fromkeys(one.__name__ for one in MODEL_FOR_CAUSAL_LM_MAPPING))


def config_class_of(name: str) -> type[PreTrainedConfig]:
    return next(one for one in MODEL_FOR_CAUSAL_LM_MAPPING if one.__name__ == name)


def build(
    config_class: type[PreTrainedConfig], seed: int, folder: Path
) -> tuple[PreTrainedConfig, list[Wanted]]:
    """Write a checkpoint of random weights. Returns its config, and what it generates."""
    errors = []
    for variant in VARIANTS:
        try:
            config = random_config(config_class, seed, variant)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            )
            randomise(model)
            model.generation_config = GenerationConfig()
            model.save_pretrained(folder)
            return config, generate(folder, seed)
        except Exception as error:  # the next variant may do
            errors.append(error)
    raise errors[-1]


def randomise(model: torch.nn.Module) -> None:
    """Weights far from zero, so that attention is far from uniform; sinks that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "sink" in name:
                parameter.normal_(0, 1)


def prompts_of(seed: int, vocabulary: int) -> list[list[int]]:
    """Of uneven lengths, among them one of a single token; some begin as another does."""
    rng = random.Random(seed)

    def some(num: int) -> list[int]:
        # The ends of a vocabulary are special tokens in some models
        return [rng.randrange(5, vocabulary - 5) for _ in range(num)]

    long, short = some(33), some(13)
    return [some(1), long, short, long[:20] + some(5)]


@torch.inference_mode()
def generate(folder: Path, seed: int) -> list[Wanted]:
    """Greedy text of the model's own forward over each whole text, without any cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    wanted = []
    for prompt in prompts_of(seed, vocabulary):
        ids, logits = list(prompt), []
        for _ in range(NEW_TOKENS):
            said = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            logits.append(said.float())
            ids.append(int(said.argmax()))
        if not all(bool(each.isfinite().all()) for each in logits):
            raise ValueError("logits that are not numbers")
        tokens = ids[len(prompt) :]
        wanted.append(Wanted(prompt=prompt, tokens=tokens, logits=torch.stack(logits)))
    return wanted


def make_runner(
    folder: Path, page_size: int, platform: Platform, offers: Sequence[Offer]
) -> ModelRunner:
    options = RunnerOptions(
        max_batch_size=4,
        max_context_len=64,
        max_total_tokens=256,
        window_step_tokens=16,
        page_size=page_size,
    )
    return load_runner(open_checkpoint(folder), platform, offers, options, warn=_ignore)


def _ignore(text: str) -> None: ...


def compare_logits(runner: ModelRunner, wanted: Sequence[Wanted]) -> float:
    """Run prompts in two steps, then decode transformers' own tokens. Returns the worst difference.

    Raises WrongAnswer for one beyond the tolerance.
    """
    worst = 0.0
    for one, two in zip(wanted[::2], wanted[1::2], strict=True):
        both = (one, two)
        states = [SequenceState(token_ids=list(each.prompt)) for each in both]
        first = [max(1, len(each.prompt) // 2) for each in both]
        if min(len(each.prompt) for each in both) > 1:
            runner.extend(states, first)
            logits = runner.extend(states)
        else:
            logits = runner.extend(states)
        for step in range(NEW_TOKENS):
            for each, ours in zip(both, logits, strict=True):
                worst = max(worst, _difference(each, step, ours))
            if step + 1 < NEW_TOKENS:
                for each, state in zip(both, states, strict=True):
                    state.token_ids.append(each.tokens[step])
                logits = runner.decode(states)
        runner.release(states)
    return worst


def _difference(wanted: Wanted, step: int, ours: torch.Tensor) -> float:
    theirs = wanted.logits[step].float()
    found = float((ours.float() - theirs).abs().max() / theirs.std())
    if not found <= TOLERANCE:
        raise WrongAnswer(
            f"logits of token {step + 1} after {len(wanted.prompt)} differ by {found:.2g}"
        )
    return found


def compare_text(runner: ModelRunner, wanted: Sequence[Wanted]) -> None:
    """Run all prompts in the engine. Raises WrongAnswer for another text.

    A text may leave the wanted one where two tokens are as likely as each other.
    """
    engine = Engine(runner, prefill_tokens=CHUNK)
    asked = [Prompt(token_ids=each.prompt, max_new_tokens=NEW_TOKENS) for each in wanted]
    for each, result in zip(wanted, run_prompts(engine, asked).results, strict=True):
        _compare_tokens(each, result.token_ids)


def _compare_tokens(wanted: Wanted, ours: Sequence[int]) -> None:
    for logits, mine, theirs in zip(wanted.logits.float(), ours, wanted.tokens, strict=True):
        if mine != theirs:
            if float((logits[theirs] - logits[mine]) / logits.std()) > TOLERANCE:
                raise WrongAnswer(f"text {list(ours)} instead of {wanted.tokens}")
            return


def _chosen(runner: ModelRunner) -> Iterator[Any]:
    return iter(runner.decision.phases.values())


def _dims(config: PreTrainedConfig) -> str:
    text: Any = config.get_text_config(decoder=True)
    names = {"layers": "num_hidden_layers", "heads": "num_attention_heads"}
    names |= {"kv": "num_key_value_heads", "dim": "head_dim", "hidden": "hidden_size"}
    known = {short: _field(text, name) for short, name in names.items()}
    return ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)


def _field(config: PreTrainedConfig, name: str) -> object:
    """None also for a field that differs between layers, which some configs refuse to say."""
    try:
        return getattr(config, name, None)
    except Exception:  # errors of transformers' own
        return None


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def try_alone(name: str, seed: int, platform: Platform, offers: Sequence[Offer]) -> Outcome:
    """The same in a process of its own, on one thread, as small tensors want it."""
    torch.set_num_threads(1)
    start = time.monotonic()
    outcome = try_architecture(name, seed, platform, offers)
    return replace(outcome, seconds=time.monotonic() - start)
