"""From prompts to token ids, and the refusal of those that cannot run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

from transformers import PreTrainedTokenizerBase

from attnmux.core.errors import InvalidInput
from attnmux.transformers.checkpoint import Checkpoint

TextOrIds = str | Sequence[int]
"""Text, or token ids that are taken as they are."""


def encode_prompts(
    checkpoint: Checkpoint,
    prompts: Sequence[TextOrIds],
    *,
    max_context_len: int,
    chat: bool = False,
) -> list[list[int]]:
    """The token ids of each prompt; `chat` puts texts into the tokenizer's chat template.

    Raises InvalidInput for no prompts, an empty prompt, one that is longer than the context, ids
    outside the vocabulary, text that UTF-8 cannot hold, and for text where there is no tokenizer
    or no chat template.
    """
    if not prompts:
        raise InvalidInput("prompts", came="none", expected="at least one prompt")
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        name = f"prompt {number}"
        if not prompt:
            raise InvalidInput(name, came="an empty prompt", expected="at least one token")
        if isinstance(prompt, str):
            _check_text(name, prompt)
            ids = _encode(checkpoint.require_tokenizer(), prompt, chat)
        else:
            ids = read_ids(name, prompt)
        check_prompt(name, ids, checkpoint.vocabulary_size, max_context_len)
        encoded.append(ids)
    return encoded


def read_ids(name: str, token_ids: Iterable[SupportsIndex]) -> list[int]:
    """Token ids as Python's ints, whatever integers they are. Raises InvalidInput for others."""
    try:
        return [index(one) for one in token_ids]
    except TypeError as error:
        raise InvalidInput(name, came=f"{error}", expected="a list of token ids") from error


def check_prompt(name: str, ids: Sequence[int], vocabulary_size: int, max_context_len: int) -> None:
    """Raise InvalidInput unless the model can read these ids in this context."""
    if not ids:
        raise InvalidInput(name, came="no tokens", expected="at least one token")
    if len(ids) > max_context_len:
        raise InvalidInput(
            name, came=f"{len(ids)} tokens", expected=f"at most the context of {max_context_len}"
        )
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary_size:
            raise InvalidInput(
                name, came=f"token id {token}", expected=f"ids from 0 to {vocabulary_size - 1}"
            )


def _check_text(name: str, text: str) -> None:
    """Python carries bytes of an argument that are not UTF-8 as surrogates; tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        came = f"{text[error.start]!r} at character {error.start + 1}"
        raise InvalidInput(name, came=came, expected="text in UTF-8") from error


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if tokenizer.chat_template is None:
        raise InvalidInput(
            "chat", came="a tokenizer without a chat template", expected="raw prompts"
        )
    message = [{"role": "user", "content": text}]
    shown = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return list(tokenizer(shown, add_special_tokens=False)["input_ids"])
