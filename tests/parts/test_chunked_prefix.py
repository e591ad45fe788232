"""Long MLA prompts with expanded heads: the answers of absorbed attention, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import (
    ForwardMode,
    InvalidInput,
    Plugins,
    Policy,
    RequestTable,
    TunedLaunch,
    UpProjection,
    build,
    solve,
)
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import installed_version
from attnmux.core.verbs import Device
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.parts import KeyPart, merge_into
from attnmux.parts.chunked_prefix import ChunkedPrefixBackend, crossing_subject, expanded_context
from attnmux.parts.crossing import crossing_by_operations, expansion_pays
from attnmux.parts.two_batches import TboAttnBackend
from attnmux.testing import Case, decode, extend, fake_platform, make_setup, prepare_step, verify

DEEPSEEK = {"num_q_heads": 2, "head_dim": 192, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
SMALL = {
    "num_q_heads": 3,
    "head_dim": 12,
    "v_head_dim": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
}
"""Expanding pays from 5 new tokens on a long prefix."""


def case_of(*steps, **changes) -> Case:
    longest = max((1, *(length for step in steps for length in step.lens)))
    given = {"dtype": "float32", "page_size": 4, "max_context_len": longest, **SMALL, **changes}
    return Case(name="prompts", steps=steps, kind="mla", num_kv_heads=1, **given)


class Noting(TorchNativeBackend):
    """Counts the prompts that it runs, and the keys of the longest. As some kernels do, it leaves
    rows of no request as the memory was."""

    calls = 0
    most_keys = 0

    def forward_extend(self, call, batch):
        self.calls += 1
        if call.k is not None:
            self.most_keys = max(self.most_keys, len(call.k))
        out = super().forward_extend(call, batch)
        if batch.extend_seq_lens is not None and call.layer.kind != "mla":
            out[int(batch.extend_seq_lens.sum()) :] = torch.nan
        return out


def count(backends) -> int:
    return sum(each.calls for each in backends)


@dataclass(frozen=True, kw_only=True)
class World:
    """A prepared step on the composite and on the absorbed backend alone."""

    backend: ChunkedPrefixBackend
    absorbed: Noting
    projection: UpProjection
    q: tuple[torch.Tensor, ...]
    step: object

    def run(self, backend) -> list[torch.Tensor]:
        batch = self.step.batch
        backend.init_forward_metadata(batch)
        return [
            backend.forward_latent(q, each.k, each.k_rope, each.layer, batch, self.projection)
            for q, each in zip(self.q, self.step.inputs, strict=True)
        ]


def world_of(case: Case, *, chunk_tokens: int = 1 << 20, lanes: int = 2, debug=False) -> World:
    setup = make_setup(case, fake_platform(), "cpu")
    context = replace(setup.context, debug=debug)
    step = prepare_step(setup, case.steps[0], host_lens=case.host_lens)
    heads, rank = case.num_q_heads, case.kv_lora_rank
    rows = heads * (case.head_dim - case.qk_rope_head_dim + case.v_head_dim)
    projection = UpProjection.of(
        setup.random(rows, rank) / rank**0.5, num_heads=heads, v_head_dim=case.v_head_dim
    )
    expanded = [Noting(expanded_context(context)) for _ in range(lanes)]
    row_bytes = (rows + heads * case.head_dim) * expanded[0]._dtype.itemsize
    backend = ChunkedPrefixBackend(
        absorbed=Noting(context), expanded=expanded, chunk_bytes=chunk_tokens * row_bytes
    )
    q = tuple(setup.random(step.batch.num_tokens, heads, case.head_dim) for _ in step.inputs)
    return World(backend=backend, absorbed=Noting(context), projection=projection, q=q, step=step)


def assert_same(world: World, *, tolerance: float = 2e-5, rows: int | None = None) -> None:
    for ours, expected in zip(world.run(world.backend), world.run(world.absorbed), strict=True):
        torch.testing.assert_close(ours[:rows], expected[:rows], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 1 << 20])
@pytest.mark.parametrize("lanes", [1, 3])
def test_an_expanded_prompt_has_the_absorbed_answer(chunk_tokens, lanes) -> None:
    steps = extend((0, 9), (33, 12), (16, 20), (0, 1), (5, 3))
    world = world_of(case_of(steps), chunk_tokens=chunk_tokens, lanes=lanes)
    assert_same(world)
    chunks = -(-54 // chunk_tokens)
    assert count(world.backend.expanded) == 2 * (1 + chunks)
    assert world.backend.absorbed.calls == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_cap": 4.0},
        {"sinks": True},
        {"scaling": 0.3},
        {"strided_kv": True},
        {"host_lens": True},
        {"page_size": 1},
        {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 0.5)},
    ],
    ids=str,
)
def test_layers_and_pools_of_every_kind(changes) -> None:
    world = world_of(case_of(extend((21, 19), (8, 30), (0, 7)), **changes), chunk_tokens=10)
    assert_same(world)
    assert world.backend.expanded[0].calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype) -> None:
    world = world_of(case_of(extend((300, 190), (7, 30)), dtype=dtype, **DEEPSEEK), chunk_tokens=64)
    assert_same(world, tolerance=0.02)
    assert world.backend.expanded[0].calls


@pytest.mark.parametrize("count", [0, 5])
def test_expanded_heads(count) -> None:
    """A rank may have no keys."""
    weight, latent, k_rope = torch.randn(3 * 10, 8), torch.randn(count, 8), torch.randn(count, 2)
    k, v = UpProjection.of(weight, num_heads=3, v_head_dim=4).expand(latent, k_rope)
    heads = (latent @ weight.T).view(count, 3, 10)
    torch.testing.assert_close(k[..., :6], heads[..., :6])
    torch.testing.assert_close(k[..., 6:], k_rope.unsqueeze(1).expand(-1, 3, -1))
    torch.testing.assert_close(v, heads[..., 6:])


class Pages(RequestTable):
    """The pages of another table, whose slots no one may read."""

    def __init__(self, theirs: RequestTable, page_size: int) -> None:
        super().__init__(theirs.size, theirs.max_context_len, "cpu")
        self.pages = theirs.req_to_token[:, ::page_size] // page_size

    @property
    def req_to_token(self) -> torch.Tensor:
        raise AssertionError("slots were read")

    def columns_for(self, page_size: int) -> tuple[torch.Tensor, int]:
        return self.pages, page_size


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
def test_chunks_are_found_by_pages(chunk_tokens) -> None:
    case = case_of(extend((0, 9), (33, 12), (16, 20)))
    setup = make_setup(case, fake_platform(), "cpu")
    batch = prepare_step(setup, case.steps[0]).batch
    table = setup.context.req_to_token_pool
    given = {"page_size": case.page_size, "crossing": None, "chunk_tokens": chunk_tokens}
    by_pages = KeyPart.of_step(batch, Pages(table, case.page_size), **given)
    for ours, expected in zip(by_pages, KeyPart.of_step(batch, table, **given), strict=True):
        assert torch.equal(ours.keys, expected.keys)
    prefixes = torch.cat(
        [
            table.req_to_token[row, :cached]
            for row, cached in zip(
                batch.req_pool_indices.tolist(), batch.extend_prefix_lens.tolist(), strict=True
            )
        ]
    )
    parts = [*KeyPart.of_step(batch, table, **given)]
    assert torch.equal(torch.cat([part.keys for part in parts[1:]]), prefixes.long())


@pytest.mark.parametrize(
    "step",
    [
        extend((3, 9), (8, 7), padding=2, trailing=3),
        extend((0, 12), trailing=2),
        extend((3, 30), (20, 1), mode=ForwardMode.MIXED),
    ],
)
def test_padding_and_mixed_steps(step) -> None:
    world = world_of(case_of(step), chunk_tokens=5)
    assert_same(world, rows=sum(step.new))
    assert world.backend.expanded[0].calls
    for out in world.run(world.backend):
        assert bool(out[sum(step.new) :].isfinite().all())


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (decode(5, 80), {}),
        (extend((80, 3), (90, 2)), {}),
        (extend((2, 40), (4000, 1), mode=ForwardMode.MIXED), {}),
        (extend((8, 20), mode=ForwardMode.DRAFT_EXTEND), {}),
        (verify(9, 3), {"spec_topk": 1}),
        (verify(9, 3), {"spec_topk": 4}),
        (extend(mode=ForwardMode.IDLE), {}),
    ],
)
def test_other_steps_are_absorbed(step, changes) -> None:
    world = world_of(case_of(step, **changes))
    assert_same(world)
    assert count(world.backend.expanded) == 0


def test_an_absorbed_call_works_in_an_expanded_step() -> None:
    """As a wrapper makes, or a compiled model."""
    world = world_of(case_of(extend((0, 9), (33, 12))))
    batch, given = world.step.batch, world.step.inputs[0]
    world.backend.init_forward_metadata(batch)
    q, q_rope = world.projection.absorbed_queries(world.q[0])
    ours = world.backend.forward(
        q, given.k, None, given.layer, batch, q_rope=q_rope, k_rope=given.k_rope
    )
    expected = world.run(world.absorbed)[0]
    torch.testing.assert_close(world.projection.outputs(ours), expected)


def test_debug_checks_the_step_and_not_its_parts() -> None:
    assert_same(world_of(case_of(extend((0, 9), (33, 12))), chunk_tokens=8, debug=True))


@pytest.mark.parametrize(
    "prefix", [0, 1, 511, 4096, 20_000, pytest.param(131_072, marks=pytest.mark.full)]
)
def test_a_prefix_of_any_length_in_bounded_memory(prefix) -> None:
    """The largest scratch memory depends on the budget and the new tokens alone."""
    new, chunk_tokens = 200, 4096
    changes = {**DEEPSEEK, "num_q_heads": 1, "windows": (None,), "page_size": 64}
    step = replace(extend((prefix, new)), lens=(prefix + new,))
    world = world_of(case_of(step, **changes), chunk_tokens=chunk_tokens)
    assert_same(world)
    backends = world.backend.expanded
    assert count(backends) == 1 + -(-prefix // chunk_tokens)
    assert max(each.most_keys for each in backends) <= max(chunk_tokens, new)
    workspace = world.backend.context.workspace
    held = [workspace.get(f"chunked_prefix.{name}", 0).numel() for name in "kv"]
    budget = max(chunk_tokens, new * 5 // 4) * (192 + 128) * 4
    assert sum(held) <= budget * 5 // 4


class Allocations(TorchDispatchMode):
    """Notes the bytes of the largest new tensor."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not (func.is_view or func._schema.is_mutable):
            self.largest = max(self.largest, result.nbytes)
        return result


def test_no_allocation_grows_with_the_prefix() -> None:
    largest = []
    for prefix in (1024, 16_000):
        case = case_of(extend((prefix, 64)), num_q_heads=8, windows=(None,), page_size=64)
        world = world_of(case, chunk_tokens=256)
        world.backend.init_forward_metadata(world.step.batch)
        new = world.step.inputs[0]
        with Allocations() as made:
            world.backend.forward_latent(
                world.q[0], new.k, new.k_rope, new.layer, world.step.batch, world.projection
            )
        assert count(world.backend.expanded) == 1 + -(-prefix // 256)
        largest.append(made.largest)
    assert 0 < largest[1] <= largest[0]


@settings(deadline=None)
@given(
    cached=st.lists(st.integers(0, 40), max_size=6),
    most=st.integers(1, 50),
)
def test_chunks_hold_every_cached_token_once(cached, most) -> None:
    seen: dict[int, list[tuple[int, int]]] = {}
    chunks = list(KeyPart.chunks(cached, most))
    for first, starts, lens in chunks:
        assert 0 < sum(lens) <= most
        for number, (start, length) in enumerate(zip(starts, lens, strict=True)):
            if length:
                seen.setdefault(first + number, []).append((start, start + length))
    assert len(chunks) == -(-sum(cached) // most)
    assert seen.keys() == {request for request, total in enumerate(cached) if total}
    for request, ranges in seen.items():
        assert ranges[0][0] == 0
        assert ranges[-1][1] == cached[request]
        assert all(before[1] == after[0] for before, after in pairwise(ranges))


@settings(deadline=None, max_examples=20)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 14)), min_size=1, max_size=5),
    chunk_tokens=st.integers(1, 60),
)
def test_random_steps(requests, chunk_tokens) -> None:
    assert_same(world_of(case_of(extend(*requests)), chunk_tokens=chunk_tokens))


def test_where_expanding_takes_fewer_operations() -> None:
    crossing = crossing_by_operations(rank=512, nope=128, v=128)
    assert crossing == pytest.approx(512 / 3)
    assert expansion_pays([1], [0], crossing)
    assert not expansion_pays([0], [5], crossing)
    assert not expansion_pays([0], [0], crossing)
    assert not expansion_pays([170], [1 << 20], crossing)
    assert expansion_pays([171], [1 << 20], crossing)
    assert not expansion_pays([171, 1], [1 << 20, 1 << 20], crossing)
    never = crossing_by_operations(rank=8, nope=8, v=8)
    assert not expansion_pays([9], [0], never)
    assert not expansion_pays([9], [9], never)


def test_merging_adds_keys_by_their_weight() -> None:
    logits, values = torch.randn(3, 2, 9), torch.randn(9, 4)
    parts = [
        (torch.softmax(logits[..., each], -1) @ values[each], logits[..., each].logsumexp(-1))
        for each in (slice(0, 4), slice(4, 9))
    ]
    (out, lse), (other, other_lse) = parts
    nothing = torch.full_like(lse, -torch.inf)
    merge_into(out, lse, torch.zeros_like(out), nothing)
    merge_into(out, lse, other, other_lse)
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ values)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    merge_into(empty := torch.zeros_like(out), nothing, torch.zeros_like(out), nothing.clone())
    assert not empty.any()
    assert bool(nothing.isneginf().all())


def test_layers_whose_parts_cannot_be_merged_are_refused() -> None:
    for changes in ({"windows": (None, 8)}, {"attention_chunk": 8}):
        context = make_setup(case_of(extend((0, 4)), **changes), fake_platform(), "cpu").context
        with pytest.raises(InvalidInput, match="without windows, chunks and biases"):
            expanded_context(context)


def test_backends_of_another_context_are_refused() -> None:
    context = make_setup(case_of(extend((0, 4))), fake_platform(), "cpu").context
    absorbed = Noting(context)
    for wrong in ([], [absorbed]):
        with pytest.raises(InvalidInput, match="backends of a part context"):
            ChunkedPrefixBackend(absorbed=absorbed, expanded=wrong)
    with pytest.raises(InvalidInput, match="chunk_bytes"):
        ChunkedPrefixBackend(
            absorbed=absorbed, expanded=[Noting(expanded_context(context))], chunk_bytes=0
        )


def test_halves_of_a_step_run_expanded_too() -> None:
    """One half may be expanded and the other absorbed or empty."""
    for steps in (
        extend((0, 30), (16, 20), (5, 3)),
        extend((60, 2), (3, 30)),
        extend((3, 30)),
    ):
        world = world_of(case_of(steps), chunk_tokens=9)
        context = world.backend.context
        backend = TboAttnBackend(world.backend, (prompts_on(context), prompts_on(context)))
        batch = world.step.batch.with_halves()
        backend.init_forward_metadata(batch)
        expected = world.run(world.absorbed)
        middle = batch.tbo_children[0].num_tokens
        for q, each, whole in zip(world.q, world.step.inputs, expected, strict=True):
            for half, rows in zip(
                batch.tbo_children, (slice(0, middle), slice(middle, None)), strict=True
            ):
                ours = backend.forward_latent(
                    q[rows], each.k[rows], each.k_rope[rows], each.layer, half, world.projection
                )
                torch.testing.assert_close(ours, whole[rows], rtol=2e-5, atol=2e-5)
        assert any(count(child.expanded) for child in backend.children)


def prompts_on(context) -> ChunkedPrefixBackend:
    return ChunkedPrefixBackend(
        absorbed=Noting(context), expanded=[Noting(expanded_context(context)) for _ in range(2)]
    )


def test_a_decision_names_the_backend_and_build_makes_it() -> None:
    case = case_of(extend((0, 9), (33, 12)))
    setup = make_setup(case, probe_cpu(), "cpu")
    offers = Plugins.load().offers()
    asked = case.request.replace(chunked_prefix=True)
    policy = Policy(allow=("torch_native",))
    decision = solve(asked, setup.context.platform, offers, policy)
    assert decision.answer("expanded_prompts", "prompts", "extend") is not None
    assert decision.answer("expanded_prompts", "prompts", "extend").backend == "torch_native"
    assert "torch_native (cpu) serves prompts with expanded heads" in decision.summary()
    again = type(decision).from_json(decision.to_json())
    assert again.answer("expanded_prompts", "prompts", "extend") == decision.answer(
        "expanded_prompts", "prompts", "extend"
    )
    again.check(setup.context.platform, offers)
    assert decision.hash != solve(case.request, setup.context.platform, offers, policy).hash
    context = replace(setup.context, request=decision.request)
    backend = build(decision, context)
    assert isinstance(backend, ChunkedPrefixBackend)
    assert backend.crossing == crossing_by_operations(rank=32, nope=4, v=4)
    kept = TunedLaunch(
        backend="cpu/torch_native",
        device=Device.of(context.platform),
        versions={"attnmux-core": installed_version("attnmux-core")},
        subject=crossing_subject("cpu/torch_native", decision.request),
        values={"crossing": 70},
        median_us=10.0,
        date=datetime.now(tz=UTC),
    )
    for changes, expected in (
        ({}, 70.0),
        ({"versions": {"attnmux-core": "0.0.1"}}, backend.crossing),
        ({"subject": {**kept.subject, "num_q_heads": 99}}, backend.crossing),
    ):
        launches = (replace(kept, **changes),)
        assert build(decision, replace(context, launches=launches)).crossing == expected
