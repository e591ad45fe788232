"""The backends of kernel libraries on their emulators, by name, for suites that run anywhere."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from attnmux.amd import CARDS as AMD_CARDS
from attnmux.amd import AiterMLAKernels
from attnmux.ascend import CARDS as ASCEND_CARDS
from attnmux.core import AttentionBackend, BackendContext, InvalidInput, Platform
from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    KernelLibrary,
    PlainConvolutions,
    StatePool,
    one_of,
)
from attnmux.cpu import FlexAttentionBackend
from attnmux.emulators import flex_attention
from attnmux.emulators.ascend import KERNELS as ASCEND_KERNELS
from attnmux.emulators.intel.amx import KERNELS as AMX_KERNELS
from attnmux.emulators.intel.xpu import KERNELS as XPU_KERNELS
from attnmux.emulators.nvidia import flashinfer as flashinfer_emulator
from attnmux.emulators.nvidia.cutlass_mla import VllmOperators
from attnmux.emulators.nvidia.fa3_operators import FlashAttn3, VllmFA3
from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute
from attnmux.emulators.nvidia.flash_mla import flash_mla, sgl_kernel
from attnmux.emulators.nvidia.flash_mla.vllm import FlashMLAExtension, FlashMLAOperators
from attnmux.intel import CARDS as INTEL_CARDS
from attnmux.nvidia import CARDS as NVIDIA_CARDS
from attnmux.nvidia import (
    CHUNKS,
    SINKS,
    SINKS_OF_MIXED_DIMS,
    CausalConvolutions,
    ConvKernels,
    CutlassMLAKernels,
    FA3Kernels,
    FA4Kernels,
    FlashInferKernels,
    GDNKernels,
    RecurrenceKernels,
    TRTLLMMHAKernels,
    TRTLLMMLAKernels,
    cutlass_of_vllm,
    dense_from_flash_mla,
    dense_from_sgl_kernel,
    dense_of_vllm,
    fa3_of_flash_attn,
    fa3_of_vllm,
    from_flashinfer,
)
from attnmux.testing import Candidate, find_candidate

CARDS: Mapping[str, BackendCard] = {
    card.name: card for card in (*AMD_CARDS, *ASCEND_CARDS, *INTEL_CARDS, *NVIDIA_CARDS)
}

HOPPER, BLACKWELL = "nvidia:sm90,cuda=13.0", "nvidia:sm100,cuda=13.0"

XE2 = "intel:xe2"

FEW = 4
"""Programs of a kernel, which the interpreter runs one after the other."""

NVIDIA = "attnmux.emulators.nvidia"


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """One backend on its emulator."""

    make: Callable[[], Candidate]
    page_sizes: tuple[int, ...] = (1, 16)
    """Tokens of a page that its card admits, for the cases of suites."""
    is_interpreted: bool = False
    """Whether its kernels run through Triton's interpreter, which is slow."""


@contextmanager
def emulated(name: str) -> Iterator[Candidate]:
    """The backend of that name in `EMULATED`, for use within the context.

    Raises InvalidInput for an unknown name, and ImportError where the emulator needs a package that
    is not installed.
    """
    found = EMULATED.get(name)
    if found is None:
        raise InvalidInput("backend", got=repr(name), expected=f"one of {', '.join(EMULATED)}")
    with ExitStack() as stack:
        if found.is_interpreted:
            from attnmux.emulators import triton_interpreter  # noqa: PLC0415  # where there is a Triton

            stack.enter_context(triton_interpreter.interpreted())
        yield found.make()


def _adapted(
    platform: str, card: BackendCard | str, kernels: object, *page_sizes: int, **options: int
) -> Emulation:
    """The adapter itself, without the trial of its library. card: or its name."""
    card = CARDS[card] if isinstance(card, str) else card
    library: KernelLibrary[Any, Any] = pkgutil.resolve_name(card.factory)

    def adapted(context: BackendContext, given: Mapping[str, object]) -> Any:  # noqa: ANN401  # of any class
        return library.backend(context, given, kernels)

    found = Candidate(
        card=replace(card, requires=()),
        plugin=library.address.partition("/")[0],
        platform=Platform.parse(platform),
        device="cpu",
        options=options,
        factory=adapted,
    )
    return Emulation(make=lambda: found, page_sizes=page_sizes)


def _flex_attention() -> Candidate:
    """With the clauses of GPUs, which have LSE, sinks and graphs."""
    found = find_candidate("flex_attention", device="cpu")
    shapes = ("head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
    clauses = tuple(
        replace(
            clause,
            kind=one_of("mha", "mla"),
            **dict.fromkeys(("vendor", "version", *shapes), ANY),
        )
        for clause in found.card.clauses
        if not clause.vendor.admits("cpu")
    )

    def made(context: BackendContext, options: Mapping[str, Any]) -> AttentionBackend:
        return FlexAttentionBackend(context, options, kernels=flex_attention.emulated)

    return replace(found, card=replace(found.card, clauses=clauses), factory=made)


def _triton() -> Candidate:
    from attnmux.triton import TRITON, TritonBackend  # noqa: PLC0415  # where there is a Triton

    return Candidate(
        card=replace(TRITON, requires=()),
        plugin="triton",
        platform=Platform.parse(HOPPER),
        device="cpu",
        factory=lambda context, options: TritonBackend(context, options, compute_units=FEW),
    )


def _aiter() -> Candidate:
    from attnmux.emulators.amd.aiter import aiter_kernels  # noqa: PLC0415  # where there are Triton and an AITER

    return _adapted("amd:gfx942", "aiter", aiter_kernels()).make()


def _vllm_xpu() -> Candidate:
    from attnmux.emulators.intel.vllm_xpu import KERNELS  # noqa: PLC0415  # where there is the package

    return _adapted(XE2, "vllm_xpu", KERNELS).make()


def _cute(arch: int) -> FA4Kernels:
    return FA4Kernels(flash_attn_varlen_func=FlashAttnCute(arch=arch).flash_attn_varlen_func)


def without_features(card: BackendCard, lacks: frozenset[str]) -> BackendCard:
    """The card of FlashAttention 3 without what a build of it lacks, for suites."""
    clauses = []
    for clause in card.clauses:
        of_mixed_dims = clause.v_head_dim is not NONE
        if clause.sinks is not NONE and (
            SINKS in lacks or (SINKS_OF_MIXED_DIMS in lacks and of_mixed_dims)
        ):
            continue
        clauses.append(replace(clause, attention_chunk=NONE) if CHUNKS in lacks else clause)
    return replace(card, clauses=tuple(clauses))


FA3_OF_VLLM = fa3_of_vllm(VllmFA3.fwd, VllmFA3.get_scheduler_metadata)
FA3_OF_FLASH_ATTN = fa3_of_flash_attn(FlashAttn3.fwd, FlashAttn3.get_scheduler_metadata)
SGL_FLASH_ATTN = KernelLibrary.imported(FA3Kernels, f"{NVIDIA}.sgl_flash_attn")
WRAPPERS = KernelLibrary.imported(FlashInferKernels, f"{NVIDIA}.flashinfer")
LATENT_WRAPPERS = from_flashinfer(flashinfer_emulator)
GENERATED = KernelLibrary.imported(
    TRTLLMMHAKernels,
    f"{NVIDIA}.flashinfer.trtllm_decode",
    f"{NVIDIA}.flashinfer.trtllm_prefill",
)
GENERATED_LATENT = KernelLibrary.imported(TRTLLMMLAKernels, f"{NVIDIA}.flashinfer.trtllm_mla")
ASSEMBLED = KernelLibrary.imported(AiterMLAKernels, "attnmux.emulators.amd.aiter_mla")
CUTLASS = KernelLibrary.imported(CutlassMLAKernels, f"{NVIDIA}.cutlass_mla")
CUTLASS_OF_VLLM = cutlass_of_vllm(
    VllmOperators.sm100_cutlass_mla_decode, VllmOperators.sm100_cutlass_mla_get_workspace_size
)
RECURRENCE = KernelLibrary.imported(RecurrenceKernels, f"{NVIDIA}.flashinfer.gdn")
CONVOLUTIONS = KernelLibrary.imported(ConvKernels, f"{NVIDIA}.causal_conv1d")
GATED = GDNKernels(
    recurrence=RECURRENCE,
    convolutions=lambda context: CausalConvolutions(StatePool.of(context), CONVOLUTIONS),
)
GATED_ALONE = GDNKernels(
    recurrence=RECURRENCE,
    convolutions=lambda context: PlainConvolutions(StatePool.of(context)),
)
FLASH_MLA, OF_SGL_KERNEL = dense_from_flash_mla(flash_mla), dense_from_sgl_kernel(sgl_kernel)
FLASH_MLA_OF_VLLM = dense_of_vllm(
    FlashMLAOperators.dense_decode_fwd,
    FlashMLAExtension.fwd_kvcache_mla_fp8,
    FlashMLAExtension.get_mla_decoding_metadata_dense_fp8,
)

EMULATED: Mapping[str, Emulation] = MappingProxyType(
    {
        "aiter": Emulation(make=_aiter, page_sizes=(16,), is_interpreted=True),
        "aiter_mla": _adapted("amd:gfx942", "aiter_mla", ASSEMBLED, 1, 16),
        "aiter_mla_prefill": _adapted("amd:gfx942", "aiter_mla_prefill", ASSEMBLED, 1, 16),
        "ascend": _adapted("ascend:910b", "ascend", ASCEND_KERNELS, 16, 128),
        "cutlass_mla": _adapted(BLACKWELL, "cutlass_mla", CUTLASS, 128),
        "cutlass_mla-vllm": _adapted(BLACKWELL, "cutlass_mla", CUTLASS_OF_VLLM, 128),
        "fa3": _adapted(HOPPER, "fa3", SGL_FLASH_ATTN, 1, 16),
        "fa3-flash_attn_3": _adapted(
            *(HOPPER, without_features(CARDS["fa3"], FA3_OF_FLASH_ATTN.lacks), FA3_OF_FLASH_ATTN),
            *(1, 16),
        ),
        "fa3-vllm": _adapted(
            *(HOPPER, without_features(CARDS["fa3"], FA3_OF_VLLM.lacks), FA3_OF_VLLM), *(1, 16)
        ),
        "fa3_mla-vllm": _adapted(HOPPER, "fa3_mla", FA3_OF_VLLM, 1, 16),
        "fa3_mla": _adapted(HOPPER, "fa3_mla", SGL_FLASH_ATTN, 1, 16),
        "fa4": _adapted(BLACKWELL, "fa4", _cute(100), 16, 128),
        "fa4-hopper": _adapted(HOPPER, "fa4", _cute(90), 128),
        "flashinfer": _adapted(HOPPER, "flashinfer", WRAPPERS, 1, 16),
        "flashinfer_mla": _adapted(HOPPER, "flashinfer_mla", LATENT_WRAPPERS, 1, 64),
        "flashmla": _adapted(HOPPER, "flashmla", OF_SGL_KERNEL, 64),
        "flashmla-vllm": _adapted(HOPPER, "flashmla", FLASH_MLA_OF_VLLM, 64),
        "flashmla-own": _adapted(HOPPER, "flashmla", FLASH_MLA, 64),
        "flex_attention": Emulation(make=_flex_attention),
        "intel_amx": _adapted("cpu:x86_64,features=amx", "intel_amx", AMX_KERNELS, 1, 16),
        "intel_xpu": _adapted(XE2, "intel_xpu", XPU_KERNELS, 16, 64),
        "triton": Emulation(make=_triton, page_sizes=(16,), is_interpreted=True),
        "trtllm_mha": _adapted(
            BLACKWELL, "trtllm_mha", GENERATED, 16, 64, workspace_bytes=64 << 20
        ),
        "trtllm_mla": _adapted(BLACKWELL, "trtllm_mla", GENERATED_LATENT, 32, 64),
        "vllm_xpu": Emulation(make=_vllm_xpu, page_sizes=(64,)),
    }
)
"""Emulations of attention, by the name of the card. After a dash: the card with another
emulator."""

EMULATED_LINEAR: Mapping[str, Emulation] = MappingProxyType(
    {
        "flashinfer_gdn": _adapted(HOPPER, "flashinfer_gdn", GATED),
        "flashinfer_gdn-alone": _adapted(HOPPER, "flashinfer_gdn", GATED_ALONE),
        "sgl_conv": _adapted(HOPPER, "sgl_conv", CONVOLUTIONS),
    }
)
"""Emulations of linear layers, named in the same way."""
