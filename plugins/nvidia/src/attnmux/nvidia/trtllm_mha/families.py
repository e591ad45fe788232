"""Which kernels serve which devices, by the major number of the compute capability.

As `trtllm_batch_decode_with_kv_cache` dispatches; prefill has no dispatcher of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.trtllm_mha.decode import Decode, GenDecode, XQADecode
from attnmux.nvidia.trtllm_mha.prefill import GenPrefill, Prefill
from attnmux.nvidia.trtllm_mha.staging import StagedPrefill


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The kernels of one kind of device."""

    decode: type[Decode]
    prefill: type[Prefill]


_TILED = Family(decode=XQADecode, prefill=StagedPrefill)
_GENERATED = Family(decode=GenDecode, prefill=GenPrefill)

FAMILIES = {9: _TILED, 10: _GENERATED, 12: _TILED}


def family_of(platform: Platform) -> Family:
    """Raises InvalidInput for a platform that no kernel runs on."""
    major = platform.version[0] if platform.version else None
    if major not in FAMILIES:
        raise InvalidInput(
            "platform", came=platform.arch, expected="compute capability 9, 10 or 12"
        )
    return FAMILIES[major]
