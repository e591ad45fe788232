"""DeepSeek's sparse attention: FlashMLA's sparse prefill kernel for each layer of every step.

The kernel serves decoding too. It reads rows of K by their numbers, and knows neither pages nor
requests: each layer's indexer writes places in a request, which become slots here, on the device.
Q [T, 64 or 128, 576] is latent and rotary part in one row; -1 among the indices is no key; a query
without keys has output 0 and LSE +inf. The kernel allocates its output. FlashMLA's sparse decode
kernel wants rows of 656 bytes, which our pools do not store: rows of e4m3 are widened to bfloat16
for this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnmux.core import BackendFailed, InvalidInput
from attnmux.core.plugin import KernelLibrary, LatentRows, rehearse
from attnmux.nvidia.kernel_rows import FP8, check_bfloat16_or_fp8, latent_layers
from attnmux.nvidia.latent.flashmla_kernels import SPARSE, NSAKernels
from attnmux.nvidia.latent.picked import PickedBackend, lookup_arguments

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, LayerSpec

WIDTH = LatentRows.LATENT_DIM + LatentRows.ROPE_DIM
"""Width of a row of Q and of the cache."""
HEADS = (64, 128)
"""Query heads that the kernels are built for (csrc/api/sparse_prefill.cpp of FlashMLA)."""
TOPK_MULTIPLE = 128
"""Keys of a token are a multiple of it: two blocks of 64 at a time (`2*B_TOPK` in
csrc/sm90/prefill/sparse/phase1.cuh)."""
TOKENS_AT_ONCE = 64
"""Tokens whose rows are widened together: of 2048 keys each that is 151 MB of bfloat16."""
LSE_UNITS = {1.0: math.log(2), math.log(2): 1.0}
"""The factor that makes an LSE natural, and the LSE of two keys of logit 0 if it applies."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NSALayer:
    """A layer's arguments that no step changes."""

    cache: torch.Tensor
    """[slots, 1, 576], the pool's memory."""
    num_heads: int
    kernel_heads: int
    """The same number or more, of HEADS."""
    sm_scale: float
    kv_scale: float
    """The factor of the cache's rows, hence of logits and output; 1 for 16-bit rows."""

    def queries(self, call: AttentionCall) -> torch.Tensor:
        """[T, kernel_heads, 576] bfloat16; heads that the layer lacks are zeros.

        Raises InvalidInput for queries of another dtype.
        """
        q = call.q
        if q.dtype != torch.bfloat16:
            raise InvalidInput("q", got=q.dtype, expected=str(torch.bfloat16))
        if self.kernel_heads == self.num_heads:
            return LatentRows.joined(q, call.q_rope)
        rows = q.new_zeros(q.shape[0], self.kernel_heads, WIDTH)
        rows[:, : self.num_heads, : LatentRows.LATENT_DIM] = q
        rows[:, : self.num_heads, LatentRows.LATENT_DIM :] = call.rotary_queries()
        return rows


class NSABackend(PickedBackend[NSAKernels, NSALayer]):
    """Prefill and decoding of MLA over the keys that an indexer picks."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: NSAKernels
    ) -> None:
        """Launches the kernel once, to measure the base of its LSE.

        Raises InvalidInput for layers and pools that the kernels do not serve, BackendFailed for an
        LSE of another base than e or 2.
        """
        super().__init__(context, options, kernels, latent_layers(context))
        self._lse_unit = self._measured_lse_unit()

    def prepare_layer(self, layer: LayerSpec) -> NSALayer:
        check_bfloat16_or_fp8(self.context)
        kernel_heads = next((heads for heads in HEADS if layer.tp_q_head_num <= heads), None)
        if kernel_heads is None:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"{layer.tp_q_head_num} query heads",
                expected=f"at most {HEADS[-1]}",
            )
        pool = self.context.token_to_kv_pool
        kv_scale, _ = pool.read_scales(layer.k_scale, None)
        return NSALayer(
            cache=pool.get_key_buffer(layer.layer_id),
            num_heads=layer.tp_q_head_num,
            kernel_heads=kernel_heads,
            sm_scale=layer.scaling,
            kv_scale=kv_scale,
        )

    def over_pool(self, call: AttentionCall, layer: NSALayer, slots: torch.Tensor) -> torch.Tensor:
        return self._attend_to(call, layer, layer.cache, slots)

    def over_call(self, call: AttentionCall, layer: NSALayer, rows: torch.Tensor) -> torch.Tensor:
        assert call.k is not None  # as has_own_kv says
        return self._attend_to(call, layer, LatentRows.joined(call.k, call.k_rope), rows)

    def _attend_to(
        self, call: AttentionCall, layer: NSALayer, cache: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Attention over the rows `places` [T, topk] int32 of cache [n, 1, 576]; -1 is none."""
        scale = layer.kv_scale if cache is layer.cache else 1.0
        queries, heads, lse = layer.queries(call), layer.num_heads, call.lse
        parts = []
        for tokens, kv, rows in _picked(cache, places):
            result, _, kernels_lse = self.kernels.flash_mla_sparse_fwd(
                queries if tokens is None else queries[tokens],
                kv,
                rows,
                layer.sm_scale * scale,
                LatentRows.LATENT_DIM,
                **self.kernels.constants,
            )
            parts.append(result[:, :heads] if heads < layer.kernel_heads else result)
            if lse is not None:
                self._store_lse(kernels_lse, lse if tokens is None else lse[tokens])
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        if scale != 1:
            attended = attended * scale
        return attended if call.out is not None else attended.contiguous()

    def _store_lse(self, source: torch.Tensor, lse: torch.Tensor) -> None:
        """The kernel's LSE [t, kernel heads] to the caller's [t, Hq]."""
        source = source[:, : lse.shape[1]]
        lse.copy_(torch.where(source.isposinf(), -torch.inf, source * self._lse_unit))

    def _measured_lse_unit(self) -> float:
        """The factor that makes the kernel's LSE a natural logarithm.

        The kernels write natural logarithms. The binding of sgl_kernel 0.4.5 multiplies them by
        log2 e (csrc/python_api.cpp of its FlashMLA), and sgl-flash-mla 1.0.0 does so when asked. So
        the first layer's heads attend to two keys of logit 0, whose LSE is ln 2 or log2 2.
        """
        layer, device = next(iter(self._layers.values())), self.context.device
        rows = torch.full((1, 1, TOPK_MULTIPLE), -1, dtype=torch.int32, device=device)
        rows[..., :2] = torch.arange(2, device=device)
        _, _, lse = self.kernels.flash_mla_sparse_fwd(
            torch.zeros(1, layer.kernel_heads, WIDTH, dtype=torch.bfloat16, device=device),
            torch.zeros(2, 1, WIDTH, dtype=torch.bfloat16, device=device),
            rows,
            layer.sm_scale,
            LatentRows.LATENT_DIM,
            **self.kernels.constants,
        )
        measured = float(lse[0, 0])
        for unit, expected in LSE_UNITS.items():
            if math.isclose(measured, expected, rel_tol=1e-3):
                return unit
        raise BackendFailed(
            "nvidia/nsa", f"two keys of logit 0 have LSE {measured:.4f}, neither ln 2 nor log2 2"
        )


def _picked(
    cache: torch.Tensor, places: torch.Tensor
) -> Iterator[tuple[slice | None, torch.Tensor, torch.Tensor]]:
    """Stretches of tokens, None for all, with their kv [n, 1, 576] and indices [t, 1, topk].

    The kernel reads rows of bfloat16. Of a cache of e4m3 the rows that were picked are widened, one
    stretch after the other.
    """
    missing = -places.shape[1] % TOPK_MULTIPLE
    if missing:
        places = pad(places, (0, missing), value=-1)
    if cache.dtype != FP8:
        yield None, cache, places.unsqueeze(1)
        return
    for start in range(0, len(places), TOKENS_AT_ONCE):
        part = places[start : start + TOKENS_AT_ONCE]
        # As bytes: torch does not gather 8-bit floats on every device.
        rows = cache.view(torch.uint8)[part.clamp(min=0).flatten()].view(FP8)
        order = torch.arange(len(rows), dtype=torch.int32, device=part.device).view_as(part)
        own_rows = torch.where(part < 0, -1, order).unsqueeze(1)
        yield slice(start, start + len(part)), rows.bfloat16(), own_rows


def _with_lookup(
    context: BackendContext, options: Mapping[str, object], kernels: NSAKernels
) -> NSABackend:
    backend = NSABackend(context, options, kernels)  # first, since it may not run here
    backend.kernels = replace(kernels, **lookup_arguments(context))
    return backend


make = KernelLibrary(
    address="nvidia/nsa",
    backend=_with_lookup,
    providers=SPARSE,
    trial=rehearse,
)
