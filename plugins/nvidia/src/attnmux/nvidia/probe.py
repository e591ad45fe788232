"""NVIDIA devices as NVML reports them, without a CUDA context."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType

from attnmux.core import Platform, PluginError

DRIVER_NODE, GUEST_NODE = "/dev/nvidiactl", "/dev/dxg"
"""Device files: of the driver under Linux, and of Windows in WSL for any vendor. Without either,
NVML cannot start."""


def probe() -> list[Platform]:
    """One Platform for each kind of NVIDIA device; [] without the NVIDIA driver.

    The runtime is the newest CUDA that the driver supports, which NVML reports; the toolkit that a
    kernel library was built with is that library's own requirement.

    Raises PluginError where the driver is loaded and does not answer.
    """
    loaded = Path(DRIVER_NODE).exists()
    if not loaded and not Path(GUEST_NODE).exists():
        return []
    import pynvml  # type: ignore[import-untyped]  # noqa: PLC0415  # no types; a machine without the driver does not pay for the import

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND and loaded:
            raise PluginError(
                "the driver is loaded but its library libnvidia-ml.so.1 is missing: "
                "in a container, NVIDIA_DRIVER_CAPABILITIES must include utility"
            ) from error
        if error.value in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            return []
        raise PluginError(f"NVML does not start: {error}") from error
    try:
        return _devices(pynvml)
    except pynvml.NVMLError as error:
        raise PluginError(f"NVML does not answer: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _devices(nvml: ModuleType) -> list[Platform]:
    encoded = nvml.nvmlSystemGetCudaDriverVersion_v2()
    # NVML encodes 12.4 as 12040
    runtime = f"cuda {encoded // 1000}.{encoded % 1000 // 10}"
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    kinds = Counter(_facts(nvml, handle) for handle in handles)
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


def _facts(nvml: ModuleType, handle: object) -> tuple[str, int, int, int]:
    name = nvml.nvmlDeviceGetName(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    # Older bindings return bytes
    name = name.decode() if isinstance(name, bytes) else name
    return name, major, minor, _memory(nvml, handle)


def _memory(nvml: ModuleType, handle: object) -> int:
    """Bytes; 0 where NVML gives none: a GB10 has no memory of its own, and a container with a
    share of a device (MIG) may not query the whole."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
            return 0
        raise
