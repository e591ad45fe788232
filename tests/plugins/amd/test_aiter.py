"""The adapters on AITER's own Triton kernels, through Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from attnmux.amd.aiter import make  # noqa: E402
from attnmux.amd.cards.aiter import AITER  # noqa: E402
from attnmux.core import Platform  # noqa: E402
from attnmux.emulators.amd.aiter import aiter_kernels  # noqa: E402
from attnmux.testing import AttentionBackendTests  # noqa: E402
from attnmux.testing.adapters import AdapterWorld  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted")

WORLD = AdapterWorld(
    library=make,
    kernels=aiter_kernels(),
    platform=Platform.parse("amd:gfx942"),
    settings={"page_size": 16},
)


class TestAiter(AttentionBackendTests):
    backend = WORLD.candidate(AITER)
    page_sizes = (16, 64)
