"""A platform of SGLang for tests: the CPU, where SGLang's own needs a kernel library that no index
has. Layers run in torch, as on every platform that SGLang does not know."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpu(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(graph_capture=False)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def get_dispatch_key_name(self) -> str:
        return "native"


def activate() -> str:
    return "sglang_plain_cpu.PlainCpu"
