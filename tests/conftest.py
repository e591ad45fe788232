"""Tests ignore the configuration, variables and measurements of this machine's user."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

# Triton reads it when it is imported, which torch's compiler does too
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_sessionstart() -> None:
    """Make the thousands of tests without collecting garbage, which would add half the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the tests out of every later collection of garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unconfigured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests empty folders for caches and settings, and remove our variables.

    The search for a configuration file goes upwards from the working directory. An empty file above
    every test's folder ends it.
    """
    (tmp_path_factory.getbasetemp() / "attnmux.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        for name in list(os.environ):
            if name.startswith("ATTNMUX_"):
                patch.delenv(name)
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield
