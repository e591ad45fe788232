"""The layers whose K and V keep the model's dtype while the others store another."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attnmux.core import InvalidInput

ARGUMENT = "kv_dtype_skip"
KINDS = ("sliding_window", "attention_chunk", "full_attention")
"""Kinds of layers that may differ in KV dtype. One with a window and chunks is the first kind."""

NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def kept_layers(
    skip: str, kinds: Mapping[int, str], *, dtype: str | None, kv_dtype: str | None
) -> frozenset[int]:
    """The numbers of the layers that `skip` names.

    skip: numbers, ranges and kinds of layers, such as "0-1,31,sliding_window". Numbers are those of
    the model, from 0; a range includes both its ends.
    kinds: of each attention layer, by its number: one of KINDS, or a word for layers that must be
    alike. dtype, kv_dtype: canonical names, of the model and of the layers that are not named.
    Raises InvalidInput for a name, a number or a range of no layer, if no layer or no other
    dtype is left, for layers that must be alike, and without the model's dtype.
    """
    if dtype is None:
        expected = "the model's dtype, which the skipped layers keep: config.json does not state it"
        raise InvalidInput("dtype", got=None, expected=expected)
    if kv_dtype in (None, dtype):
        got = f"{skip!r} with kv_dtype {kv_dtype}"
        expected = f"a kv_dtype with it that is not the model's, {dtype}: all layers keep that"
        raise InvalidInput(ARGUMENT, got=got, expected=expected)
    alike = sorted(set(kinds.values()).difference(KINDS))
    if alike or not kinds:
        raise no_kept_layers(f"{alike[0]} layers" if alike else "a model that lists no layers")
    kept = frozenset().union(*(_named(word.strip(), kinds) for word in skip.split(",")))
    if len(kept) == len(kinds):
        expected = f"a layer left for {kv_dtype}: name fewer, or leave kv_dtype unset"
        raise InvalidInput(ARGUMENT, got=f"{skip!r}, which is every layer", expected=expected)
    return kept


def no_kept_layers(got: str) -> InvalidInput:
    """The refusal of layers that share a pool, an index or a latent."""
    expected = "a decoder of causal self attention with K and V for each layer, and no indexer"
    return InvalidInput(ARGUMENT, got=got, expected=expected)


def _named(word: str, kinds: Mapping[int, str]) -> frozenset[int]:
    """The layers of one name, number or range."""
    numbers = NUMBERS.fullmatch(word)
    if numbers is None:
        found = frozenset(number for number, kind in kinds.items() if kind == word)
    else:
        first, last = int(numbers[1]), int(numbers[2] or numbers[1])
        found = frozenset(number for number in kinds if first <= number <= last <= max(kinds))
    if not found:
        present = [kind for kind in KINDS if kind in kinds.values()]
        expected = (
            f"numbers or ranges of attention layers from {min(kinds)} to {max(kinds)}, or "
            f"{' or '.join(present)}"
        )
        raise InvalidInput(ARGUMENT, got=repr(word), expected=expected)
    return found
