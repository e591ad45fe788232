from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

Script = Callable[..., list[dict[str, Any]]]


Server = subprocess.Popen[str]


@pytest.fixture(scope="session")
def script_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process with the compiler, which has imported what scripts import. Each script finds what
    others have compiled, also those of other workers."""
    base = tmp_path_factory.getbasetemp()
    folder = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("script_server.py"))],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:  # which ends when its input does
        yield server


@pytest.fixture
def script(request: pytest.FixtureRequest, script_server: Server) -> Script:
    """Runs the test's own file as a script with the compiler, and returns the JSON lines that it
    prints: the interpreter and the compiler cannot share a process."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        assert script_server.stdin is not None
        assert script_server.stdout is not None
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
            asked = {"argv": [str(request.path), *arguments], "files": [out.name, errors.name]}
            print(json.dumps(asked), file=script_server.stdin, flush=True)
            status = script_server.stdout.readline().strip()
            assert status == "0", f"{status}: {Path(errors.name).read_text()[-4000:]}"
            return [json.loads(line) for line in Path(out.name).read_text().splitlines()]

    return run


@pytest.fixture(scope="session", autouse=True)
def interpreted() -> Iterator[None]:
    """See `attnmux.emulators.triton_interpreter`."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=0")
    from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton

    with triton_interpreter.interpreted():
        yield
