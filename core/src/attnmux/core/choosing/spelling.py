"""What was probably meant by a word that means nothing: for errors."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known` that is most like `word`, in any case; empty where none is."""
    import difflib  # noqa: PLC0415  # off the path of answers: only errors guess

    by_letters = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), by_letters, n=1)
    return by_letters[found[0]] if found else ""
