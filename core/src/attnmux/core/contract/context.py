"""The context that a backend is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from attnmux.core.facts.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from attnmux.core.contract.batch import ForwardBatch
    from attnmux.core.contract.layer import LayerSpec
    from attnmux.core.contract.pool import KVPool, KVWriter
    from attnmux.core.contract.tables import RequestTable
    from attnmux.core.contract.workspace import Workspace
    from attnmux.core.facts.launches import TunedLaunch
    from attnmux.core.facts.platform import Platform
    from attnmux.core.facts.request import Request


class LinearStates(Protocol):
    """The states of a model's linear layers: a `LinearStatePool`."""

    @property
    def nbytes(self) -> int: ...


class LinearLayers(Protocol):
    """The backend of the linear layers of one kind: a `LinearAttentionBackend`, whose
    `LinearLayerSpec` each call takes."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,  # noqa: ANN401  # its type lies above the contract
        batch: ForwardBatch,
        *,
        g: torch.Tensor,
        beta: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        layer: Any,  # noqa: ANN401  # as above
        batch: ForwardBatch,
        *,
        bias: torch.Tensor | None = None,
        silu: bool = False,
        index: int = 0,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BackendContext:
    """Everything that a backend may use. An engine makes it once."""

    request: Request
    """The decided request: page size and KV dtype are set."""
    platform: Platform
    device: torch.device
    layers: tuple[LayerSpec, ...]
    req_to_token_pool: RequestTable
    token_to_kv_pool: KVPool
    workspace: Workspace
    max_batch_size: int
    max_context_len: int
    launches: tuple[TunedLaunch, ...] = ()
    """Everything that was tuned on this machine, as `TunedLaunch.read` reads it. A factory takes
    its backend's with `TunedLaunch.current`."""
    kv_writer: KVWriter | None = None
    """Writes K and V to the pool in place of the pool's own methods. `build` takes an installed
    plugin's for the device."""
    linear_states: LinearStates | None = None
    """A `LinearStatePool`: the states of the model's linear layers, in rows of the request table.
    None without any."""
    debug: bool = False
    """Run the checks that cost a device synchronisation."""
    _layer_by_id: Mapping[int, LayerSpec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {layer.layer_id: layer for layer in self.layers}
        if len(by_id) != len(self.layers):
            ids = [layer.layer_id for layer in self.layers]
            raise InvalidInput("layers", got=f"ids {ids}", expected="a different id for each")
        object.__setattr__(self, "_layer_by_id", by_id)

    def layer(self, layer_id: int) -> LayerSpec:
        """The layer with that id. Raises InvalidInput for an unknown one."""
        try:
            return self._layer_by_id[layer_id]
        except KeyError:
            expected = f"one of {sorted(self._layer_by_id)}"
            raise InvalidInput("layer_id", got=layer_id, expected=expected) from None

    def kv_pages(self, layer: LayerSpec, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [pages, page_size, Hkv, D] and V [pages, page_size, Hkv, Dv]: views of the pool's
        buffers.

        page_size: the pool's own, or one that divides it.
        """
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return k.view(-1, page_size, *k.shape[1:]), v.view(-1, page_size, *v.shape[1:])

    def latent_pages(self, layer: LayerSpec, page_size: int) -> torch.Tensor:
        """[pages, page_size, 1, rank + rope]: a view of the pool's buffer of a layer of MLA.

        page_size: the pool's own, or one that divides it.
        """
        buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return buffer.view(-1, page_size, *buffer.shape[1:])

    def check_page_size(self, *page_sizes: int) -> None:
        """Raises InvalidInput for a pool of pages of none of the sizes."""
        page_size = self.token_to_kv_pool.page_size
        if page_size not in page_sizes:
            raise InvalidInput(
                "token_to_kv_pool",
                got=f"pages of {page_size} tokens",
                expected=f"pages of {' or '.join(map(str, page_sizes))}",
            )

    def check_sixteen_bits(self) -> None:
        """Raises InvalidInput for a pool of another dtype than the queries' 16-bit one."""
        dtype, wanted = self.token_to_kv_pool.dtype, self.request.dtype
        name = str(dtype).removeprefix("torch.")
        if name not in ("bfloat16", "float16") or wanted not in (None, name):
            raise InvalidInput(
                "token_to_kv_pool",
                got=dtype,
                expected=f"{wanted or 'bfloat16 or float16'}, as the queries are",
            )
