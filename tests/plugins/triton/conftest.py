from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

Script = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where scripts find what others have compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def script(request: pytest.FixtureRequest, compiled_kernels: Path) -> Script:
    """Runs the test's own file as a script with the compiler, and returns the JSON lines that it
    prints: the interpreter and the compiler cannot share a process."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(request.path), *arguments],
            env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(compiled_kernels)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> Iterator[None]:
    """See `attnmux.emulators.triton_interpreter`."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=0")
    from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton

    with triton_interpreter.interpreted():
        yield
