"""The request of this integration and its refusals, for the bridge and for `attnmux select`.

SGLang and torch are not imported. The bridge makes a request of SGLang's layers and arguments, the
verb one of a config.json; `asked` completes both and refuses requests that are not served. `launch`
and `install` are the verb's: see `attnmux.core.cli.engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from attnmux.core import InvalidInput, Request

if TYPE_CHECKING:
    from attnmux.core import Decision, Platform

NAME = "attnmux"
"""Name of the attention backend in SGLang."""
SGLANG = "sglang>=0.5.22"
"""The versions of SGLang with the interfaces that this package uses, for pip."""
OTHER = "take another --attention-backend"
DRAFT = "DRAFT"
"""Stands for the draft model, which no request names."""
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of SGLang's --dtype; the first for a model that states none."""


class Refusal(NamedTuple):
    """A need that the integration does not serve."""

    field: str
    """Field of the request."""
    has: Callable[[Request], object]
    expected: str


REFUSALS = (
    Refusal("phases", lambda q: "encoder" in q.phases, "a decoder's, with causal attention"),
    Refusal("kind", lambda q: q.kind not in ("mha", "mla"), "mha or mla"),
    Refusal("cross_attention", lambda q: q.cross_attention, "self-attention"),
    Refusal("alibi", lambda q: q.alibi, "no ALiBi: SGLang's layers have no slopes"),
    Refusal("relative_bias", lambda q: q.relative_bias, "no bias by distance"),
    Refusal("index_block_size", lambda q: q.index_block_size, "layers that see every key"),
    Refusal("other_layers", lambda q: q.other_layers, "the same heads and dims in all layers"),
    Refusal("compressed_layers", lambda q: q.compressed_layers, "layers that see tokens alone"),
    Refusal("linear_layers", lambda q: q.linear_layers, "softmax attention in all layers"),
    Refusal("kv_dtype", lambda q: q.kv_dtype == "fp4_e2m1", "8 bits or more: no 4-bit pools"),
)
"""The first that holds is the error."""

UNASKED = ("sparse", "max_error", "chunked_prefix", "lse", "strided_kv", "parts")
"""Fields that no option of SGLang sets: the bridge never asks for them."""


def refuse(request: Request) -> None:
    """Raise InvalidInput for a need that is not served."""
    for refusal in REFUSALS:
        if refusal.has(request):
            got = _said(getattr(request, refusal.field))
            raise InvalidInput(refusal.field, got=got, expected=f"{refusal.expected}: {OTHER}")


def asked(request: Request, *, captures: bool) -> Request:
    """The request that is solved. captures: whether SGLang captures decode steps.

    SGLang encodes images by backends of its own. Raises InvalidInput for features that are not
    served.
    """
    decoding = request
    if request.multimodal:
        decoding = request.replace(origin="model", multimodal=False, encoder_head_dim=None)
    refuse(decoding)
    trees: dict[str, Any] = {"custom_mask": True} if request.has_trees else {}
    if request.has_trees and request.page_size is None:
        trees["page_size"] = 1
    if request.has_trees and (request.page_size or 1) > 1:
        expected = "1 with draft trees: SGLang reads pages of trees with its own backends alone"
        raise InvalidInput("page_size", got=request.page_size, expected=expected)
    made = decoding.replace(origin="model", **trees)
    return made.replace(origin="platform", graph=True) if captures and not made.graph else made


def ask(request: Request, platform: Platform) -> Request:
    """The request that the bridge makes for a model with this one.

    Raises InvalidInput for requests that the bridge refuses, and for fields that no option of
    SGLang states.
    """
    on_cpu = platform.device_type == "cpu"
    if request.custom_mask and not request.has_trees:
        expected = "none without draft trees (spec_topk above 1)"
        raise InvalidInput("custom_mask", got=True, expected=expected)
    if request.graph and on_cpu:
        raise InvalidInput("graph", got=True, expected="none: SGLang captures no steps on a CPU")
    if request.dtype is None:  # SGLang's own default depends on the model's class
        request = request.replace(origin="default", dtype=DTYPES[0])
    if request.dtype not in DTYPES:
        raise InvalidInput("dtype", got=request.dtype, expected=f"one of {', '.join(DTYPES)}")
    made = asked(request, captures=not on_cpu)
    for name in UNASKED:
        if getattr(request, name):
            expected = "none with --engine: no option of SGLang states it"
            raise InvalidInput(name, got=_said(getattr(request, name)), expected=expected)
    _kv_words(request.kv_dtype or request.dtype, request.dtype, platform)
    _phase_words(made)
    _draft_words(made, platform)
    return made


def launch(
    decision: Decision, model: str, *, tp: int = 1, kv_dtype_skip: str | None = None
) -> list[str]:
    """The server's command. Raises InvalidInput as `ask` does."""
    request, platform = decision.request, decision.platform
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    if platform.device_type != "cuda":
        words += ["--device", platform.device_type]
    words += [*_phase_words(request), "--page-size", str(decision.page_size)]
    if tp > 1:
        words += ["--tp-size", str(tp)]
    words += ["--dtype", str(request.dtype)]
    words += _kv_words(decision.kv_dtype, request.dtype, platform)
    if request.deterministic:
        words.append("--enable-deterministic-inference")
    if request.multi_item:
        words.append("--enable-mis")
    if request.two_batches:
        words.append("--enable-two-batch-overlap")
    if not request.graph and platform.device_type != "cpu":
        words.append("--disable-decode-cuda-graph")
    return [*words, *_draft_words(request, platform)]


def install(decision: Decision, plugins: Sequence[str]) -> list[str]:
    """SGLang of PyPI is built for CUDA: for other devices, its own guide installs it first."""
    is_cuda = decision.platform.vendor == "nvidia"
    return [*([SGLANG] if is_cuda else []), "attnmux-sglang", *plugins]


def _phase_words(request: Request) -> list[str]:
    """The flag of the phases that attnmux serves: all, or the side of prefill or of decode."""
    speculates = ("verify", "draft") if request.spec_topk else ()
    by_decode = request.speculative_attention_mode == "decode"
    sides: Mapping[tuple[str, ...], str] = {
        ("extend", "decode", *speculates): "--attention-backend",
        ("extend", *(() if by_decode else speculates)): "--prefill-attention-backend",
        ("decode", *(speculates if by_decode else ())): "--decode-attention-backend",
    }
    if request.phases not in sides:
        expected = " or ".join("+".join(phases) for phases in sides)
        raise InvalidInput("phases", got="+".join(request.phases), expected=expected)
    return [sides[request.phases], NAME]


def _kv_words(kv_dtype: str | None, dtype: str | None, platform: Platform) -> list[str]:
    """--kv-cache-dtype. SGLang's fp8_e4m3 is the device's own form of it, and the only 8-bit
    format of an AMD GPU."""
    if kv_dtype is None or kv_dtype == dtype != "bfloat16":
        return []
    e4m3 = "fp8_e4m3fnuz" if platform.arch.startswith("gfx94") else "fp8_e4m3"
    words = {"bfloat16": "bfloat16", e4m3: "fp8_e4m3"}
    if platform.vendor not in ("amd", "cpu"):
        words["fp8_e5m2"] = "fp8_e5m2"
    if kv_dtype not in words:
        expected = f"the dtype of the model, {', '.join(words)}"
        raise InvalidInput("kv_dtype", got=kv_dtype, expected=f"{expected}, on {platform.arch}")
    return ["--kv-cache-dtype", words[kv_dtype]]


def _draft_words(request: Request, platform: Platform) -> list[str]:
    """The flags of an EAGLE head. A tree has as few levels as its tokens need; another backend
    drafts it, since its branches have no rows in the request table."""
    topk, tokens = request.spec_topk, request.spec_draft_tokens
    if topk is None:
        return []
    if tokens is None or tokens < 2:
        expected = "2 or more with spec_topk: --speculative-num-draft-tokens"
        raise InvalidInput("spec_draft_tokens", got=tokens, expected=expected)
    levels = 1 + ceil(max(tokens - 1 - topk, 0) / topk**2)
    words = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", DRAFT]
    words += ["--speculative-eagle-topk", str(topk)]
    words += ["--speculative-num-draft-tokens", str(tokens)]
    words += ["--speculative-num-steps", str(levels)]
    if request.speculative_attention_mode == "decode":
        words += ["--speculative-attention-mode", "decode"]
    if topk > 1:
        if platform.device_type not in ("cuda", "xpu"):
            expected = f"1 on {platform.device_type}, where no backend of SGLang drafts trees"
            raise InvalidInput("spec_topk", got=topk, expected=expected)
        words += ["--speculative-draft-attention-backend", "triton"]
    return words


def _said(value: object) -> str:
    """A request's value in an error."""
    if not isinstance(value, tuple):
        return str(value)
    counted = (
        f"{item[1]} of {item[0]}" if isinstance(item, tuple) else str(item) for item in value
    )
    return " and ".join(counted)
