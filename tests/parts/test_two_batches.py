"""A step in two halves: the answers of the whole step, eagerly and from graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import (
    ForwardContext,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    ModelInput,
    Platform,
    Plugins,
    Policy,
    build,
    solve,
)
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import KernelLibrary
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.parts.two_batches import TboAttnBackend
from attnmux.testing import (
    Case,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
    verify,
)

FA3 = KernelLibrary.imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn")
LATENT = {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
STEPS = {
    "decode": (decode(40, 3, 17, 9, 25), {}, 2),
    "decode one": (decode(40), {}, 0),
    "decode padding": (decode(40, 3, 17, padding=2), {}, 2),
    "extend": (extend((0, 40), (3, 5), (16, 7), (2, 30)), {}, 1),
    "extend one": (extend((5, 20)), {}, 0),
    "extend nothing new": (extend((8, 0), (4, 0)), {}, 0),
    "extend trailing": (extend((3, 9), (2, 9), (0, 9), padding=1, trailing=3), {}, 2),
    "mixed": (extend((3, 30), (20, 1), (9, 1), mode=ForwardMode.MIXED), {}, 1),
    "items": (extend((2, 20), (3, 19), items=((5, 9), (7, 4))), {}, 1),
    "draft extend": (extend((8, 4), (3, 2), (9, 2), mode=ForwardMode.DRAFT_EXTEND), {}, 1),
    "verify chain": (verify(4, 9, 30, 3), {"spec_topk": 1}, 1),
    "verify trees": (verify(4, 9, 30, 3, 12, 5), {"spec_topk": 3}, 2),
    "verify one tree": (verify(4, 9), {"spec_topk": 3}, 0),
    "window": (decode(40, 3, 17), {"windows": (8, None)}, 1),
    "latent": (extend((6, 9), (2, 13)), LATENT, 1),
    "idle": (extend(mode=ForwardMode.IDLE), {}, 0),
}
"""A step, the case's settings, and the requests of the first half."""


def case_of(step, **changes) -> Case:
    given = {"dtype": "float32", "page_size": 4, "windows": (None,), "deterministic": True}
    return Case(name="halves", steps=(step,), **{**given, **changes})


def tbo(context, make=TorchNativeBackend) -> TboAttnBackend:
    return TboAttnBackend(make(context), (make(context), make(context)))


def attend(backend, given, batch, rows=slice(None), **changes) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE of the tokens `rows` of a step; `changes` replace fields of the batch."""
    k, v, q_rope, k_rope = (
        None if each is None else each[rows]
        for each in (given.k, given.v, given.q_rope, given.k_rope)
    )
    q = given.q[rows]
    lse = torch.empty(q.shape[:2])
    batch = replace(batch, **changes)
    out = backend.forward(q, k, v, given.layer, batch, q_rope=q_rope, k_rope=k_rope, lse=lse)
    return out, lse


def in_halves(backend, given, batch) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = batch.tbo_children
    middle = first.num_tokens
    parts = [
        attend(backend, given, first, slice(0, middle)),
        attend(backend, given, second, slice(middle, None)),
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def check_halves(case: Case, make=TorchNativeBackend, **given) -> None:
    """The halves' answers have the bits of the whole step's, and so has the same step whole."""
    setup = make_setup(case, fake_platform(), "cpu")
    step = prepare_step(setup, case.steps[0], **given)
    alone, backend = make(setup.context), tbo(setup.context, make)
    batch = step.batch.with_halves()
    alone.init_forward_metadata(step.batch)
    backend.init_forward_metadata(batch)
    rows = slice(0, step.num_request_tokens)
    for each in step.inputs:
        expected = attend(alone, each, step.batch)
        for found in (in_halves(backend, each, batch), attend(backend, each, batch)):
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours[rows], theirs[rows], rtol=0, atol=0)


@pytest.mark.parametrize("host_lens", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_halves_have_the_bits_of_the_whole_step(name, host_lens) -> None:
    step, changes, _ = STEPS[name]
    check_halves(case_of(step, **changes), host_lens=host_lens)


@pytest.mark.parametrize("name", STEPS)
def test_where_a_step_is_cut(name) -> None:
    step, changes, requests = STEPS[name]
    setup = make_setup(case_of(step, **changes), fake_platform(), "cpu")
    batch = prepare_step(setup, step).batch
    first, second = batch.with_halves().tbo_children
    assert (first.batch_size, second.batch_size) == (requests, batch.batch_size - requests)
    assert first.num_tokens + second.num_tokens == batch.num_tokens
    for half in (first, second):
        assert half.tbo_children == ()
        if half.batch_size:
            assert half.forward_mode is batch.forward_mode
        else:
            assert half.forward_mode is ForwardMode.IDLE
            assert half.actual_forward_mode is batch.forward_mode


def test_a_substituted_mode_is_kept_in_an_empty_half() -> None:
    """As a rank without requests has that runs the others' decode step."""
    setup = make_setup(case_of(decode(5)), fake_platform(), "cpu")
    batch = prepare_step(setup, decode(5)).batch
    first, second = replace(batch, actual_forward_mode=ForwardMode.IDLE).with_halves().tbo_children
    assert first.actual_forward_mode is second.actual_forward_mode is ForwardMode.IDLE
    assert second.forward_mode is ForwardMode.DECODE


requests = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=7)


@settings(deadline=None, max_examples=25)
@given(requests=requests, mode=st.sampled_from(["EXTEND", "MIXED", "DRAFT_EXTEND"]))
def test_random_extends(requests, mode) -> None:
    check_halves(case_of(extend(*requests, mode=ForwardMode[mode])))


@settings(deadline=None, max_examples=15)
@given(lens=st.lists(st.integers(1, 40), min_size=1, max_size=7), padding=st.integers(0, 2))
def test_random_decodes(lens, padding) -> None:
    check_halves(case_of(decode(*lens, padding=padding)))


@settings(deadline=None, max_examples=15)
@given(
    lens=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    draft=st.integers(1, 6),
    topk=st.integers(1, 4),
)
def test_random_drafts(lens, draft, topk) -> None:
    check_halves(case_of(verify(draft, *lens), spec_topk=topk))


@settings(deadline=None, max_examples=50)
@given(new=st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_no_other_cut_leaves_the_tokens_more_even(new) -> None:
    setup = make_setup(case_of(extend((0, 1))), fake_platform(), "cpu")
    lens = torch.tensor(new, dtype=torch.int32)
    base = prepare_step(setup, extend((0, 1))).batch
    total = sum(new)
    batch = replace(
        base,
        batch_size=len(new),
        extend_num_tokens=total,
        **dict.fromkeys(("seq_lens", "extend_seq_lens"), lens),
        **dict.fromkeys(("out_cache_loc", "positions"), torch.zeros(total, dtype=torch.int64)),
        req_pool_indices=torch.zeros(len(new), dtype=torch.int64),
        extend_prefix_lens=torch.zeros_like(lens),
    )
    first, second = batch.with_halves().tbo_children
    difference = abs(first.num_tokens - second.num_tokens)
    assert all(difference <= abs(2 * sum(new[:cut]) - total) for cut in range(len(new) + 1))


def test_a_step_without_halves_goes_to_primary() -> None:
    case = case_of(decode(40, 3))
    setup = make_setup(case, fake_platform(), "cpu")
    step, backend = prepare_step(setup, case.steps[0]), tbo(setup.context)
    batch = step.batch.with_halves()
    backend.init_forward_metadata(batch)
    first, second = batch.tbo_children
    assert backend.serving(first) is backend.children[0]
    assert backend.serving(replace(second, topk_indices=None)) is backend.children[1]
    assert backend.serving(batch) is backend.primary
    backend.init_forward_metadata(step.batch)
    assert backend.serving(first) is backend.primary


def test_new_encoder_tokens_are_refused() -> None:
    case = case_of(extend((0, 5), (0, 4), encoder=(3, 4)))
    batch = prepare_step(make_setup(case, fake_platform(), "cpu"), case.steps[0]).batch
    with pytest.raises(InvalidInput, match="run it whole"):
        batch.with_halves()


class Long(GraphFakeBackend):
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 7


def test_what_cannot_stand_together() -> None:
    case = case_of(decode(4))
    context, other = (make_setup(case, fake_platform(), "cpu").context for _ in range(2))
    one, two = GraphFakeBackend(context), GraphFakeBackend(context)
    for children, said in (
        ((one, two), "other than primary"),
        ((two, two), "other than primary"),
        ((two, GraphFakeBackend(other)), "another context"),
        ((two, Long(context)), "padding row"),
    ):
        with pytest.raises(InvalidInput, match=said):
            TboAttnBackend(one, children)


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        ((decode(40, 30, 14, 17, 9), decode(3, 21, 8), decode(7), decode(1, 2)), {}),
        ((verify(3, 9, 30, 2, 8, 5), verify(3, 4, 7), verify(3, 20)), {"spec_topk": 1}),
        ((verify(3, 9, 30, 2, 8, 5), verify(3, 4, 7), verify(3, 20)), {"spec_topk": 2}),
    ],
    ids=["decode", "verify", "trees"],
)
@pytest.mark.parametrize("hybrid", [False, True])
def test_halves_are_captured_and_replayed(steps, changes, hybrid) -> None:
    check_graphs(GraphFakeBackend, steps, changes, hybrid=hybrid)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "steps",
    [
        (decode(40, 30, 14, 17, 9), decode(3, 21, 8), decode(7), decode(1, 2)),
        (verify(3, 9, 30, 2, 8, 5), verify(3, 4, 7), verify(3, 20)),
    ],
    ids=["decode", "verify"],
)
def test_halves_of_an_emulated_library(steps, page_size) -> None:
    changes = {"page_size": page_size, "dtype": "bfloat16", "spec_topk": 1}
    hopper = Platform.parse("nvidia:sm90,cuda=13.0")
    check_graphs(fa3, steps, changes, platform=hopper, tolerance=1e-2)


def test_trees_of_an_emulated_library() -> None:
    steps = (verify(3, 9, 30, 2, 8, 5), verify(3, 4, 7), verify(3, 20))
    changes = {"page_size": 1, "dtype": "bfloat16", "spec_topk": 2}
    hopper = Platform.parse("nvidia:sm90,cuda=13.0")
    check_graphs(fa3, steps, changes, platform=hopper, tolerance=1e-2)


def fa3(context) -> FA3Backend:
    return FA3Backend(context, {"num_splits": 0}, FA3)


def check_graphs(make, steps, changes, *, hybrid=False, platform=None, tolerance=0.0) -> None:
    """Every step, padded to graphs of up to 8 requests, has the answer of an eager whole step."""
    case = Case(
        **{
            **{"name": "halves", "dtype": "float32", "page_size": 4, "windows": (None,)},
            **changes,
            "steps": steps,
        }
    )
    platform = platform or fake_platform()
    mode, each = steps[0].mode, steps[0].new[0]
    one = make_setup(replace(case, steps=(steps[0], *steps)), platform, "cpu")
    context = one.context

    def whole(context):
        if not hybrid:
            return make(context)
        return HybridAttnBackend(prefill=make(context), decode=make(context))

    backend, alone = tbo(context, whole), make(context)
    layer = context.layers[0]

    def model(batch, inputs):
        backend, q = ForwardContext.current().backend, inputs["q"]
        first, second = batch.tbo_children
        middle = first.num_tokens
        halves = ((first, q[:middle]), (second, q[middle:]))
        return torch.cat([backend.forward(q, None, None, layer, half) for half, q in halves])

    runner = GraphRunner(
        backend,
        model,
        GraphConfig(
            batch_sizes=(1, 2, 4, 8),
            forward_mode=mode,
            tokens_per_request=each,
            spec_topk=case.spec_topk or 1,
            custom_mask=case.custom_mask,
            two_batches=True,
            host_lens=bool(changes.get("host_lens")),
        ),
        devices=RecordingGraphs(),
        inputs={
            "q": ModelInput(
                dtype=one.random(1).dtype, trailing=(layer.tp_q_head_num, layer.query_dim)
            )
        },
        progress=iter,
    )
    runner.capture()
    for step in steps:
        prepared = prepare_step(one, step, host_lens=bool(changes.get("host_lens")))
        given = prepared.inputs[0]
        alone.save_kv(given.k, given.v, layer, prepared.batch)
        alone.init_forward_metadata(prepared.batch)
        expected = alone.forward(given.q, None, None, layer, prepared.batch)
        replayed = runner.replay(prepared.batch, {"q": given.q})
        torch.testing.assert_close(replayed, expected, rtol=tolerance, atol=tolerance)


def test_a_decision_asks_for_it_and_build_makes_it() -> None:
    case = case_of(decode(40, 3))
    setup = make_setup(case, probe_cpu(), "cpu")
    asked = case.request.replace(two_batches=True)
    offers, policy = Plugins.load().offers(), Policy(backend="torch_native")
    decision = solve(asked, setup.context.platform, offers, policy)
    assert decision.hash != solve(case.request, decision.platform, offers, policy).hash
    backend = build(decision, replace(setup.context, request=decision.request))
    assert isinstance(backend, TboAttnBackend)
    assert type(backend.primary).__name__ == "TorchNativeBackend"
    step = prepare_step(setup, case.steps[0])
    batch = step.batch.with_halves()
    backend.init_forward_metadata(batch)
    out, _ = in_halves(backend, step.inputs[0], batch)
    torch.testing.assert_close(out, attend(backend, step.inputs[0], batch)[0], rtol=0, atol=0)
