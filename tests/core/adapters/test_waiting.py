"""What a terminal shows while something takes long."""

from __future__ import annotations

import pytest

from attnmux.core.plugin import elapsed_shown


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_what_runs_and_for_how_long(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1" if is_terminal else "")
    with elapsed_shown("compiling kernels"):
        pass
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("compiling kernels" in shown.err) == is_terminal
    assert ("0:00:00" in shown.err) == is_terminal
