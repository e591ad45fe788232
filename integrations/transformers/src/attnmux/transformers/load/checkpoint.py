"""Hugging Face checkpoints: opening and checking them, and loading their weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from logging import ERROR
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from attnmux.configs import gguf_file, weights_dtype
from attnmux.core import AttnmuxError, InvalidInput, torch_dtype
from attnmux.transformers.load.context_limit import longest_len, longrope_switch
from attnmux.transformers.load.quantised import check_method
from attnmux.transformers.model.attention import SERVED
from attnmux.transformers.model.layers import check_servable
from attnmux.transformers.model.packed_decoder import PackedDecoder

ALWAYS = {"trust_remote_code": False}
"""Code in a checkpoint never runs, and transformers does not ask whether to run it."""


LOADING = threading.RLock()
"""Held while a model is opened or loaded. Meanwhile transformers changes its registries, its
logging and torch's default dtype for every thread."""


GGUF_LIBRARIES = ("gguf", "accelerate")
"""Packages that transformers imports to load a GGUF file."""

ADAPTER = "adapter_config.json"
"""With peft installed, transformers loads the adapter's base model instead of the folder's."""

CHECKPOINT = "a folder with a Hugging Face checkpoint, a GGUF file, or a model's id on the hub"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checkpoint:
    """The facts about a model that need no weights."""

    source: str
    """A folder, or a hub id."""
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    tokenizer_error: str = ""
    """Why there is no tokenizer."""
    revision: str | None = None
    """The branch, tag or commit on the hub; None for the default branch and for folders."""
    gguf: str | None = None
    """The GGUF file in the folder that is the model."""

    @property
    def place(self) -> Mapping[str, Any]:
        """Arguments that tell transformers where in `source` the model is."""
        return {"revision": self.revision} if self.gguf is None else {"gguf_file": self.gguf}

    @property
    def max_context_len(self) -> int | None:
        """Tokens that the model's positions allow; None if its config does not say."""
        text = self.config.get_text_config(decoder=True)
        limits = (
            getattr(text, "max_position_embeddings", None),
            getattr(text, "max_target_positions", None),
            longest_len(self.config),
        )
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def default_context_len(self) -> int | None:
        """The same, up to the length from which longrope rotates by its long factors."""
        limits = (self.max_context_len, longrope_switch(self.config))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_encoder_len(self) -> int | None:
        """Encoder tokens that an encoder-decoder model allows; None if its config does not say.

        If the encoder hears, `max_position_embeddings` are the text's alone.
        """
        of_both = () if self.reads_sound else ("max_position_embeddings",)
        for name in ("max_source_positions", *of_both):
            limit = getattr(self.config, name, None)
            if limit is not None:
                return int(limit)
        return None

    @property
    def reads_images(self) -> bool:
        """Whether the model has a vision tower."""
        return getattr(self.config, "vision_config", None) is not None

    @property
    def reads_sound(self) -> bool:
        """Whether the model has an encoder of sound."""
        return self.config.is_encoder_decoder and type(self.config) in (
            MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
        )

    @property
    def vocabulary_size(self) -> int:
        return int(self.config.get_text_config(decoder=True).vocab_size)

    def dtype(self, name: str | None = None) -> torch.dtype:
        """The dtype to run in: the named one, else the one that config.json states, else that of
        the weights in the folder, else float32."""
        if name is not None:
            return torch_dtype(name)
        stated = self.config.get_text_config(decoder=True).dtype or self.config.dtype
        stated = stated or weights_dtype(Path(self.source)) or "float32"
        return torch_dtype(str(stated).removeprefix("torch."))

    def stop_ids(self, model: PreTrainedModel | PackedDecoder) -> frozenset[int]:
        """Tokens that end a text: from generation_config.json and the tokenizer."""
        # Only a model that can generate has a generation_config.
        stated = getattr(model.generation_config, "eos_token_id", None)
        ids = {stated} if stated is None or isinstance(stated, int) else set(stated)
        if self.tokenizer is not None:
            ids.add(self.tokenizer.eos_token_id)
        return frozenset(token for token in ids if token is not None)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Without one, raises InvalidInput with the reason."""
        if self.tokenizer is None:
            raise InvalidInput(
                "tokenizer",
                got=self.tokenizer_error,
                expected=f"tokenizer files in {self.source}, or prompts of token ids",
            )
        return self.tokenizer


def open_checkpoint(
    source: str | Path, *, revision: str | None = None, progress: bool = False
) -> Checkpoint:
    """Read a checkpoint's configuration and tokenizer.

    `source` is a folder, a GGUF file, or the id of a model on the Hugging Face hub; `revision` is a
    branch, a tag or a commit there.
    Raises InvalidInput if there is no usable config.json, if the model is of a class that
    cannot be served or is quantised by a method that transformers does not know, or for the
    revision of a folder.
    """
    with LOADING:
        return _open(source, revision, progress=progress)


def _open(source: str | Path, revision: str | None, *, progress: bool) -> Checkpoint:
    source = str(source)
    if not source:
        raise InvalidInput("model", got="an empty name", expected=CHECKPOINT)
    path = at_home(source)
    if (gguf := gguf_file(path)) is not None:
        path = gguf.parent
    if path.exists() or path.is_absolute() or source.startswith((".", "~")):
        if gguf is None:
            _check_folder(path)
        if revision is not None:
            raise InvalidInput("revision", got=revision, expected=f"none for a folder ({path})")
        source = str(path)
    place = {"revision": revision} if gguf is None else {"gguf_file": gguf.name}
    config = read_config(source, place, progress=progress)
    check_method(source, config)
    model_class: Any = auto_classes(config)[1].get(type(config), None)
    if model_class is None:
        raise InvalidInput(
            "model",
            got=f"{source}, of model type {config.model_type!r}",
            expected="a model that generates text",
        )
    # A type with several classes names the one to load in its config.json; it is checked then.
    if not isinstance(model_class, tuple) and not config.is_encoder_decoder:
        check_servable(model_class, config)
    tokenizer, error = None, ""
    try:
        with quiet_transformers(progress=progress):
            tokenizer = AutoTokenizer.from_pretrained(source, config=config, **place, **ALWAYS)
    except Exception as failure:
        # Each tokenizer library has errors of its own, tokenizers the bare Exception.
        error = in_one_line(failure)
    return Checkpoint(
        source=source,
        config=config,
        tokenizer=tokenizer,
        tokenizer_error=error,
        revision=revision,
        gguf=None if gguf is None else gguf.name,
    )


def read_config(
    source: str, place: Mapping[str, str | None], *, progress: bool = False
) -> PreTrainedConfig:
    """transformers' configuration. place: as `Checkpoint.place`. Raises InvalidInput for one that
    cannot be used, and for a GGUF file without the libraries that read it."""
    file = place.get("gguf_file")
    missing = [name for name in GGUF_LIBRARIES if file and find_spec(name) is None]
    if missing:
        got = f"{Path(source) / str(file)}, a GGUF file, without {' and '.join(missing)}"
        raise InvalidInput("model", got=got, expected="pip install 'attnmux-transformers[gguf]'")
    with quiet_transformers(progress=progress), explained(source):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, **place, **ALWAYS)
        return config


def at_home(path: str | Path) -> Path:
    """The path, with its ~ as the home of a user; as it is if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def auto_classes(config: PreTrainedConfig) -> tuple[Any, Any]:
    """The auto class that loads the config's kind of model, and its classes by config class."""
    if not config.is_encoder_decoder:
        # Emu3's decoder alone, whose config no auto class loads, finds no weights in a checkpoint
        parts = type(config), type(config.get_text_config(decoder=True))
        if all(part in MODEL_FOR_CAUSAL_LM_MAPPING for part in parts):
            return AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING
        return AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
        return AutoModelForSpeechSeq2Seq, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    return AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


@contextmanager
def quiet_transformers(*, progress: bool) -> Iterator[None]:
    """Let transformers and the hub log errors alone, with progress bars on request."""
    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    hub_logging.set_verbosity(ERROR)
    _show_progress(progress)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        _show_progress(bars)


def _show_progress(wanted: bool) -> None:
    if wanted:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
    else:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        got = f"{path}, which is a file" if path.exists() else f"{path}: no such folder"
        raise InvalidInput("model", got=got, expected=CHECKPOINT)
    has_config, has_adapter = ((path / name).is_file() for name in ("config.json", ADAPTER))
    if has_adapter:
        what = "next to a full model" if has_config else "and no model"
        expected = (
            "a model alone: merge the adapter into its base (peft's merge_and_unload, then "
            f"save_pretrained), or move {ADAPTER} and the adapter's weights to another folder, if "
            "the model shall run without them"
        )
        raise InvalidInput("model", got=f"{path}, with an adapter {what}", expected=expected)
    if not has_config:
        raise InvalidInput("model", got=f"{path}, which has no config.json", expected=CHECKPOINT)


@contextmanager
def explained(source: str) -> Iterator[None]:
    """Turn errors of transformers and the hub for a bad checkpoint into InvalidInput."""
    try:
        yield
    except AttnmuxError:
        raise
    except Exception as error:
        if error.args == (SERVED,):  # the key of a model's own table of implementations
            raise InvalidInput(
                "model",
                got=f"{source}, a model that computes attention by itself",
                expected="one that calls transformers' AttentionInterface",
            ) from error
        if "trust_remote_code" in str(error):
            raise InvalidInput(
                "model",
                got=f"{source}, whose code is in the checkpoint (auto_map in its config.json)",
                expected="a model type of the installed transformers: attnmux runs no code of a "
                "checkpoint. Take a later transformers, a conversion of the model to its classes, "
                "or an engine that has the model, with attnmux in it (`attnmux select --engine`)",
            ) from error
        # Every library on the way has errors of its own: a value of config.json alone may end in
        # ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError or ImportError.
        raise InvalidInput(
            "model",
            got=f"{source} ({in_one_line(error)})",
            expected=CHECKPOINT,
        ) from error


def in_one_line(error: BaseException) -> str:
    text = shorten(str(error), width=300, placeholder=" …")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
