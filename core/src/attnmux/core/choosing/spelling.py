"""What was probably meant by a word that means nothing: for errors."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known` that is most like `word`; empty where none is."""
    import difflib  # noqa: PLC0415  # off the path of answers: only errors guess

    return next(iter(difflib.get_close_matches(word, known, n=1)), "")
