"""The C++ backend."""

from __future__ import annotations

import shutil

import pytest

from attnmux.cpu.native.library import COMPILERS
from attnmux.testing import AttentionBackendTests

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="no C++ compiler is installed"
)


class TestNative(AttentionBackendTests):
    backend = "native"
    device = "cpu"
