"""Checks of the sizes that pools, allocators and index builders are given."""

from __future__ import annotations

from attnmux.core.errors import InvalidInput


def check_positive(argument: str, value: int) -> None:
    """Raise InvalidInput below 1."""
    if value < 1:
        raise InvalidInput(argument, came=value, expected="at least 1")


def check_whole_pages(size: int, page_size: int) -> None:
    """Raise InvalidInput unless `size` tokens are one page or more, and whole ones."""
    check_positive("page_size", page_size)
    if size < page_size or size % page_size:
        raise InvalidInput(
            "size", came=f"{size} tokens", expected=f"whole pages of {page_size} tokens"
        )
