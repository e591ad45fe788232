"""Gaps in what is served, as marks that fail when the gap closes.

    @pytest.mark.notimpl(raises=InvalidInput, reason="fa4 has no cascade")   ours to write
    @pytest.mark.notyet(raises=RuntimeError, reason="https://…")             a library's to fix
    @pytest.mark.never(raises=InvalidInput, reason="a prompt has no graph")  by design

Each is an expected failure, strict, which must come as the exception that it names: a test that
passes fails, and so does one that fails otherwise. A mark without a reason or an exception ends
the collection. What only this machine lacks, such as a GPU or a library, stays a skip.

`gap` marks a running test whose parameters decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import pytest

Kind = Literal["notimpl", "notyet", "never"]
KINDS: Sequence[Kind] = get_args(Kind)
Raises = type[BaseException] | tuple[type[BaseException], ...]


def pytest_configure(config: pytest.Config) -> None:
    for kind, meaning in zip(KINDS, ("ours to write", "a library's", "by design"), strict=True):
        line = f"{kind}(*, raises, reason): a gap, {meaning}; it fails when the gap closes"
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises UsageError for a mark that does not say why, or which exception must come."""
    for item in items:
        for kind in KINDS:
            for mark in item.iter_markers(kind):
                given = dict(mark.kwargs)
                raises, reason = given.pop("raises", None), given.pop("reason", "")
                if mark.args or given or not raises or not reason:
                    expected = "raises=EXCEPTION and reason=TEXT, and nothing else"
                    raise pytest.UsageError(f"{item.nodeid}: {kind} expects {expected}")
                item.add_marker(_expected(kind, raises, reason))


def gap(request: pytest.FixtureRequest, kind: Kind, *, raises: Raises, reason: str) -> None:
    """Mark the running test: from here on it must fail, by that exception."""
    request.applymarker(_expected(kind, raises, reason))


def _expected(kind: str, raises: Raises, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"{kind}: {reason}")
