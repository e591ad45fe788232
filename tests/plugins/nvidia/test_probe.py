"""The NVML probe on a fake `pynvml` that answers like the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from attnmux.core import AttnmuxError, Platform
from attnmux.nvidia import probe as module
from attnmux.nvidia.plugin import attnmux_platforms

T4, A6000 = ("Tesla T4", (7, 5), 16_106_127_360), ("NVIDIA RTX A6000", (8, 6), 51_527_024_640)
H200 = ("NVIDIA H200", (9, 0), 150_754_820_096)
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0), 85_899_345_920)
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, GPU_IS_LOST = 3, 4, 6, 15
CORES = {"Tesla T4": 2560, "NVIDIA RTX A6000": 10752}


class Nvml(ModuleType):
    """The functions that the probe calls; `devices` as (name, capability, memory)."""

    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_NO_PERMISSION = NO_PERMISSION
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def __init__(self, devices=(), cuda=12080, init=0, query=0, instances=None) -> None:
        """instances: by device, the name and memory of each instance of MIG."""
        super().__init__("pynvml")
        self.devices, self.cuda, self.init, self.query = devices, cuda, init, query
        self.instances = instances or {}
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

    def nvmlDeviceGetName(self, handle) -> str:
        return self._of(handle)[0]

    def _of(self, handle):
        if isinstance(handle, int):
            return self.devices[handle]
        gpu, place = handle
        name, memory = self.instances[gpu][place]
        return name, None, memory

    def nvmlDeviceGetUUID(self, handle) -> str:
        return f"GPU-{handle}a" if isinstance(handle, int) else "MIG-{}b{}".format(*handle)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle not in self.instances:
            raise self.NVMLError(NOT_SUPPORTED)
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> tuple[int, int]:
        if place >= len(self.instances[handle]):
            raise self.NVMLError(NOT_FOUND)
        return handle, place

    def nvmlDeviceGetGpuInstanceId(self, handle: tuple[int, int]) -> int:
        return 7 + handle[1]

    def nvmlDeviceGetComputeInstanceId(self, handle: tuple[int, int]) -> int:
        return 0

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return CORES[self.devices[handle][0]]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return 1590

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return self.devices[handle][1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        memory = self._of(handle)[2]
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

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
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
    with pytest.raises(AttnmuxError, match="does not answer: code 15"):
        attnmux_platforms()
    assert fake.open == 0


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("0", ["sm86"]),  # the faster one is CUDA's first
        ("1", ["sm75"]),
        ("1,0", ["sm75", "sm86"]),
        ("GPU-1", ["sm86"]),
        ("GPU-0a,GPU-1a", ["sm75", "sm86"]),
        ("GPU-0a,1", ["sm75"]),
        ("GPU-", []),  # begins both
        ("GPU-2", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["sm86"]),
        ("0,2,1", ["sm86"]),
        ("0,0", []),
        ("GPU-0,GPU-0", []),
    ],
)
def test_hidden_devices_do_not_count(nvml, monkeypatch, text, archs) -> None:
    nvml(devices=(T4, A6000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert [found.arch for found in attnmux_platforms()] == archs


def test_the_order_of_the_bus_is_the_user_s_to_set(nvml) -> None:
    nvml(devices=(T4, A6000))
    variables = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [found.arch for found in module.probe(variables)] == ["sm75"]


def test_one_of_eight_counts_as_one(nvml) -> None:
    nvml(devices=(H200,) * 8)
    assert [found.count for found in module.probe({"CUDA_VISIBLE_DEVICES": "3"})] == [1]
    assert [found.count for found in module.probe({"CUDA_VISIBLE_DEVICES": "0,1,5"})] == [3]
    assert [found.count for found in module.probe()] == [8]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "A100 1g.10gb"),
        ("0", "NVIDIA A100-SXM4-80GB"),
        ("1", "A100 1g.10gb"),
        ("0,1", "A100 1g.10gb"),
        ("MIG-1b1", "A100 2g.20gb"),
        ("MIG-1b1,MIG-1b0", "A100 2g.20gb"),
        ("MIG-GPU-1a/8/0", "A100 2g.20gb"),
        ("GPU-1a", "A100 1g.10gb"),
        ("MIG-2", None),
    ],
)
def test_cuda_shows_one_instance_of_a_gpu(nvml, text, found) -> None:
    instances = {1: [("A100 1g.10gb", 10), ("A100 2g.20gb", 20)]}
    nvml(devices=(A100, A100), instances=instances)
    platforms = module.probe({} if text is None else {"CUDA_VISIBLE_DEVICES": text})
    assert [(one.name, one.arch, one.count) for one in platforms] == (
        [(found, "sm80", 1)] if found else []
    )


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
    with pytest.raises(AttnmuxError, match="NVIDIA_DRIVER_CAPABILITIES must include utility"):
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
    with pytest.raises(AttnmuxError, match="does not start: code 18"):
        attnmux_platforms()
    fake = nvml(devices=(H200,), query=15)
    with pytest.raises(AttnmuxError, match="does not answer: code 15"):
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
