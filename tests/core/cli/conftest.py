"""Verbs run where no configuration reaches them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def unconfigured(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ATTNMUX_"):
            monkeypatch.delenv(name)
