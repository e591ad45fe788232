"""NVIDIA devices as NVML reports them, without a CUDA context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from attnmux.core import AttnmuxError, Platform
from attnmux.core.plugin import visible_devices

DRIVER_NODE, GUEST_NODE = "/dev/nvidiactl", "/dev/dxg"
"""Device files: of the driver under Linux, and of Windows in WSL for any vendor. Without either,
NVML cannot start."""


class Device(NamedTuple):
    """A device as CUDA counts: a GPU, or an instance of a GPU in MIG mode."""

    handle: Any
    gpu: Any
    """NVML's handles."""


def probe(variables: Mapping[str, str] = {}) -> list[Platform]:
    """One Platform for each kind of NVIDIA device that CUDA shows; [] without the NVIDIA driver.

    variables: those of the environment that hide devices.

    The runtime is the newest CUDA that the driver supports, which NVML reports; the toolkit that a
    kernel library was built with is that library's own requirement.

    Raises AttnmuxError if the driver is loaded and does not answer.
    """
    loaded = Path(DRIVER_NODE).exists()
    if not loaded and not Path(GUEST_NODE).exists():
        return []
    import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415  # no types; a machine without the driver does not pay for the import

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and loaded:
            raise AttnmuxError(
                "the driver is loaded but its library libnvidia-ml.so.1 is missing: "
                "in a container, NVIDIA_DRIVER_CAPABILITIES must include utility"
            ) from error
        if error.value in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            return []
        raise AttnmuxError(f"NVML does not start: {error}") from error
    try:
        return _platforms(pynvml, variables)
    except pynvml.NVMLError as error:
        raise AttnmuxError(f"NVML does not answer: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _platforms(nvml: ModuleType, variables: Mapping[str, str]) -> list[Platform]:
    encoded = nvml.nvmlSystemGetCudaDriverVersion_v2()
    # NVML encodes 12.4 as 12040
    runtime = f"cuda {encoded // 1000}.{encoded % 1000 // 10}"
    kinds = Counter(_facts(nvml, device) for device in _visible(nvml, variables))
    return [
        Platform(
            vendor="nvidia",
            device_type="cuda",
            arch=f"sm{major}{minor}",
            version=(major, minor),
            runtime=runtime,
            name=name,
            count=count,
            memory_bytes=memory,
            core_count=0,
        )
        for (name, major, minor, memory), count in kinds.items()
    ]


def _visible(nvml: ModuleType, variables: Mapping[str, str]) -> list[Device]:
    """The devices that CUDA shows to this process.

    With instances among them it shows the first one alone: "Device Enumeration" of NVIDIA's guide
    to MIG.
    """
    text = variables.get("CUDA_VISIBLE_DEVICES")
    gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if text is not None and text.startswith("MIG-"):
        instances = [instance for gpu in gpus for instance in _instances(nvml, gpu)]
        return visible_devices(text, instances, lambda one: _instance_ids(nvml, one))[:1]
    if text and variables.get("CUDA_DEVICE_ORDER", "").upper() != "PCI_BUS_ID":
        gpus = _fastest_first(nvml, gpus)
    gpus = visible_devices(text, gpus, lambda gpu: (_text(nvml.nvmlDeviceGetUUID(gpu)),))
    instances = [instance for gpu in gpus for instance in _instances(nvml, gpu)]
    return instances[:1] or [Device(gpu, gpu) for gpu in gpus]


def _instances(nvml: ModuleType, gpu: object) -> list[Device]:
    """The instances of a GPU in MIG mode that this process may use."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:  # most GPUs have no such mode
        return []
    instances = []
    if mode == nvml.NVML_DEVICE_MIG_ENABLE:
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with suppress(nvml.NVMLError):  # none in this place, or withheld from the container
                instances.append(Device(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place), gpu))
    return instances


def _instance_ids(nvml: ModuleType, one: Device) -> tuple[str, str]:
    """An instance's own UUID, and its name before driver 470."""
    numbers = (nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId)
    places = "/".join(str(number(one.handle)) for number in numbers)
    own, whole = (_text(nvml.nvmlDeviceGetUUID(handle)) for handle in one)
    return own, f"MIG-{whole}/{places}"


def _fastest_first(nvml: ModuleType, gpus: Sequence[Any]) -> list[Any]:
    """CUDA's own order; NVML's is that of the PCI bus.

    CUDA does not document how it estimates speed: here it is the cores times their clock. `build`
    compares the architecture with torch's.
    """

    def speed(gpu: object) -> int:
        try:
            clock = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
            return int(nvml.nvmlDeviceGetNumGpuCores(gpu)) * int(clock)
        except nvml.NVMLError:
            return 0

    if len({_text(nvml.nvmlDeviceGetName(gpu)) for gpu in gpus}) == 1:
        return list(gpus)
    return sorted(gpus, key=speed, reverse=True)


def _facts(nvml: ModuleType, device: Device) -> tuple[str, int, int, int]:
    name = _text(nvml.nvmlDeviceGetName(device.handle))
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device.gpu)
    return name, major, minor, _memory(nvml, device.handle)


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _memory(nvml: ModuleType, handle: object) -> int:
    """Bytes; 0 if NVML gives none: a GB10 has no memory of its own, and a container with a
    share of a device (MIG) may not query the whole."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
            return 0
        raise
