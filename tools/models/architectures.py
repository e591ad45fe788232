"""The architectures of the installed transformers, by name."""

# mypy: allow-untyped-calls
# transformers is annotated in part only.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
)

from tools.models.configs import default_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A kind of model."""

    name: str
    """The config's class, or the model's where it has an encoder: one config may serve both."""
    config_class: type[PreTrainedConfig]
    auto: Any
    """The auto class that loads it."""
    has_encoder: bool


def architecture_of(name: str) -> Architecture:
    return _all()[name]


def architecture_names() -> list[str]:
    """All decoders, models of images and text, which get text alone, and encoder-decoder models
    that transformers has, once each."""
    return list(_all())


@cache
def _all() -> Mapping[str, Architecture]:
    """The architectures by name; of those with the same name, the first."""
    found: dict[str, Architecture] = {}
    for one in (*_decoders(), *_of_images(), *_with_encoders()):
        found.setdefault(one.name, one)
    return found


def _decoders() -> Iterator[Architecture]:
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield Architecture(
            name=config.__name__, config_class=config, auto=AutoModelForCausalLM, has_encoder=False
        )


def _of_images() -> Iterator[Architecture]:
    """The decoders whose config no other auto class loads."""
    for config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        if config not in MODEL_FOR_CAUSAL_LM_MAPPING and not _has_encoder(config):
            auto = AutoModelForImageTextToText
            name = config.__name__
            yield Architecture(name=name, config_class=config, auto=auto, has_encoder=False)


def _with_encoders() -> Iterator[Architecture]:
    found = set()
    for auto, mapping in (
        # A model of both speech and text loads as one of speech
        (AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
        (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    ):
        for config in mapping:
            if config not in found and _has_encoder(config):
                found.add(config)
                model: Any = mapping[config]
                name = model.__name__
                yield Architecture(name=name, config_class=config, auto=auto, has_encoder=True)


def _has_encoder(config: type[PreTrainedConfig]) -> bool:
    try:
        return bool(default_config(config).is_encoder_decoder)
    except ValueError:  # a model of two others, whose configs it needs
        return bool(getattr(config, "is_encoder_decoder", True))
