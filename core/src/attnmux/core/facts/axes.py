"""The axes of choosing: how each value of a request or a platform meets a field of a clause.

A new axis is a row of `AXES`, a field of `Clause` and a field of `Request` (or of `Platform`). The
solver, the explanations, the support matrix and the suite read the row. `values.py` reads a field
by its type, or by its name if the type does not say enough.
"""

from __future__ import annotations

from attnmux.core.facts.axis import PLATFORM, SHAPE, Asked, Axis, Wanted
from attnmux.core.facts.values import DTYPES, KINDS, PHASES, Value

CACHED = frozenset({"extend", "decode", "verify", "draft"})
"""The phases that read the KV cache; a multimodal model's encoder does not."""


def _cached(field: str) -> Wanted:
    """The request's field, demanded in the phases that read the KV cache."""
    return _in_phases(field, *CACHED)


def _in_phases(field: str, *phases: str) -> Wanted:
    def wanted(question: Asked) -> Value | None:
        value: Value | None = getattr(question.request, field)
        return value if question.phase in phases else None

    return wanted


def _drafting(field: str) -> Wanted:
    """The request's field, demanded in the phases that may see drafts: all that read the KV cache,
    except extend if decode's backend verifies. Decode always may, as it makes the drafts."""
    cached = _cached(field)

    def wanted(question: Asked) -> Value | None:
        mode = question.request.speculative_attention_mode
        return None if question.phase == "extend" and mode == "decode" else cached(question)

    return wanted


def _tree_windows(question: Asked) -> Value | None:
    request = question.request
    limited = request.sliding_window is not None or request.attention_chunk is not None
    verifies = question.phase == "verify"
    demanded = verifies and limited and request.has_trees and not request.custom_mask
    return True if demanded else None


def _kind(question: Asked) -> Value:
    return question.request.kind if question.phase in CACHED else "mha"


def _runtime(question: Asked) -> Value | None:
    platform = question.platform
    return platform.runtime if platform.runtime or platform.is_here else None


def _head_dim(question: Asked) -> Value | None:
    """Dim of the heads that the kernel sees: kernels of a latent kind see the latent instead."""
    request = question.request
    if question.phase not in CACHED:
        return request.encoder_head_dim
    return None if request.latent else request.head_dim


def _v_head_dim(question: Asked) -> Value | None:
    request = question.request
    same = request.latent or request.v_head_dim == request.head_dim
    return None if same or question.phase not in CACHED else request.v_head_dim


def _group_size(question: Asked) -> Value | None:
    q_heads, kv_heads = question.request.num_q_heads, question.request.num_kv_heads
    if question.phase not in CACHED or not q_heads or not kv_heads:
        return None
    return q_heads // kv_heads


AXES: tuple[Axis, ...] = (
    Axis(
        name="vendor",
        values="words",
        wanted=lambda q: q.platform.vendor,
        meaning="It runs on devices of other vendors.",
        weight=PLATFORM,
    ),
    Axis(
        name="arch",
        values="words",
        wanted=lambda q: q.platform.arch,
        meaning="It runs on other architectures of this vendor.",
        weight=PLATFORM,
    ),
    Axis(
        name="version",
        values="words",
        wanted=lambda q: ".".join(map(str, q.platform.version)),
        meaning="It needs another compute capability, such as 9.0 for sm90.",
        weight=PLATFORM,
    ),
    Axis(
        name="features",
        values="own",
        wanted=lambda q: q.platform.features,
        meaning="It needs a feature that the device or its host lacks, such as avx2 or a compiler.",
        weight=PLATFORM,
    ),
    Axis(
        name="runtime",
        values="own",
        wanted=_runtime,
        meaning="It needs another version of the device's runtime, such as 12.8.",
        weight=PLATFORM,
    ),
    Axis(
        name="kind",
        values="words",
        wanted=_kind,
        meaning=f"It serves other kinds of attention, of {', '.join(KINDS)}.",
        weight=PLATFORM,
        words=KINDS,
    ),
    Axis(
        name="phase",
        values="words",
        wanted=lambda q: q.phase,
        meaning="It does not serve this phase: extend, decode, verify, draft or encoder.",
        weight=PLATFORM,
        columns={"encoder": ("encoder",)},
        words=PHASES,
    ),
    Axis(
        name="num_q_heads",
        values="numbers",
        wanted=_cached("num_q_heads"),
        meaning="Its kernels do not serve that number of query heads a rank.",
        weight=SHAPE,
        samples=(8, 16, (17, 64), 128),
    ),
    Axis(
        name="num_kv_heads",
        values="numbers",
        wanted=_cached("num_kv_heads"),
        meaning="Its kernels do not serve that number of KV heads a rank.",
        weight=SHAPE,
        samples=(1, 2, (3, 8), (9, 40)),
    ),
    Axis(
        name="group_size",
        values="numbers",
        wanted=_group_size,
        meaning="Its kernels do not serve that number of query heads per KV head.",
        weight=SHAPE,
        samples=(1, 2, (3, 8), (9, 16), (17, 32)),
    ),
    Axis(
        name="head_dim",
        values="numbers",
        wanted=_head_dim,
        meaning="Its kernels do not serve that size of a head of Q and K.",
        weight=SHAPE,
        samples=(16, 64, 80, 128, 256, 512),
    ),
    Axis(
        name="v_head_dim",
        values="numbers",
        wanted=_v_head_dim,
        meaning="Its kernels do not serve heads of V of another size than those of K.",
        is_feature=True,
        weight=SHAPE,
        samples=(64, 128),
    ),
    Axis(
        name="kv_lora_rank",
        values="numbers",
        wanted=_cached("kv_lora_rank"),
        meaning="Its kernels do not serve that size of the latent of MLA.",
        is_feature=True,
        weight=SHAPE,
        samples=(128, 512),
    ),
    Axis(
        name="qk_rope_head_dim",
        values="numbers",
        wanted=_cached("qk_rope_head_dim"),
        meaning="Its kernels do not serve that size of the rotary part of MLA.",
        is_feature=True,
        weight=SHAPE,
        samples=(64,),
    ),
    Axis(
        name="sliding_window",
        values="numbers",
        wanted=_cached("sliding_window"),
        meaning="It does not serve sliding windows, or not of that size.",
        is_feature=True,
        weight=SHAPE,
        columns={"window": (1, 127, 4095, 1 << 20)},
        samples=(1, (2, 63), (64, 511), (512, 4095)),
        tries=(8,),
    ),
    Axis(
        name="attention_chunk",
        values="numbers",
        wanted=_cached("attention_chunk"),
        meaning="It does not serve attention in chunks, or not of that size.",
        is_feature=True,
        weight=SHAPE,
        columns={"chunk": (1, 128, 8192, 1 << 20)},
        samples=(1, (2, 63), (64, 511), (512, 4095)),
        tries=(16,),
    ),
    Axis(
        name="cross_attention",
        values="flag",
        wanted=_cached("cross_attention"),
        meaning="It does not serve cross attention to an encoder's tokens.",
        is_feature=True,
        weight=SHAPE,
        columns={"cross": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="sinks",
        values="flag",
        wanted=_cached("sinks"),
        meaning="It does not serve attention sinks.",
        is_feature=True,
        weight=SHAPE,
        columns={"sinks": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="alibi",
        values="flag",
        wanted=_cached("alibi"),
        meaning="It does not add a bias by distance to the logits (ALiBi), or not together with "
        "the request's other features.",
        is_feature=True,
        weight=SHAPE,
        columns={"ALiBi": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="relative_bias",
        values="flag",
        wanted=lambda q: q.request.relative_bias,
        meaning="It does not add relative position biases to the logits (T5), or not together with "
        "the request's other features.",
        is_feature=True,
        weight=SHAPE,
        columns={"relative bias": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="logit_cap",
        values="numbers",
        wanted=_cached("logit_cap"),
        meaning="It does not serve a soft cap of the logits.",
        is_feature=True,
        weight=SHAPE,
        columns={"logit cap": (0.5, 30.0, 50.0)},
        tries=(30,),
    ),
    Axis(
        name="dtype",
        values="words",
        wanted=lambda q: q.request.dtype,
        meaning="Its kernels do not compute in that dtype.",
        settable=True,
        words=DTYPES,
    ),
    Axis(
        name="kv_dtype",
        values="words",
        wanted=lambda q: q.request.kv_dtype or q.request.dtype if q.phase in CACHED else None,
        meaning="Its kernels do not read K and V stored in that dtype.",
        settable=True,
        decided=True,
        columns={"fp8 KV": ("fp8_e4m3", "fp8_e5m2"), "fp4 KV": ("fp4_e2m1",)},
        words=DTYPES,
    ),
    Axis(
        name="page_size",
        values="numbers",
        wanted=_cached("page_size"),
        meaning="Its kernels do not read KV pages of that size.",
        settable=True,
        droppable=True,
        decided=True,
        samples=(1, (2, 15), 16, (17, 63), 64, (65, 255), 256),
    ),
    Axis(
        name="spec_topk",
        values="numbers",
        wanted=_drafting("spec_topk"),
        meaning="It does not serve draft trees with that many branches a node.",
        is_feature=True,
        settable=True,
        columns={"topk 1": (1,), "topk > 1": (2, 4, 8)},
        samples=(1, 2, 4),
        tries=(1, 4),
    ),
    Axis(
        name="spec_draft_tokens",
        values="numbers",
        wanted=_drafting("spec_draft_tokens"),
        meaning="It does not verify that many draft tokens a request.",
        settable=True,
        samples=(1, (2, 8), (9, 32)),
        tries=(4,),
    ),
    Axis(
        name="tree_windows",
        values="flag",
        wanted=_tree_windows,
        meaning="It does not serve draft trees in layers with windows or attention chunks.",
        is_feature=True,
        columns={"tree windows": (True,)},
        asked_by="spec_topk=4,sliding_window=127",
    ),
    Axis(
        name="custom_mask",
        values="flag",
        wanted=_in_phases("custom_mask", "extend", "verify"),
        meaning="It does not take a mask of the user or of a draft tree.",
        is_feature=True,
        settable=True,
        columns={"custom mask": (True,)},
    ),
    Axis(
        name="multi_item",
        values="flag",
        wanted=_in_phases("multi_item", "extend"),
        meaning="It does not score several items after one shared prefix.",
        is_feature=True,
        settable=True,
        columns={"multi-item": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="deterministic",
        values="flag",
        wanted=lambda q: q.request.deterministic,
        meaning="Its results may depend on the other requests of the batch.",
        is_feature=True,
        settable=True,
        columns={"deterministic": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="graph",
        values="flag",
        wanted=_in_phases("graph", "decode", "verify", "draft"),
        meaning="Its steps cannot be captured in a device graph.",
        is_feature=True,
        settable=True,
        droppable=True,
        columns={"graphs": (True,)},
    ),
    Axis(
        name="lse",
        values="flag",
        wanted=_cached("lse"),
        meaning="It does not return the log-sum-exp of the logits.",
        is_feature=True,
        settable=True,
        columns={"LSE": (True,)},
        samples=(False, True),
    ),
    Axis(
        name="strided_kv",
        values="flag",
        wanted=_cached("strided_kv"),
        meaning="Its kernels do not read a KV cache with gaps between slots or heads.",
        is_feature=True,
        columns={"strided KV": (True,)},
        samples=(False, True),
    ),
)
DECIDED = tuple(axis for axis in AXES if axis.decided)
