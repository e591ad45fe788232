"""The checkpoint that ships with the integration, and prompts for the task it was trained on.

A prompt is noise, words of random letters, in which *pairs* are hidden: a letter and its value of
two to four digits, such as ``k417``. It ends in ``?`` and one of those letters. The right answer is
that letter's value, then the end of the sequence; no other pair in the prompt has that letter.

    ah k417,wv rqe a90.p B3316 uo ?a  →  90

A model that misses the KV page of the wanted pair, or reads the prompt under a mask that is not
causal, seldom gives that answer. Ask several prompts: a single lost KV slot can go unnoticed, since
the slots of the pair's other bytes carry it too.
"""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Final

PATH: Final = Path(__file__).parent
"""Folder of the checkpoint, in the layout that ``from_pretrained`` reads."""

EAGLE_PATH: Final = PATH / "eagle"
"""Folder of an EAGLE head for the checkpoint."""

KEYS: Final = string.ascii_letters
SEPARATORS: Final = " ,.;"
FILLER: Final = 6 * string.ascii_lowercase + string.ascii_uppercase + 36 * " " + ",."
MIN_DIGITS: Final = 2
MAX_DIGITS: Final = 4
QUERY_BYTES: Final = 2
"""Length of the closing ``?k``."""
MAX_PAIR_BYTES: Final = 1 + MAX_DIGITS + 1
"""Length of the longest pair with the separator after it."""


def max_pairs(length: int) -> int:
    """Return how many pairs surely fit into a prompt of ``length`` bytes; each letter once."""
    return min(len(KEYS), (length - QUERY_BYTES) // MAX_PAIR_BYTES)


def make_prompt(rng: random.Random, length: int) -> tuple[str, str]:
    """Draw a prompt of exactly ``length`` bytes (all ASCII) and its right answer.

    The pairs are at random places, and the question is about each with the same probability. So the
    depth of the answer is about uniform over the prompt. There are between half of
    ``max_pairs(length)`` and all of it.

    Raises:
        ValueError: ``length`` is too short for one pair.
    """
    most = max_pairs(length)
    if most < 1:
        shortest = QUERY_BYTES + MAX_PAIR_BYTES
        raise ValueError(f"length={length} holds no pair; give at least {shortest} bytes")
    pairs = rng.randint((most + 1) // 2, most)
    values = {
        key: "".join(rng.choices(string.digits, k=rng.randint(MIN_DIGITS, MAX_DIGITS)))
        for key in rng.sample(KEYS, pairs)
    }
    asked = rng.choice(list(values))
    context = _hide(rng, [key + value for key, value in values.items()], length - QUERY_BYTES)
    return f"{context}?{asked}", values[asked]


def _hide(rng: random.Random, pairs: list[str], length: int) -> str:
    """Spread ``pairs`` over ``length`` bytes of filler, a separator on both sides of each."""
    text = rng.choices(FILLER, k=length)
    slack = length - sum(len(pair) + 1 for pair in pairs)
    used = 0
    for gap, pair in zip(sorted(rng.randint(0, slack) for _ in pairs), pairs, strict=True):
        start = used + gap
        if start > 0:
            text[start - 1] = rng.choice(SEPARATORS)
        text[start : start + len(pair) + 1] = pair + rng.choice(SEPARATORS)
        used += len(pair) + 1
    text[-1] = " "
    return "".join(text)
