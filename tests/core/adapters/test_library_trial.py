"""A trial ends when its launches have."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import BackendFailed
from attnmux.core.plugin import KernelLibrary


@pytest.mark.parametrize("device", ["cuda", "xpu", "privateuseone:1"])
def test_an_error_that_a_launch_reports_late_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    waited = []

    def synchronize(given: torch.device) -> None:
        waited.append(given)
        raise RuntimeError("device lost\nand much more")

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    with (
        pytest.raises(BackendFailed, match="device lost; build it"),
        KernelLibrary.trying("acme/fast", torch.device(device), hint="build it"),
    ):
        pass
    assert waited == [torch.device(device)]


def test_nothing_is_waited_for_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: pytest.fail("on a CPU"))
    with KernelLibrary.trying("acme/fast", torch.device("cpu")):
        pass
