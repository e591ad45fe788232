"""DeepSeek's sparse attention by FlashAttention 3 on Hopper.

Every token is a request of one query: its row of the page table names the slots that were picked,
as pages of one token, and its length is their number. So one call serves prefill and decoding, over
pages of any size. Logits are those of `fa3_mla`: `q` and K are rotary parts, `qv` and V the rest. A
token without keys has output 0 and LSE -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attnmux.core.plugin import KernelLibrary, Rows, rehearse, topk_slots
from attnmux.nvidia.fa3.layers import KV, FA3Kernels, read_num_splits, rotary_and_latent
from attnmux.nvidia.fa3.providers import providers_of
from attnmux.nvidia.kernel_rows import by_request, latent_layers, store_lse
from attnmux.nvidia.latent.picked import PickedBackend, lookup_arguments
from attnmux.nvidia.listed_keys import listed

if TYPE_CHECKING:
    import torch

    from attnmux.core import AttentionCall, BackendContext, LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class NSAFA3Kernels:
    """The functions of each layer."""

    flash_attn_with_kvcache: Callable[..., Any]
    """Attention over a paged cache, of FlashAttention 3."""
    topk_slots: Callable[..., torch.Tensor] = topk_slots
    """Makes slots of an indexer's picks, as `attnmux.core.topk_slots`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NSAFA3Layer:
    """A layer's arguments that no step changes."""

    slots: KV
    """K [slots, 1, 1, 64] and V [slots, 1, 1, 512]: the pool's memory in pages of one token."""
    arguments: dict[str, Any]
    """By the library's names."""


class NSAFA3Backend(PickedBackend[NSAFA3Kernels, NSAFA3Layer]):
    """Prefill and decoding of MLA over the keys that an indexer picks, in 16 bits."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: NSAFA3Kernels
    ) -> None:
        """Raises InvalidInput for options, layers and pools that the kernels do not serve."""
        self._num_splits = read_num_splits(context, options)
        super().__init__(context, options, kernels, latent_layers(context))

    def prepare_layer(self, layer: LayerSpec) -> NSAFA3Layer:
        self.context.check_sixteen_bits()
        return NSAFA3Layer(
            slots=rotary_and_latent(self.context, layer, 1),
            arguments={
                "softmax_scale": layer.scaling,
                "causal": False,  # the indexer picks what a token sees
                "window_size": (-1, -1),
                "attention_chunk": 0,
                "softcap": 0.0,
                "num_splits": self._num_splits,
            },
        )

    def over_pool(
        self, call: AttentionCall, layer: NSAFA3Layer, slots: torch.Tensor
    ) -> torch.Tensor:
        return self._attend_to(call, layer, layer.slots, slots)

    def over_call(
        self, call: AttentionCall, layer: NSAFA3Layer, rows: torch.Tensor
    ) -> torch.Tensor:
        assert call.k is not None  # as has_own_kv says
        assert call.k_rope is not None
        kv = Rows.aligned(call.k_rope).unsqueeze(1), Rows.aligned(call.k).unsqueeze(1)
        return self._attend_to(call, layer, kv, rows)

    def _attend_to(
        self, call: AttentionCall, layer: NSAFA3Layer, kv: KV, places: torch.Tensor
    ) -> torch.Tensor:
        """Attention over the pages of one token `places` [T, topk] int32 of kv; -1 is none."""
        if not places.shape[1]:
            return call.empty_result()
        table, lens = listed(places, places >= 0)
        out = call.out if call.out is not None and Rows.is_aligned(call.out) else None
        result = self.kernels.flash_attn_with_kvcache(
            by_request(Rows.aligned(call.rotary_queries()), 1),
            *kv,
            qv=by_request(Rows.aligned(call.q), 1),
            cache_seqlens=lens,
            page_table=table,
            out=by_request(out, 1),
            return_softmax_lse=call.lse is not None,
            **layer.arguments,
        )
        if call.lse is not None:
            result, lse, *_ = result
            store_lse(lse, call.lse, 1)
        attended: torch.Tensor = result.squeeze(1) if out is None else out
        return attended


def of_fa3(library: FA3Kernels) -> NSAFA3Kernels:
    """A build's kernels."""
    return NSAFA3Kernels(flash_attn_with_kvcache=library.flash_attn_with_kvcache)


def _with_lookup(
    context: BackendContext, options: Mapping[str, object], kernels: NSAFA3Kernels
) -> NSAFA3Backend:
    return NSAFA3Backend(context, options, replace(kernels, **lookup_arguments(context)))


make = KernelLibrary(
    address="nvidia/nsa_fa3",
    backend=_with_lookup,
    providers=providers_of(of_fa3),
    trial=rehearse,
)
