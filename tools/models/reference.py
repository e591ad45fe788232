"""Small random models of an architecture, and what they say by themselves."""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnmux.core import torch_dtype
from tools.models.architectures import Architecture
from tools.models.bounds import Bounds, Wanted, float32_bounds, rounding_bounds
from tools.models.configs import VARIANTS, random_config
from tools.models.encoder_inputs import encoder_inputs
from tools.models.recipe import Recipe

NEW_TOKENS = 4
TRIES = 5
"""Random weights that are tried until no text holds the padding token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A checkpoint, and what eager attention in float32 says of it."""

    config: PreTrainedConfig
    wanted: list[Wanted]
    bounds: Bounds


def build(architecture: Architecture, recipe: Recipe, folder: Path) -> Reference:
    """Write a checkpoint of random weights, in the recipe's dtype.

    No text holds the padding token, which some models do not count as a token.
    """
    seed, dtype = recipe.seed, torch_dtype(recipe.dtype)
    is_scaled = recipe.dims == "real" or dtype is not torch.float32
    errors = []
    for variant in VARIANTS:
        try:
            config = random_config(architecture.config_class, recipe, variant)
            architecture = _of_whole_config(architecture, config)
            for _ in range(TRIES):
                _write(architecture, config, folder, dtype, scaled=is_scaled)
                exact = _load(architecture, folder, torch.float32)
                wanted = generate(architecture, exact, seed)
                if not any(_padding(config) in each.tokens for each in wanted):
                    break
            if dtype is torch.float32:
                bounds = float32_bounds(exact, wanted, seed)
            else:
                rounded = _load(architecture, folder, dtype)
                bounds = rounding_bounds(exact, rounded, wanted, seed)
            return Reference(config=config, wanted=wanted, bounds=bounds)
        except Exception as error:  # the next variant may do
            errors.append(error)
    raise errors[-1]


def _of_whole_config(architecture: Architecture, config: PreTrainedConfig) -> Architecture:
    """The same, loaded with its towers where its decoder would save a config that no auto class
    loads: that of its text."""
    with torch.device("meta"):
        model = architecture.auto.from_config(config)
    if architecture.has_encoder or type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return architecture
    return replace(architecture, auto=AutoModelForImageTextToText)


def _padding(config: PreTrainedConfig) -> object:
    return getattr(config.get_text_config(decoder=True), "pad_token_id", None)


def _write(
    architecture: Architecture,
    config: PreTrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    *,
    scaled: bool,
) -> None:
    model = architecture.auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, scaled=scaled)
    model.to(dtype)
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)


def _load(architecture: Architecture, folder: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401  # a model of transformers
    loaded = architecture.auto.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    return loaded.eval()


def randomise(model: PreTrainedModel, *, scaled: bool = False) -> None:
    """Weights far from zero, so that attention is far from uniform; sinks and biases that
    matter.

    scaled: weights that add up to outputs as large as inputs. Scores are smaller then, and magnify
    the rounding of 16 bits less.
    """
    # T5's kind does not scale its scores: larger ones would magnify float32's rounding
    fixed = 0.2 if hasattr(model.config, "relative_attention_num_buckets") else 0.3
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 if scaled else fixed)
            elif "sink" in name:
                parameter.normal_(0, 1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def prompts_of(seed: int, vocabulary: int) -> list[list[int]]:
    """Prompts of uneven lengths, among them one of a single token; some begin as another does."""
    rng = random.Random(seed)

    def some(num: int) -> list[int]:
        # The ends of a vocabulary are special tokens in some models
        return [rng.randrange(5, vocabulary - 5) for _ in range(num)]

    long, short = some(33), some(13)
    return [some(1), long, short, long[:20] + some(5)]


@torch.inference_mode()
def generate(architecture: Architecture, model: Any, seed: int) -> list[Wanted]:  # noqa: ANN401  # as above
    """Greedy text of the model's own forward over each whole text, without any cache."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = prompts_of(seed, vocabulary)
    inputs: list[Any] = [None] * len(prompts)
    if architecture.has_encoder:
        inputs = encoder_inputs(model, seed, vocabulary)
    wanted = []
    for prompt, encoder in zip(prompts, inputs, strict=True):
        ids, logits = list(prompt), []
        for _ in range(NEW_TOKENS):
            own = "input_ids" if encoder is None else "decoder_input_ids"
            given = {own: torch.tensor([ids]), **(encoder or {})}
            said = model(**given, use_cache=False).logits[0, -1]
            logits.append(said.float())
            ids.append(int(said.argmax()))
        if not all(bool(each.isfinite().all()) for each in logits):
            raise ValueError("logits that are not numbers")
        tokens = ids[len(prompt) :]
        wanted.append(
            Wanted(prompt=prompt, tokens=tokens, logits=torch.stack(logits), encoder=encoder)
        )
    return wanted


def dims_of(config: PreTrainedConfig) -> str:
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
