from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def interpreted() -> Iterator[None]:
    """Triton's interpreter as a device: see `attnmux.emulators.triton_interpreter`."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=0")
    from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton

    with triton_interpreter.interpreted():
        yield
