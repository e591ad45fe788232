"""A gap that is marked fails when it closes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
SUPPORT = Path(__file__).resolve().parents[1] / "support"
MARKED = """
import pytest
from gaps import gap

@pytest.mark.{kind}(raises=KeyError, reason="the library lacks it")
def test_marked():
    {body}

def test_by_parameters(request):
    gap(request, "{kind}", raises=KeyError, reason="of this shape")
    {body}
"""


@pytest.mark.parametrize("kind", ["notimpl", "notyet", "never"])
@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("raise KeyError", {"xfailed": 2}),
        ("pass", {"failed": 2}),  # it closed
        ("raise TypeError", {"failed": 2}),  # it fails otherwise
    ],
)
def test_only_the_named_failure_is_expected(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    body: str,
    outcome: dict[str, int],
) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    pytester.makepyfile(MARKED.format(kind=kind, body=body))
    pytester.runpytest("-p", "gaps", "--strict-markers").assert_outcomes(**outcome)


@pytest.mark.parametrize("given", ['reason="why"', "raises=KeyError", "KeyError, reason='why'"])
def test_a_mark_that_does_not_say_enough_ends_the_collection(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    pytester.makepyfile(f"import pytest\n@pytest.mark.never({given})\ndef test_it(): pass\n")
    result = pytester.runpytest("-p", "gaps")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*expects raises=EXCEPTION and reason=TEXT*"])
