"""Drafts attend to their prefixes and to each other: the kernel, and the plain operations."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnmux.core import LayerSpec
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.parts import DraftKeys, SeenPrefixes, Trees, attend_to_drafts, prefix_context
from attnmux.parts.draft_trees import TreeAttnBackend
from attnmux.testing import (
    Candidate,
    Case,
    GraphFakeBackend,
    decode,
    fake_card,
    fake_platform,
    run_case,
    verify,
)
from attnmux.testing.cases.standard import in_graphs

pytest.importorskip("triton")

from attnmux.core.plugin import ANY, Clause
from attnmux.triton.functions.draft_attention import (  # where there is a Triton
    MOST_DRAFTS,
    TritonDraftAttention,
    make_attention,
)

PREFIX = 5
SLOTS = 300


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Trees of random shapes over prefixes of PREFIX tokens, of which the last has none."""

    size: int = 3
    width: int = 6
    most: int = 6
    """Drafts that the rows of the prefixes have room for."""
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int, int] = (64, 0, 64)
    """Of Q, its rotary part and V."""
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    cap: float = 0.0
    sinks: bool = False
    strided: bool = False

    def layer(self) -> LayerSpec:
        (heads, groups), (d, rope, dv) = self.heads, self.dims
        return LayerSpec(
            layer_id=0,
            kind="mla" if rope else "mha",
            tp_q_head_num=heads,
            tp_k_head_num=groups,
            tp_v_head_num=groups,
            qk_head_dim=d + rope,
            v_head_dim=dv,
            scaling=0.2,
            logit_cap=self.cap,
            sinks=torch.randn(heads) if self.sinks else None,
        )


SETTINGS = {
    "plain": Setting(),
    "one draft": Setting(width=1, most=1),
    "fewer drafts than room": Setting(width=3, most=7),
    "many drafts": Setting(width=33, most=33, size=2, heads=(2, 1)),
    "bfloat16": Setting(dtype=torch.bfloat16),
    "float16, odd dims": Setting(dtype=torch.float16, dims=(80, 0, 72), heads=(12, 4)),
    "wide": Setting(dims=(200, 0, 136), heads=(3, 3), dtype=torch.bfloat16),
    "float32 in the pool": Setting(dtype=torch.bfloat16, kv_dtype=torch.float32),
    "e4m3": Setting(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, scales=(0.5, 2.0)),
    "e5m2": Setting(dtype=torch.float16, kv_dtype=torch.float8_e5m2, scales=(2.0, 0.25)),
    "cap": Setting(cap=2.0),
    "sinks": Setting(sinks=True),
    "strided": Setting(strided=True),
    "latent": Setting(dims=(160, 32, 160), heads=(5, 1), dtype=torch.bfloat16),
    "latent, e4m3": Setting(
        dims=(64, 16, 64),
        heads=(16, 1),
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        scales=(0.5, 0.5),
    ),
}
KERNELS = {"triton": TritonDraftAttention(), "plain": attend_to_drafts}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def seed(record_property: Any) -> int:
    """Fresh at each run; the report of a failure has it."""
    drawn = random.randrange(1 << 30)
    record_property("seed", drawn)
    torch.manual_seed(drawn)
    return drawn


def visible_of(setting: Setting) -> torch.Tensor:
    """Random trees: each draft sees itself and what its parent sees."""
    visible = torch.eye(setting.width, dtype=torch.bool).repeat(setting.size, 1, 1)
    for rows in visible:
        for draft in range(1, setting.width):
            rows[draft] |= rows[random.randrange(draft)]
    return visible


def softmax(
    logits: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [Hq, T, n] and values [Hq, n, Dv] in float64: [T, Hq, Dv] and LSE [T, Hq]."""
    if sinks is not None:
        sink = sinks.double().view(-1, 1, 1).expand(-1, logits.shape[1], 1)
        logits = torch.cat((logits, sink), -1)
        values = torch.cat((values, torch.zeros_like(values[:, :1])), 1)
    lse = logits.logsumexp(-1)
    shares = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num(0.0)
    return (shares @ values).transpose(0, 1), lse.t()


def made(setting: Setting) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """The arguments of a call, and what it has to return: out and LSE, float64."""
    layer, (heads, groups), (d, rope, dv) = setting.layer(), setting.heads, setting.dims
    size, width, dtype = setting.size, setting.width, setting.dtype
    columns = 2 if setting.strided else 1
    shape = size * width, heads, columns * (d + rope)
    q = torch.randn(shape).to(dtype)[..., ::columns]
    if rope:
        q = q[..., : d + rope]
    kv_dtype = setting.kv_dtype or dtype
    k, v = (torch.randn(SLOTS, groups, dim).to(kv_dtype) for dim in (d + rope, dv))
    v = k[..., :dv] if rope else v
    slots = torch.randperm(SLOTS)[: size * width]
    visible, sees = visible_of(setting), torch.ones(size, dtype=torch.bool)
    sees[-1] = False
    prefix_k, prefix_v = (
        torch.randn(size, PREFIX, groups, d + rope),
        torch.randn(size, PREFIX, groups, dv),
    )
    keys = DraftKeys(k=k, v=v, slots=slots, k_scale=setting.scales[0], v_scale=setting.scales[1])

    seen_out = torch.full((size, setting.most, heads, dv), torch.nan, dtype=dtype)
    seen_lse = torch.full((size, setting.most, heads), torch.nan)
    outs, lses = [], []
    for one in range(size):
        rows = slice(one * width, (one + 1) * width)
        own_q = q[rows].double().transpose(0, 1)
        parts = (
            (prefix_k[one].double(), prefix_v[one].double()),
            (
                k[slots[rows]].double() * setting.scales[0],
                v[slots[rows]].double() * setting.scales[1],
            ),
        )
        logits, values = [], []
        for some_k, some_v in parts:
            some_k, some_v = (
                each.transpose(0, 1).repeat_interleave(heads // groups, 0)
                for each in (some_k, some_v)
            )
            found = own_q @ some_k.transpose(1, 2) * layer.scaling
            logits.append(torch.tanh(found / setting.cap) * setting.cap if setting.cap else found)
            values.append(some_v)
        logits[1] = torch.where(visible[one], logits[1], -torch.inf)
        if sees[one]:
            out, lse = softmax(logits[0], values[0], layer.sinks)
            seen_out[one, :width], seen_lse[one, :width] = out.to(dtype), lse.float()
        else:
            logits[0] = torch.full_like(logits[0], -torch.inf)
        out, lse = softmax(torch.cat(logits, -1), torch.cat(values, 1), layer.sinks)
        outs.append(out)
        lses.append(lse)
    flat = size * setting.most
    seen = SeenPrefixes(
        out=SeenPrefixes.as_heads(
            seen_out.view(flat, heads, dv), groups, setting.most, setting.most
        ),
        lse=SeenPrefixes.as_heads(
            seen_lse.view(flat, heads, 1), groups, setting.most, setting.most
        ).squeeze(2),
    )
    lens = torch.full((size,), PREFIX, dtype=torch.int32)
    trees = Trees(lens=lens, positions=lens.long() - 1, sees_prefix=sees, visible=visible)
    given = {"keys": keys, "seen": seen, "trees": trees, "layer": layer}
    given |= {"q": q[..., :d], "q_rope": q[..., d:]} if rope else {"q": q}
    return given, torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_answers_are_those_of_one_softmax(setting, kernel) -> None:
    given, expected, expected_lse = made(setting)
    lse = torch.full(given["q"].shape[:2], torch.nan)
    out = kernel(**given, lse=lse)
    assert out.dtype == setting.dtype
    close = {"rtol": TOLERANCE[setting.dtype], "atol": TOLERANCE[setting.dtype]}
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(kernel(**given), out)


def test_lse_of_any_strides() -> None:
    given, _, expected = made(SETTINGS["plain"])
    lse = torch.zeros(*reversed(expected.shape)).t()
    TritonDraftAttention()(**given, lse=lse)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


def test_larger_trees() -> None:
    number = MOST_DRAFTS + 1
    given, expected, _ = made(Setting(width=number, most=number, size=2, dims=(16, 0, 16)))
    found = TritonDraftAttention()(**given)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_step_without_requests() -> None:
    given, _, _ = made(SETTINGS["plain"])
    given["trees"] = replace(given["trees"], visible=given["trees"].visible[:0])
    assert TritonDraftAttention()(**{**given, "q": given["q"][:0]}).shape == (0, 4, 64)


EVERYTHING = fake_card(**dict.fromkeys(Clause.__slots__, ANY))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sinks": True},
        {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 2.0)},
        {
            **{"kind": "mla", "num_q_heads": 4, "num_kv_heads": 1, "head_dim": 48},
            **{"kv_lora_rank": 32, "qk_rope_head_dim": 16},
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_the_composite_with_the_kernel(changes, graph, seed) -> None:
    make = GraphFakeBackend if graph else TorchNativeBackend

    def factory(context: Any, options: Any) -> TreeAttnBackend:
        asked = context.request.replace(custom_mask=False, spec_draft_tokens=8)
        context = replace(context, request=asked)
        return TreeAttnBackend(
            context,
            child=make(context),
            prefixes=make(prefix_context(context)),
            attend=make_attention(context),
        )

    steps = (verify(6, 9, 0, 30), decode(9, 40, 3), verify(6, 30, 11, padding=2))
    case = Case(name="trees", steps=steps, spec_topk=3, page_size=4, lse=True, **changes)
    if graph:
        (case,) = in_graphs([case])
    given = Candidate(card=EVERYTHING, platform=fake_platform(), factory=factory)
    outcome = run_case(given, case, seed=seed)
    assert outcome.status == "passed", (outcome.message, outcome.reasons)
