"""Draft trees on backends without masks: the shipped suite's answers, and when they are chosen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    Choice,
    Decision,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    NoBackend,
    Platform,
    Plugins,
    Policy,
    Request,
    build,
    solve,
)
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import ANY, Clause, KernelLibrary
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.layers import FA3Kernels
from attnmux.parts import prefix_context, undrafted_request
from attnmux.parts.draft_trees import TreeAttnBackend
from attnmux.parts.two_batches import TboAttnBackend
from attnmux.testing import (
    Candidate,
    Case,
    GraphFakeBackend,
    decode,
    extend,
    fake_card,
    fake_platform,
    make_setup,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.cases.standard import in_graphs

FA3 = KernelLibrary.imported(FA3Kernels, "attnmux.emulators.nvidia.sgl_flash_attn")
LATENT = {
    **{"kind": "mla", "num_q_heads": 4, "num_kv_heads": 1, "head_dim": 48},
    **{"kv_lora_rank": 32, "qk_rope_head_dim": 16},
}
BLACKWELL = Platform.parse("nvidia:sm100,cuda=13.0")
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
TREES = Request.parse(
    "dtype=bf16,num_q_heads=8,num_kv_heads=2,head_dim=128,page_size=16,spec_topk=4,"
    "spec_draft_tokens=8"
)


class Maskless(TorchNativeBackend):
    """Refuses every step with drafts."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if batch.spec_info is not None or batch.forward_mode.is_target_verify():
            raise InvalidInput("spec_info", got="drafts", expected="none")
        super().init_forward_metadata_out_graph(batch, in_capture)


@pytest.fixture
def seed(record_property) -> int:
    """Fresh at each run; the report of a failure has it."""
    drawn = random.randrange(1 << 30)
    record_property("seed", drawn)
    return drawn


def of_trees(make):
    """A factory of the composite over `make(context)`."""

    def factory(context, options):
        asked = context.request.replace(custom_mask=False, spec_draft_tokens=8)
        context = replace(context, request=asked)
        return TreeAttnBackend(context, child=make(context), prefixes=make(prefix_context(context)))

    return factory


EVERYTHING = fake_card(**dict.fromkeys(Clause.__slots__, ANY))


def candidate(make=Maskless) -> Candidate:
    return Candidate(card=EVERYTHING, platform=fake_platform(), factory=of_trees(make))


def passes(case: Case, given: Candidate, seed: int) -> None:
    outcome = run_case(given, case, seed=seed)
    assert outcome.status == "passed", (seed, outcome.message, outcome.reasons)


STEPS = {
    "trees": (verify(6, 9, 4, 30), verify(6, 1, 17)),
    "larger trees": (verify(8, 16, 15, 3, 2), verify(8, 40, 39)),
    "empty prefixes": (verify(5, 0, 9, 0), verify(5, 3, 0)),
    "padding": (verify(6, 30, 11, padding=2), verify(6, 3)),
    "one draft": (verify(1, 7, 20),),
    "between others": (extend((0, 9), (8, 5)), verify(6, 9, 4), decode(9, 40, 3), verify(6, 12)),
    "draft extend": (extend((20, 3), (4, 1), mode=ForwardMode.DRAFT_EXTEND), verify(4, 9)),
    "more than graphs hold": (verify(4, 9, 30), verify(4, 2, 60, 17, 5, 33), verify(4, 20, 3)),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_the_answers_are_the_references(steps, page_size, graph, seed) -> None:
    case = Case(name="trees", steps=steps, spec_topk=4, page_size=page_size, lse=True)
    if graph:
        (case,) = in_graphs([replace(case, max_graph_batch_size=4)])
    passes(case, candidate(GraphFakeBackend if graph else Maskless), seed)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"logit_cap": 8.0},
        {"sinks": True, "lse": True},
        {"sinks": True},
        {"num_kv_heads": 8},
        {"num_q_heads": 6, "num_kv_heads": 1, "head_dim": 64, "v_head_dim": 32},
        {"scaling": 0.3},
        {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 2.0)},
        {"kv_in_pool": True},
        {"strided_kv": True},
        {"host_lens": True},
        {"spec_topk": 1},
        {"nan_request": 1},
        {**LATENT, "dtype": "float32"},
        {**LATENT, "kv_dtype": "fp8_e4m3"},
    ],
    ids=str,
)
def test_features(changes, seed) -> None:
    given = {"spec_topk": 3, "page_size": 4, **changes}
    steps = (verify(6, 9, 0, 30), verify(6, 1, 17))
    passes(Case(name="trees", steps=steps, **given), candidate(), seed)


@pytest.mark.parametrize("page_size", [16, 64])
def test_flash_attention_verifies_trees_on_pages(page_size, seed) -> None:
    """Its own way for trees needs pages of one token."""
    case = Case(name="trees", steps=STEPS["trees"], spec_topk=4, page_size=page_size)
    setup = make_setup(case, HOPPER, "cpu", seed=seed)
    backend = of_trees(lambda context: FA3Backend(context, {"num_splits": 0}, FA3))(
        setup.context, {}
    )
    plain = TorchNativeBackend(setup.context)
    for number in range(2):
        step = prepare_step(setup, case.steps[number])
        for each in (backend, plain):
            each.init_forward_metadata(step.batch)
        for given in step.inputs:
            ours, expected = (
                each.forward(given.q, given.k, given.v, given.layer, step.batch)
                for each in (backend, plain)
            )
            torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


def test_a_wrong_link_is_seen(seed, monkeypatch) -> None:
    """The suite fails if drafts see their siblings."""
    right = ForwardBatch.visible_drafts
    monkeypatch.setattr(
        ForwardBatch, "visible_drafts", lambda batch: torch.ones_like(right(batch)).tril()
    )
    case = Case(name="trees", steps=(verify(6, 9, 4),), spec_topk=3)
    assert run_case(candidate(), case, seed=seed).status == "failed"


def test_a_backend_of_another_context_is_refused() -> None:
    case = Case(name="trees", steps=(verify(6, 9),), spec_topk=3)
    context = make_setup(case, fake_platform(), "cpu").context
    with pytest.raises(InvalidInput, match="prefix_context"):
        TreeAttnBackend(
            context, child=TorchNativeBackend(context), prefixes=TorchNativeBackend(context)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": (8, None)}, "windows"),
        ({"attention_chunk": 16}, "chunks"),
        ({"alibi": True}, "biases"),
        ({"relative_reach": 4}, "biases"),
    ],
)
def test_layers_that_count_places_are_refused(changes, message) -> None:
    case = Case(name="trees", steps=(verify(6, 9),), spec_topk=3, **changes)
    with pytest.raises(InvalidInput, match=message):
        prefix_context(make_setup(case, fake_platform(), "cpu").context)


LATENT_TREES = Request.parse(
    "kind=mla,dtype=bf16,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,"
    "kv_lora_rank=512,qk_rope_head_dim=64,page_size=64,spec_topk=4,spec_draft_tokens=8"
)


@pytest.mark.parametrize(
    ("asked", "name", "platform", "reads_prefixes"),
    [
        (TREES, "fa3", HOPPER, "fa3"),
        (TREES, "trtllm_mha", BLACKWELL, "flashinfer"),
        (TREES.replace(page_size=128), "fa4", BLACKWELL, "flashinfer"),
        (LATENT_TREES, "flashmla", HOPPER, None),
        (LATENT_TREES, "trtllm_mla", BLACKWELL, None),
    ],
)
def test_a_named_backend_without_trees_gets_them(asked, name, platform, reads_prefixes) -> None:
    policy = Policy(backend=name)
    decision = solve(asked, platform, Plugins.load().offers(), policy)
    assert decision.answer("draft_trees", "prefixes", "decode") is not None
    assert decision.answer("draft_trees", "prefixes", "decode").backend == (
        reads_prefixes or decision.answer("draft_trees", "prefixes", "decode").backend
    )
    assert decision.request.spec_topk == 4
    assert decision.request.lse is False
    assert set(decision.phases) == {"extend", "decode", "verify", "draft"}
    assert name in {choice.backend for choice in decision.phases.values()}
    assert decision.phases["verify"] == decision.answer("draft_trees", "prefixes", "decode")
    assert (
        f"merged by LSE: {decision.answer('draft_trees', 'prefixes', 'decode').backend} ("
        in decision.summary()
    )
    assert "elsewhere" not in decision.summary()
    again = Decision.from_json(decision.to_json())
    assert again.answer("draft_trees", "prefixes", "decode") == decision.answer(
        "draft_trees", "prefixes", "decode"
    )
    assert again.hash == decision.hash
    assert replace(decision, parts={}).hash != decision.hash
    change = (
        "backend for verify",
        name,
        decision.answer("draft_trees", "prefixes", "decode").backend,
        "user",
    )
    recorded = [(each.field, each.old, each.new, each.origin) for each in decision.coercions]
    assert (change in recorded) is (
        decision.answer("draft_trees", "prefixes", "decode").backend != name
    )


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_only_the_name_for_the_phase_that_verifies_counts(mode) -> None:
    named = {"prefill_backend": "trtllm_mha", "decode_backend": "flashinfer"}
    if mode == "decode":
        named = dict(zip(named, reversed(named.values()), strict=True))
    policy = Policy(origins=dict.fromkeys(named, "config"), **named)
    asked = TREES.replace(speculative_attention_mode=mode)
    decision = solve(asked, BLACKWELL, Plugins.load().offers(), policy)
    (change,) = decision.coercions
    assert (change.field, change.old, change.origin) == (
        "backend for verify",
        "trtllm_mha",
        "config",
    )
    assert change.new == decision.answer("draft_trees", "prefixes", "decode").backend


def test_a_backend_with_masks_is_preferred() -> None:
    decision = solve(TREES, HOPPER, Plugins.load().offers())
    assert decision.answer("draft_trees", "prefixes", "decode") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"custom_mask": True},
        {"sliding_window": 64},
        {"deterministic": True},
        {"spec_draft_tokens": None},
        {"num_q_heads": None, "num_kv_heads": None},
        {"spec_topk": None, "custom_mask": True, "spec_draft_tokens": None},
    ],
    ids=str,
)
def test_other_requests_are_refused_as_before(changes) -> None:
    policy = Policy(backend="trtllm_mha")
    with pytest.raises(NoBackend):
        solve(TREES.replace(**changes), BLACKWELL, Plugins.load().offers(), policy)


def read_by(choice: Choice) -> dict[str, dict[str, dict[str, Choice]]]:
    """The part of a decision whose `choice` reads the prefixes of trees."""
    return {"draft_trees": {"prefixes": {"decode": choice}}}


def test_build_makes_what_was_decided(seed) -> None:
    case = Case(name="trees", steps=(verify(6, 9, 0, 30),), spec_topk=3, page_size=4)
    setup = make_setup(case, probe_cpu(), "cpu", seed=seed)
    asked = setup.context.request.replace(custom_mask=False, phases=("extend", "decode", "verify"))
    policy = Policy(backend="torch_native")
    offers = Plugins.load().offers()
    plain = solve(undrafted_request(asked), probe_cpu(), offers, policy)
    assert plain.answer("draft_trees", "prefixes", "decode") is None
    choice = plain.phases["decode"]
    decision = replace(
        plain, request=asked, phases={**plain.phases, "verify": choice}, parts=read_by(choice)
    )
    context = replace(setup.context, request=decision.request)
    read = Decision.from_json(decision.to_json())
    read.check(probe_cpu(), offers)
    for each in (decision, read):
        backend = build(each, context)
        assert isinstance(backend, TreeAttnBackend)
        assert isinstance(backend.child, TorchNativeBackend)
        assert backend.prefixes.context.layers[0].tp_q_head_num == 6 * case.num_q_heads


def test_two_batches_of_trees_have_a_composite_each(seed) -> None:
    """And the answers of the whole step."""
    case = Case(name="trees", steps=(verify(6, 9, 4, 30),), spec_topk=3, dtype="float32")
    setup = make_setup(case, probe_cpu(), "cpu", seed=seed)
    phases = ("extend", "decode", "verify")
    asked = setup.context.request.replace(custom_mask=False, phases=phases, two_batches=True)
    plain = solve(undrafted_request(asked), probe_cpu(), Plugins.load().offers())
    choice = plain.phases["decode"]
    decision = replace(plain, request=asked, parts={**read_by(choice), "two_batches": {}})
    backend = build(decision, replace(setup.context, request=asked))
    assert isinstance(backend, TboAttnBackend)
    assert all(isinstance(each, TreeAttnBackend) for each in (backend.primary, *backend.children))
    step = prepare_step(setup, case.steps[0], host_lens=True)
    batch = step.batch.with_halves()
    backend.init_forward_metadata(batch)
    first, second = batch.tbo_children
    for given in step.inputs:
        whole = backend.forward(given.q, given.k, given.v, given.layer, batch)
        parts = [
            backend.forward(given.q[rows], given.k[rows], given.v[rows], given.layer, half)
            for half, rows in ((first, slice(0, 6)), (second, slice(6, 18)))
        ]
        torch.testing.assert_close(torch.cat(parts), whole)
