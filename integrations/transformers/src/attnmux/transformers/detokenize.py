"""Text of a growing list of tokens, in pieces that end on whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no whole character."""

CONTEXT = 8
"""Tokens before a piece that are decoded with it, because some decoders treat the first token of
a text differently (a leading space is dropped)."""


class TextStream:
    """Detokenises one request as it grows; the pieces joined are the whole text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-CONTEXT:])
        self._done = len(self._ids)
        # A prompt of token ids may end inside a character.
        while self._done and self._decode(self._ids[: self._done]).endswith(UNFINISHED):
            self._done -= 1

    def put(self, token_id: int) -> str:
        """The text that `token_id` completes; "" inside a character of several tokens."""
        self._ids.append(token_id)
        piece = self._new_text()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self._advance()
        return piece

    def end(self) -> str:
        """What is left: bytes that never became a whole character, as replacement characters."""
        piece = self._new_text()
        self._advance()
        return piece

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._done])
        return self._decode(self._ids)[len(before) :]

    def _advance(self) -> None:
        self._ids = self._ids[-max(CONTEXT, len(self._ids) - self._done) :]
        self._done = len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast("str", text)  # a list of texts comes only from a list of lists
