"""From prompts to token ids, and from generated tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from attnmux.core import InvalidInput
from attnmux.transformers.load.checkpoint import Checkpoint
from attnmux.transformers.requests.text import check_prompt, read_ids

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
    outside the vocabulary, text that UTF-8 cannot hold, text if there is no tokenizer or no
    chat template, and a chat template that does not end within `TEMPLATE_SECONDS`.
    """
    if not prompts:
        raise InvalidInput("prompts", got="none", expected="at least one prompt")
    encoded = []
    for number, prompt in enumerate(prompts, start=1):
        name = f"prompt {number}"
        if not prompt:
            raise InvalidInput(name, got="an empty prompt", expected="at least one token")
        if isinstance(prompt, str):
            _check_text(name, prompt)
            ids = _encode(checkpoint.require_tokenizer(), prompt, chat)
        else:
            ids = read_ids(name, prompt)
        check_prompt(name, ids, checkpoint.vocabulary_size, max_context_len)
        encoded.append(ids)
    return encoded


def _check_text(name: str, text: str) -> None:
    """Python carries bytes of an argument that are not UTF-8 as surrogates; tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at character {error.start + 1}"
        raise InvalidInput(name, got=got, expected="text in UTF-8") from error


T = TypeVar("T")

TEMPLATE_SECONDS = 10.0
"""A template takes milliseconds. One that takes longer than this is taken to loop."""


def within(seconds: float, render: Callable[[], T]) -> T:
    """The result of `render`. Raises its error, and InvalidInput after that many seconds.

    Python cannot stop a thread, so a template that loops keeps running until the process ends.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(render())
        except BaseException as error:
            done.set_exception(error)

    # A daemon: the threads of an executor would keep the interpreter from exiting.
    Thread(target=run, name="attnmux-chat-template", daemon=True).start()
    wait([done], timeout=seconds)
    if not done.done():
        raise InvalidInput(
            "chat",
            got=f"a chat template that did not end within {seconds:g} s",
            expected="raw prompts, or a tokenizer with another chat template",
        )
    return done.result()


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if tokenizer.chat_template is None:
        raise InvalidInput(
            "chat", got="a tokenizer without a chat template", expected="raw prompts"
        )
    message = [{"role": "user", "content": text}]
    shown = within(
        TEMPLATE_SECONDS,
        partial(tokenizer.apply_chat_template, message, tokenize=False, add_generation_prompt=True),
    )
    # The template writes the special tokens itself.
    return list(tokenizer(shown, add_special_tokens=False)["input_ids"])
