"""flashinfer's gated delta rule and sgl_kernel's convolutions, emulated."""

from __future__ import annotations

from attnmux.emulators.candidates import EMULATED
from attnmux.testing import AttentionBackendTests


class TestFlashInferGDNEmulated(AttentionBackendTests):
    backend = EMULATED["flashinfer_gdn"].make()
    sampled = 12


class TestWithoutSglKernel(AttentionBackendTests):
    backend = EMULATED["flashinfer_gdn-alone"].make()
    executions = ("eager",)

    def wants(self, case) -> bool:
        return any(word in case.name for word in ("padding", "bias", "first", "mixed"))
