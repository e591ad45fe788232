"""The request in vLLM for a model, and refusals.

The backend asks so for vLLM's layers, and `attnmux select --engine vllm` for a config.json. Imports
neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnmux.core import InvalidInput

if TYPE_CHECKING:
    from attnmux.core import LayerGroup, Platform, Request

KV_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""vLLM's names of 8-bit caches, which it keeps as bytes, and ours."""
PLAIN = ("float32", "float16", "bfloat16")
"""Dtypes of models and of caches."""

REFUSED = {
    "use_sparse": "sparse attention: attnmux has no indexer of vLLM's",
    "use_mm_prefix": "tokens of images that see each other",
    "use_per_head_quant_scales": "scales of K and V for each head",
    "use_non_causal": "attention without causality in a decoder",
    "use_pcp": "prefill context parallelism",
    "use_dcp": "decode context parallelism",
    "use_rswa": "reference sliding windows",
    "use_adaptive_verification": "verification whose lengths only the device knows",
}
"""vLLM's flags for features that no request can express."""

NO_INDEXER = "none: attnmux has no indexer of vLLM's"
NO_OPTION = "none: no option of vLLM asks for it"
UNSERVED = {
    "cross_attention": "self-attention",
    "index_topk": NO_INDEXER,
    "index_block_size": NO_INDEXER,
    "compressed_layers": "layers that see tokens alone",
    "relative_bias": "none: vLLM's layers have no such table",
    "custom_mask": "none: vLLM gives no masks",
    "multi_item": "none: vLLM sends no prompts of several items",
    "two_batches": "none: vLLM's own halves of a step do not reach attention backends",
    "lse": "none: only context parallelism reads it, which is not served",
    "sparse": NO_OPTION,
    "max_error": NO_OPTION,
    "parts": NO_OPTION,
}
"""Fields of a request that no layer of vLLM has, or that are refused, with the expected values."""

OWN = (
    ("multimodal", False),
    ("encoder_head_dim", None),
    ("linear_layers", ()),
    ("linear_head_dim", None),
    ("linear_v_head_dim", None),
)
"""Fields of layers that vLLM's own kernels run, unset."""


def kv_dtype(cache_dtype: str | None, dtype: str) -> str:
    """Our name of vLLM's `kv_cache_dtype`, for a model of that dtype.

    Raises InvalidInput for a format that no KV pool has.
    """
    if cache_dtype in (None, "auto"):
        return dtype
    if cache_dtype in PLAIN:
        return str(cache_dtype)
    if cache_dtype in KV_DTYPES:
        return KV_DTYPES[cache_dtype]
    expected = f"one of {', '.join(('auto', *PLAIN, *KV_DTYPES))}"
    raise InvalidInput("kv_cache_dtype", got=cache_dtype, expected=expected)


def of_layers(request: Request) -> Request:
    """The request of layers as it is made in vLLM.

    K and V of a slot lie side by side, which the latent of MLA does not. Prompts of MLA come with
    the heads' own queries. vLLM cuts the requests of layers with attention chunks at the ends of
    chunks, so that a backend sees none. A window of one token counts as one of two: it demands what
    every window does.
    Raises InvalidInput for what is refused.
    """
    for name, expected in UNSERVED.items():
        if getattr(request, name):
            refuse(name, getattr(request, name), expected)
    if request.kind not in ("mha", "mla"):
        refuse("kind", request.kind, "mha or mla")
    if request.alibi and request.latent:
        refuse("alibi", "slopes in layers of kind mla", "none with MLA")
    stored = {request.kv_dtype, *(group.kv_dtype for group in request.other_layers)}
    for name, values, allowed in (
        ("dtype", {request.dtype}, PLAIN),
        ("kv_dtype", stored, (*PLAIN, *KV_DTYPES.values())),
    ):
        for value in values - {None, *allowed}:
            refuse(name, value, f"one of {', '.join(dict.fromkeys(allowed))}")
    changes: dict[str, Any] = {
        "strided_kv": not request.latent,
        "chunked_prefix": request.latent,
    }
    if request.attention_chunk:
        changes["attention_chunk"] = None
    if request.other_layers:
        changes["other_layers"] = tuple(map(_unchunked, request.other_layers))
    return request.replace(origin="model", **changes)


def window(size: int | None) -> int | None:
    """A request's window for vLLM's, which counts the token itself; None without one."""
    return None if size is None else max(size - 1, 1)


def ask(request: Request, platform: Platform) -> Request:
    """The request in vLLM of a model with this one.

    vLLM's own kernels run a model's encoder of images and its layers without softmax attention.
    Drafts are chains, which are verified as prompts of a few tokens: they demand no phases. Decode
    steps are captured on devices other than a CPU, if a backend can be.
    Raises InvalidInput for what is refused.
    """
    if request.phases == ("encoder",):
        refuse("model", "an encoder", "a decoder")
    if request.dtype is None:  # as vLLM's own default
        request = request.replace(origin="default", dtype="bfloat16")
    if request.origins["phases"] != "default":
        refuse("phases", "+".join(request.phases), "none: vLLM runs prompts and decodes")
    if request.has_trees:
        refuse("spec_topk", request.spec_topk, "1: vLLM drafts chains")
    if request.spec_topk and (request.spec_draft_tokens or 0) < 2:
        expected = "2 or more: the last token and its drafts"
        refuse("spec_draft_tokens", request.spec_draft_tokens, expected)
    if request.speculative_attention_mode != "prefill":
        mode = request.speculative_attention_mode
        refuse("speculative_attention_mode", mode, "prefill: drafts are verified like prompts")
    on_host = platform.device_type == "cpu"
    if on_host and request.graph:
        refuse("graph", True, "no graphs: vLLM captures none on a CPU")
    changes: dict[str, Any] = {name: value for name, value in OWN if getattr(request, name)}
    if request.spec_topk:
        changes["phases"] = ("extend", "decode")
    if not on_host and not request.graph:
        changes["graph"] = True
    return of_layers(request.replace(origin="model", **changes))


def refuse(argument: str, got: object, expected: str) -> None:
    """Raise InvalidInput."""
    raise InvalidInput(argument, got=got, expected=expected)


def _unchunked(group: LayerGroup) -> LayerGroup:
    return replace(group, attention_chunk=None)
