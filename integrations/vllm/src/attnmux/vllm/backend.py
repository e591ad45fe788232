"""The classes that vLLM asks for: the backend and its metadata builder."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import (
    get_current_vllm_config,
    get_layers_from_vllm_config,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from attnmux.core import AttnmuxError, Chooser, NoBackend
from attnmux.vllm.asking import REFUSED
from attnmux.vllm.group import Group, Step
from attnmux.vllm.impls import Impl
from attnmux.vllm.layers import Asked, request_of, specs_of
from attnmux.vllm.plugin import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from attnmux.core import Request


class AttnmuxBackend(AttentionBackend):
    """Every backend of attnmux, for MHA, GQA and MLA layers alike."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = []
    """Empty: vLLM asks `validate_configuration` alone."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[AttnmuxMetadataBuilder]:
        return AttnmuxMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The page size that the solver chooses for the layers; the default if any will do."""
        config = get_current_vllm_config()
        chooser = Chooser.here(config.device_config.device_type)
        decide = chooser.decide_with_graphs if _captures(config) else chooser.decide
        try:
            sizes = [decide(request).page_size for request in _requests(config, _layers(config))]
        except NoBackend:  # which the metadata builder raises with the page size that is used
            sizes = []
        wanted = math.lcm(*sizes)
        return wanted if wanted > 1 else default_block_size

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Slot after slot, with the heads of a slot next to each other."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(  # vLLM's arguments, by name
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        attn_type: str = AttentionType.DECODER,
        has_sliding_window: bool = False,
        use_batch_invariant: bool = False,
        **others: Any,  # noqa: ANN401  # flags and facts that no request has
    ) -> list[str]:
        """The solver's reasons; empty if a backend serves this."""
        reasons = [text for name, text in REFUSED.items() if others.get(name)]
        if attn_type != AttentionType.DECODER:
            reasons.append(f"attention of type {attn_type}: only decoders' is served")
        if reasons:
            return reasons
        config = get_current_vllm_config()
        asked = Asked(
            head_size=head_size,
            dtype=dtype,
            cache_dtype=kv_cache_dtype,
            block_size=block_size,
            use_mla=use_mla,
            has_sink=has_sink,
            has_sliding_window=has_sliding_window,
            batch_invariant=use_batch_invariant,
        )
        try:
            chooser = Chooser.here(config.device_config.device_type)
            # vLLM asks before it loads weights
            chooser.decide(asked.request(config)).begin_ahead(chooser.offers)
        except AttnmuxError as refusal:
            return [line.strip() for line in str(refusal).splitlines() if line.strip()]
        return []


class AttnmuxMetadataBuilder(AttentionMetadataBuilder[Step]):
    """The metadata of one KV cache group, whose backend is chosen and rehearsed at once. It gets
    vLLM's caches at the first step: they are bound after all builders are made."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Raises ValueError with the solver's reasons if no backend serves the layers."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._group = self._decided()
        self._is_bound = False
        if self._group.expands:
            # Prompts come last in a step
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Decode steps of one token a request if a backend's card declares graphs, and without
        debugging, whose checks synchronise."""
        chooser = Chooser.here(vllm_config.device_config.device_type)
        if chooser.debug:
            return AttentionCGSupport.NEVER
        # Layers of other heads or KV dtypes may share a group, whose spec then has one for each
        specs = getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values()
        layers = _layers(vllm_config)
        alike = [
            layer
            for layer in layers
            if any(_is_alike(layer.get_kv_cache_spec(vllm_config), spec) for spec in specs)
        ]
        page_size = kv_cache_spec.block_size
        try:
            for request in _requests(vllm_config, alike or layers, page_size):
                if not chooser.decide_with_graphs(request).request.graph:
                    return AttentionCGSupport.NEVER
        except NoBackend:  # which the builder raises
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        return self._bound(common_attn_metadata).step(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        return self._bound(common_attn_metadata).step(common_attn_metadata, in_capture=True)

    def _decided(self) -> Group:
        config = self.vllm_config
        found = get_layers_from_vllm_config(config, AttentionLayerBase, self.layer_names)
        try:
            return Group(
                {name: found[name] for name in self.layer_names},
                config,
                max_num_reqs=_max_num_reqs(config, self.kv_cache_spec),
                page_size=self.kv_cache_spec.block_size,
                graphs=_captures(config),
                device=self.device,
            )
        except AttnmuxError as refusal:
            raise ValueError(f"--attention-backend {NAME}: {refusal}") from refusal

    def _bound(self, common: CommonAttentionMetadata) -> Group:
        if not self._is_bound:
            # vLLM adds the other layers of a drafter to the list after it made the builder
            if list(self._group.layers) != self.layer_names:
                self._group = self._decided()
            self._group.bind(common.block_table_tensor.shape[1])
            self._is_bound = True
        return self._group


def _captures(config: VllmConfig) -> bool:
    """Whether vLLM captures whole decode steps."""
    return bool(config.compilation_config.cudagraph_mode.has_full_cudagraphs())


def _max_num_reqs(config: VllmConfig, spec: KVCacheSpec) -> int:
    """Requests of a step. vLLM cuts those of chunked attention at the ends of chunks."""
    scheduler = config.scheduler_config
    requests: int = scheduler.max_num_seqs
    chunk = getattr(spec, "attention_chunk_size", None)
    return requests if chunk is None else 2 * requests + scheduler.max_num_batched_tokens // chunk


def _layers(config: VllmConfig) -> list[Any]:
    """The layers that attnmux serves."""
    found = get_layers_from_vllm_config(config, AttentionLayerBase).values()
    return [layer for layer in found if issubclass(layer.get_attn_backend(), AttnmuxBackend)]


def _requests(
    config: VllmConfig, layers: list[Any], page_size: int | None = None
) -> Iterator[Request]:
    """Each request that layers make, once."""
    device, known = torch.device(config.device_config.device_type), []
    for layer in layers:
        request = request_of(
            [layer], specs_of([layer], device), dtype=config.model_config.dtype, page_size=page_size
        )
        if request not in known:
            known.append(request)
            yield request


def _is_alike(one: KVCacheSpec | None, spec: KVCacheSpec) -> bool:
    """Whether two caches are of one kind and dtype."""
    return type(one) is type(spec) and getattr(one, "dtype", None) == getattr(spec, "dtype", None)
