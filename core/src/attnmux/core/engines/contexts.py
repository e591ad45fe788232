"""A context and its pools from a decision, so that an engine says heads and dims once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnmux.core.choosing.decision import Decision
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.dtypes import torch_dtype
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.pool import KVPool
from attnmux.core.contract.workspace import Workspace
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.kv.joined import JoinedKVPool
from attnmux.core.kv.request_table import ReqToTokenPool
from attnmux.core.kv.token_pools import MHATokenToKVPool, MLATokenToKVPool


def make_context(
    decision: Decision,
    *,
    layers: Sequence[LayerSpec],
    size: int,
    max_batch_size: int,
    max_context_len: int,
    device: torch.device | str | None = None,
    **fields: Any,  # noqa: ANN401  # of BackendContext
) -> BackendContext:
    """A context for `build`, with a request table, a KV pool and a workspace of its own.

    The pool has the decision's page size and KV dtype, and room for `size` tokens. Layers whose
    heads, dims or KV dtype differ get a `JoinedKVPool`. device: by default the decision's platform
    names it. fields: others of `BackendContext`, such as `launches`, `debug` or, over memory of the
    engine's own, `token_to_kv_pool` and `req_to_token_pool`.

    Raises InvalidInput without layers, PoolExhausted when memory is short.
    """
    place = torch.device(decision.platform.device_type if device is None else device)
    contents: dict[str, Any] = {
        "request": decision.request,
        "platform": decision.platform,
        "device": place,
        "layers": tuple(layers),
        "workspace": Workspace(place),
        "max_batch_size": max_batch_size,
        "max_context_len": max_context_len,
        **fields,
    }
    if "req_to_token_pool" not in contents:
        contents["req_to_token_pool"] = ReqToTokenPool(max_batch_size, max_context_len, place)
    if "token_to_kv_pool" not in contents:
        contents["token_to_kv_pool"] = _pool(decision, layers, size, place)
    return BackendContext(**contents)


def _pool(
    decision: Decision, layers: Sequence[LayerSpec], size: int, device: torch.device
) -> KVPool:
    """A pool for all layers: one for each (heads, dims, KV dtype), joined if there are several."""
    if not layers:
        raise InvalidInput("layers", got="none", expected="at least one")
    shapes: dict[tuple[object, ...], list[LayerSpec]] = {}
    for layer in layers:
        shape = layer.kind, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, layer.kv_dtype
        shapes.setdefault(shape, []).append(layer)
    pools = [_pool_alike(decision, alike, size, device) for alike in shapes.values()]
    return pools[0] if len(pools) == 1 else JoinedKVPool(pools)


def _pool_alike(
    decision: Decision, layers: Sequence[LayerSpec], size: int, device: torch.device
) -> KVPool:
    first = layers[0]
    shape: dict[str, Any] = {
        "size": size,
        "page_size": decision.page_size,
        "dtype": torch_dtype(first.kv_dtype or decision.kv_dtype),
        "layer_ids": [layer.layer_id for layer in layers],
        "device": device,
    }
    if first.kind == "mla":
        rank, rope = first.v_head_dim, first.qk_rope_head_dim
        return MLATokenToKVPool(kv_lora_rank=rank, qk_rope_head_dim=rope, **shape)
    return MHATokenToKVPool(
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        v_head_dim=first.v_head_dim,
        **shape,
    )
