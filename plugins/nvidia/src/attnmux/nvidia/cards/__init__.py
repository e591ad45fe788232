"""The cards of NVIDIA's backends, as data, one module each."""

from __future__ import annotations

from attnmux.core.plugin import BackendCard
from attnmux.nvidia.cards.cutlass_mla import CUTLASS_MLA
from attnmux.nvidia.cards.dual_chunk_flash_attn import DUAL_CHUNK_FLASH_ATTN
from attnmux.nvidia.cards.fa3 import FA3
from attnmux.nvidia.cards.fa3_mla import FA3_MLA
from attnmux.nvidia.cards.fa4 import FA4
from attnmux.nvidia.cards.flashinfer import FLASHINFER
from attnmux.nvidia.cards.flashinfer_gdn import FLASHINFER_GDN
from attnmux.nvidia.cards.flashinfer_mla import FLASHINFER_MLA
from attnmux.nvidia.cards.flashmla import FLASHMLA
from attnmux.nvidia.cards.nsa import NSA
from attnmux.nvidia.cards.nsa_fa3 import NSA_FA3
from attnmux.nvidia.cards.sgl_conv import SGL_CONV
from attnmux.nvidia.cards.trtllm_mha import TRTLLM_MHA
from attnmux.nvidia.cards.trtllm_mla import TRTLLM_MLA

CARDS: tuple[BackendCard, ...] = (
    FA3,
    FA3_MLA,
    FA4,
    FLASHINFER,
    FLASHINFER_MLA,
    FLASHMLA,
    CUTLASS_MLA,
    TRTLLM_MHA,
    TRTLLM_MLA,
    NSA,
    NSA_FA3,
    DUAL_CHUNK_FLASH_ATTN,
    FLASHINFER_GDN,
    SGL_CONV,
)
