"""Token ids of prompts, checked, and the text of generated ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex, cast

from transformers import PreTrainedTokenizerBase

from attnmux.core import InvalidInput

UNFINISHED = "\ufffd"
"""Decoders write it for bytes that are no whole character."""


CONTEXT = 8
"""Tokens of the prompt that are decoded with the first piece, because some decoders treat the
first token of a text differently (a leading space is dropped)."""


LONGEST = 4
"""Bytes, and so at most tokens, of a character in UTF-8."""


def read_ids(name: str, token_ids: Iterable[SupportsIndex]) -> list[int]:
    """Token ids as Python's ints, whatever integers they are. Raises InvalidInput for others."""
    try:
        return [index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise InvalidInput(name, got=f"{error}", expected="a list of token ids") from error


def check_prompt(name: str, ids: Sequence[int], vocabulary_size: int, max_context_len: int) -> None:
    """Raise InvalidInput unless the model can read these ids in this context."""
    if not ids:
        raise InvalidInput(name, got="no tokens", expected="at least one token")
    if len(ids) > max_context_len:
        raise InvalidInput(
            name, got=f"{len(ids)} tokens", expected=f"at most the context of {max_context_len}"
        )
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocabulary_size:
            raise InvalidInput(
                name, got=f"token id {token}", expected=f"ids from 0 to {vocabulary_size - 1}"
            )


class TextStream:
    """Detokenises one request as it grows; the pieces joined are the whole text.

    Each piece is decoded together with the one before it, which begins and ends with a character:
    a decoder that falls back to bytes gives up on all bytes of a run if one is cut off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids, self._done = self._whole_end(list(prompt_ids[-CONTEXT - LONGEST :]))

    def put(self, *token_ids: int) -> str:
        """The text that these next tokens complete; "" inside a character of several tokens."""
        self._ids += token_ids
        piece = self._new_text()
        if not piece or piece.endswith(UNFINISHED):
            return ""
        self._advance()
        return piece

    def end(self) -> str:
        """The rest: bytes that never became a whole character, as replacement characters."""
        piece = self._new_text()
        self._advance()
        return piece

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._done])
        return self._decode(self._ids)[len(before) :]

    def _advance(self) -> None:
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)

    def _whole_end(self, ids: list[int]) -> tuple[list[int], int]:
        """Some last tokens, from the start of a character on, and how many end with one.

        A prompt of token ids may end inside a character, which the first piece then completes.
        """
        first = max(0, len(ids) - CONTEXT)
        for end in range(len(ids), max(-1, len(ids) - LONGEST), -1):
            for start in range(first, max(-1, first - LONGEST), -1):
                text = self._decode(ids[start:end])
                if not text.startswith(UNFINISHED) and not text.endswith(UNFINISHED):
                    return ids[start:], end - start
        return ids[first:], len(ids) - first  # no characters: nothing to complete

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast("str", text)  # a list of texts comes only from a list of lists
