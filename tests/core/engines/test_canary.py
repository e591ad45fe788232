"""The setting that has a backend checked inside another engine."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest

from attnmux.core import Chooser, InvalidInput, SettingsError
from attnmux.testing import Case, FakeBackend, RequestCanary, decode, fake_platform, make_setup

LOGGER = logging.getLogger(__name__)


@pytest.mark.parametrize(("text", "is_watched"), [("", False), ("0", False), ("1000", True)])
def test_a_backend_is_wrapped_if_the_user_asks_for_it(text, is_watched, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_CANARY", text)
    setup = make_setup(Case(name="a", steps=(decode(4),)), fake_platform(), "cpu")
    backend = FakeBackend(setup.context)
    watched = Chooser.canary("attnmux-vllm", LOGGER)(backend, None, {})
    assert isinstance(watched, RequestCanary) is is_watched
    assert (watched is backend) is not is_watched


def test_without_attnmux_testing_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_CANARY", "1000")
    monkeypatch.delattr(importlib.import_module("attnmux"), "testing", raising=False)
    monkeypatch.setitem(sys.modules, "attnmux.testing", None)
    with pytest.raises(InvalidInput, match=r'ATTNMUX_CANARY.*pip install "attnmux-vllm\[canary\]"'):
        Chooser.canary("attnmux-vllm", LOGGER)


@pytest.mark.parametrize("text", ["-1", "0.01", "often"])
def test_other_values_are_refused(text, monkeypatch) -> None:
    monkeypatch.setenv("ATTNMUX_CANARY", text)
    with pytest.raises(SettingsError, match=r"ATTNMUX_CANARY.*a number of steps"):
        Chooser.canary("attnmux-vllm", LOGGER)
