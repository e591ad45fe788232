"""The fields of a layer that follow from a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.request import Request

NEEDED = ("num_q_heads", "num_kv_heads", "head_dim")
LATENT_NEEDED = ("num_q_heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim")
TENSORS = {
    "sinks": "sinks",
    "alibi": "alibi_slopes",
    "relative_bias": "relative_bias",
    "index_block_size": "index_block_size",
}
"""Features that a request asks for and each layer must state itself, by field of the request."""


def layer_fields(request: Request, given: Iterable[str]) -> dict[str, Any]:
    """The fields of `LayerSpec` for the request's layers, besides their ids.

    given: fields that each layer has for itself. Raises InvalidInput as `LayerSpec.of`.
    """
    _check_describes(request, given)
    rank, rope = request.kv_lora_rank or 0, request.qk_rope_head_dim or 0
    head_dim = request.head_dim or 0
    kv_heads = 1 if request.latent else request.num_kv_heads
    window, chunk = request.sliding_window, request.attention_chunk
    return {
        "kind": "mla" if request.latent else "mha",
        "tp_q_head_num": request.num_q_heads,
        "tp_k_head_num": kv_heads,
        "tp_v_head_num": kv_heads,
        "qk_head_dim": rank + rope if request.latent else head_dim,
        "v_head_dim": rank if request.latent else request.v_head_dim or head_dim,
        "scaling": head_dim**-0.5,
        "sliding_window_size": -1 if window is None else window,
        "attention_chunk_size": chunk or 0,
        "logit_cap": request.logit_cap or 0.0,
    }


def _check_describes(request: Request, fields: Iterable[str]) -> None:
    if request.is_linear or request.kind == "dual_chunk":
        expected = "mha, mla or nsa: write a LayerSpec for layers of other kinds"
        raise InvalidInput("kind", got=request.kind, expected=expected)
    for name in LATENT_NEEDED if request.latent else NEEDED:
        if getattr(request, name) is None:
            raise InvalidInput(f"request.{name}", got=None, expected="a number")
    for asked, field in TENSORS.items():
        if getattr(request, asked) and field not in fields:
            expected = f"{field}=…, since the request has {asked}"
            raise InvalidInput(field, got="none", expected=expected)
