"""The NVML probe on a fake `pynvml` that answers like the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from attnmux.core import Platform, PluginError
from attnmux.nvidia import probe as module
from attnmux.nvidia.plugin import attnmux_platforms

H200 = ("NVIDIA H200", (9, 0), 150_754_820_096)
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0), 85_899_345_920)
NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST = 3, 4, 15


class Nvml(ModuleType):
    """The functions that the probe calls; `devices` as (name, capability, memory)."""

    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NO_PERMISSION

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def __init__(self, devices=(), cuda=12080, init=0, query=0) -> None:
        super().__init__("pynvml")
        self.devices, self.cuda, self.init, self.query = devices, cuda, init, query
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init:
            raise self.NVMLError(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        if self.query:
            raise self.NVMLError(self.query)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.devices[handle][0]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.devices[handle][1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        memory = self.devices[handle][2]
        if isinstance(memory, self.NVMLError):
            raise memory
        return SimpleNamespace(total=memory)


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    """Replaces `pynvml` by a fake, on a machine with the driver."""
    monkeypatch.setattr(module, "DRIVER_NODE", str(tmp_path / "nvidiactl"))
    monkeypatch.setattr(module, "GUEST_NODE", str(tmp_path / "dxg"))

    def use(node: str = "nvidiactl", **given) -> Nvml:
        (tmp_path / node).touch()
        fake = Nvml(**given)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return use


def test_one_platform_for_each_kind(nvml) -> None:
    fake = nvml(devices=(H200, H200, A100))
    hopper, ampere = attnmux_platforms()
    assert hopper == Platform(
        vendor="nvidia",
        device_type="cuda",
        arch="sm90",
        version=(9, 0),
        runtime="cuda 12.8",
        name="NVIDIA H200",
        count=2,
        memory_bytes=150_754_820_096,
    )
    assert (ampere.arch, ampere.count) == ("sm80", 1)
    assert fake.open == 0


def test_a_two_digit_minor_and_an_older_binding(nvml) -> None:
    nvml(devices=((b"NVIDIA GB10", (12, 1), Nvml.NVMLError(NOT_SUPPORTED)),), cuda=13000)
    (found,) = attnmux_platforms()
    assert (found.name, found.arch, found.runtime) == ("NVIDIA GB10", "sm121", "cuda 13.0")
    assert found.arch == Platform.parse("nvidia:sm121").arch
    assert found.version == Platform.parse("nvidia:sm121").version
    assert found.memory_bytes == 0


def test_memory_that_may_not_be_queried_is_unknown(nvml) -> None:
    name, capability, _ = H200
    nvml(devices=((name, capability, Nvml.NVMLError(NO_PERMISSION)),))
    assert [(found.arch, found.memory_bytes) for found in attnmux_platforms()] == [("sm90", 0)]
    fake = nvml(devices=((name, capability, Nvml.NVMLError(GPU_IS_LOST)),))
    with pytest.raises(PluginError, match="does not answer: code 15"):
        attnmux_platforms()
    assert fake.open == 0


def test_no_devices(nvml) -> None:
    fake = nvml()
    assert attnmux_platforms() == []
    assert fake.open == 0


@pytest.mark.parametrize(("node", "code"), [("nvidiactl", 9), ("dxg", 9), ("dxg", 12)])
def test_no_driver_is_no_device(nvml, node, code) -> None:
    nvml(node, init=code)
    assert attnmux_platforms() == []


def test_a_driver_without_its_library_is_an_error_with_a_remedy(nvml) -> None:
    nvml(init=12)
    with pytest.raises(PluginError, match="NVIDIA_DRIVER_CAPABILITIES must include utility"):
        attnmux_platforms()


def test_a_linux_guest_of_windows(nvml) -> None:
    nvml("dxg", devices=(H200,))
    assert [found.arch for found in attnmux_platforms()] == ["sm90"]


def test_without_the_driver_the_library_is_not_imported(monkeypatch) -> None:
    monkeypatch.setattr(module, "DRIVER_NODE", "/nonexistent/nvidiactl")
    monkeypatch.setattr(module, "GUEST_NODE", "/nonexistent/dxg")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert attnmux_platforms() == []


def test_a_driver_that_does_not_start_or_answer_is_an_error(nvml) -> None:
    nvml(init=18)
    with pytest.raises(PluginError, match="does not start: code 18"):
        attnmux_platforms()
    fake = nvml(devices=(H200,), query=15)
    with pytest.raises(PluginError, match="does not answer: code 15"):
        attnmux_platforms()
    assert fake.open == 0


def test_the_fake_has_the_names_of_the_real_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in vars(Nvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(pynvml, name)
        if name.startswith("NVML_"):
            assert getattr(pynvml, name) == getattr(Nvml, name)
    assert pynvml.NVML_ERROR_GPU_IS_LOST == GPU_IS_LOST
