"""K and V written in one launch, by attnmux-triton's kernel where it is installed.

The pools' own methods copy K and V one after the other, and each of them first into contiguous rows
where it is a slice of a merged projection: two to four launches for each layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch

from attnmux.core import BackendFailed, LibraryBackend, trying

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LayerSpec

K = TypeVar("K")
L = TypeVar("L")
S = TypeVar("S")
B = TypeVar("B")

Save = Callable[..., bool]
"""`KVWriters.save` of attnmux-triton."""


class CudaLibraryBackend(LibraryBackend[K, L, S, B]):
    """A `LibraryBackend` over pools of plain rows: of Q's dtype, or of 8-bit floats."""

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object],
        kernels: K,
        layers: Iterable[LayerSpec] | None = None,
    ) -> None:
        super().__init__(context, options, kernels, layers)
        self._save = fused_save(context)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        if self._save is None or not self._save(k, v, layer, batch, k_rope):
            super().save_kv(k, v, layer, batch, k_rope=k_rope)


def fused_save(context: BackendContext) -> Save | None:
    """The fused writer of the context's pool; None on a CPU and where attnmux-triton or Triton is
    not installed. Warns, and returns None, where Triton does not compile."""
    pool = context.token_to_kv_pool
    stored = [layer for layer in context.layers if layer.layer_id in pool.layer_ids]
    if pool.device.type != "cuda" or not stored:
        return None
    try:
        from attnmux.triton.write import KVWriters  # noqa: PLC0415  # another package's
    except ImportError:
        return None
    writers = KVWriters(pool)
    try:
        with trying("attnmux-triton", pool.device):
            writers.warm_up(stored[0])
    except BackendFailed as error:
        warnings.warn(f"K and V are written without Triton: {error.reason}", stacklevel=2)
        return None
    return writers.save
