"""Which word was meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnmux.core.facts.checks import nearest

KNOWN = ("fa3", "flashinfer", "flashinfer_mla", "Acme")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("flashinfr", "flashinfer"),
        ("FA3", "fa3"),
        ("acme", "Acme"),
        ("FlashInfer-MLA", "flashinfer_mla"),
        ("", ""),
        ("zzz", ""),
    ],
)
def test_the_most_like_in_any_case(word, meant) -> None:
    assert nearest(word, KNOWN) == meant


def test_an_answer_imports_nothing_to_guess_with() -> None:
    code = "import attnmux.core.cli.select, sys; print('difflib' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
