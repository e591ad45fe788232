"""The adapters that `adapters.py` measures, by the backend's name."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.adapter_flash_attention import FA3, FA3_MLA, FA4
from benchmarks.adapter_flash_mla import FLASHMLA, NSA
from benchmarks.adapter_flashinfer import FLASHINFER, FLASHINFER_MLA
from benchmarks.adapter_sides import Adapter
from benchmarks.adapter_trtllm import TRTLLM_MHA

ADAPTERS: Mapping[str, Adapter] = {
    "fa3": FA3,
    "flashinfer": FLASHINFER,
    "trtllm_mha": TRTLLM_MHA,
    "fa4": FA4,
    "fa3_mla": FA3_MLA,
    "flashinfer_mla": FLASHINFER_MLA,
    "flashmla": FLASHMLA,
    "nsa": NSA,
}
