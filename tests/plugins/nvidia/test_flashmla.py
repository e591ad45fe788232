from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.conditions import ANY
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.graph.devices import GraphStep
from attnmux.core.layer import LayerSpec
from attnmux.emulators.nvidia.flash_mla import flash_mla, sgl_kernel
from attnmux.nvidia.cards.flashmla import FLASHMLA
from attnmux.nvidia.flashmla import FlashMLABackend, Kernels
from attnmux.nvidia.flashmla.factory import make
from attnmux.nvidia.flashmla.plans import FP8_REQUESTS, ROWS
from attnmux.nvidia.flashmla.providers import from_flash_mla, from_sgl_kernel
from attnmux.nvidia.flashmla.trial import try_kernels
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    run_case,
)
from attnmux.testing.cases import Step, decode, extend, verify
from attnmux.testing.recording import RecordingGraphs

EMULATED = {"sgl_kernel": from_sgl_kernel(sgl_kernel), "flash_mla": from_flash_mla(flash_mla)}
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")


def candidate(kernels: Kernels) -> Candidate:
    return Candidate(
        card=replace(FLASHMLA, status="available", requires=()),
        platform=HOPPER,
        device="cpu",
        factory=lambda context, options: FlashMLABackend(context, options, kernels),
    )


class TestFlashMLAOfSglKernel(AttentionBackendTests):
    backend = candidate(EMULATED["sgl_kernel"])
    page_sizes = (64,)


class TestFlashMLAOfItsOwn(AttentionBackendTests):
    backend = candidate(EMULATED["flash_mla"])
    page_sizes = (64,)


LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 16,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 64,
    "max_context_len": 320,
}
FP8: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}
DRAFTS = extend((20, 3), (64, 1), (9, 4), (0, 2), mode=ForwardMode.DRAFT_EXTEND)
CASES = {
    "nothing": ((decode(1, 0, 70), decode(0, 0, 3)), {"lse": True}),
    "longer": ((decode(320, 319, 128, 64, 65), decode(1, 64)), {"lse": True}),
    "float16": ((decode(45, 3, 130),), {"dtype": "float16"}),
    "scale": ((decode(45, 3),), {"scaling": 0.1, "lse": True}),
    "heads": ((decode(45, 3), verify(5, 70, 1)), {"num_q_heads": 40, "spec_topk": 1, "lse": True}),
    "verify-lse": ((verify(4, 0, 63, 64, 130),), {"spec_topk": 1, "lse": True}),
    "draft": ((DRAFTS, DRAFTS.varied(320)), {"spec_topk": 1, "lse": True}),
    "draft-of-none": (
        (extend((20, 0), (7, 1), mode=ForwardMode.DRAFT_EXTEND),),
        {"spec_topk": 1, "lse": True},
    ),
    "draft-padding": ((replace(DRAFTS, padding=2, trailing=3),), {"spec_topk": 1}),
    "modes": (
        (decode(9, 40), verify(4, 9, 30, 64, 1, 17), decode(41, 10), verify(4, 21, 34), DRAFTS),
        {"spec_topk": 1},
    ),
    "padding": ((decode(9, 40, padding=3), verify(3, 9, 70, padding=2)), {"spec_topk": 1}),
    "idle": ((decode(7, 12), extend(mode=ForwardMode.IDLE), decode(8)), {}),
    "larger-than-graphs": (
        (decode(9, 40), decode(2, 60, 17, 5, 33), decode(10, 41)),
        {"max_graph_batch_size": 2},
    ),
}


CAPTURED = [name for name, (steps, _) in CASES.items() if any(s.can_be_captured for s in steps)]


@pytest.mark.parametrize("quantised", [{}, FP8], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(
    ("name", "graph"), [(name, False) for name in CASES] + [(name, True) for name in CAPTURED]
)
def test_other_steps(name, graph, quantised) -> None:
    steps, settings = CASES[name]
    case = Case(name=name, steps=steps, **{**LATENT, **quantised, **settings}, graph=graph)
    provider = "flash_mla" if graph else "sgl_kernel"
    outcome = run_case(candidate(EMULATED[provider]), case)
    assert outcome.status == "passed", outcome.message


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.schedules: list[tuple[list[int], int, bool]] = []
        real = EMULATED["sgl_kernel"]

        def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool):
            self.schedules.append((lens.tolist(), num_rows, is_fp8))
            return real.schedule(lens, num_rows, is_fp8)

        def attend(q, k_cache, block_table, cache_seqlens, head_dim_v, **arguments):
            given = {"q": q, "block_table": block_table, "cache_seqlens": cache_seqlens}
            self.calls.append(given | arguments)
            return real.flash_mla_with_kvcache(
                q, k_cache, block_table, cache_seqlens, head_dim_v, **arguments
            )

        self.kernels = replace(real, schedule=schedule, flash_mla_with_kvcache=attend)


def world_of(*steps: Step, **settings: Any) -> World:
    return make_world(Case(name="mine", steps=steps, **{**LATENT, **settings}), HOPPER, "cpu")


def made(step: Step, kernels: Kernels = EMULATED["sgl_kernel"], **settings: Any):
    """A backend with the step prepared, and the step."""
    world = world_of(step, kv_in_pool=True, **settings)
    backend, prepared = FlashMLABackend(world.context, {}, kernels), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    return backend, prepared


def outputs(backend: FlashMLABackend, prepared: Any) -> list[torch.Tensor]:
    return [
        backend.forward(given.q, None, None, given.layer, prepared.batch, q_rope=given.q_rope)
        for given in prepared.inputs
    ]


def test_metadata_is_made_once_a_step() -> None:
    spy = Spy()
    backend, prepared = made(decode(40, 7), spy.kernels)
    before = outputs(backend, prepared)
    backend.context.req_to_token_pool.req_to_token.zero_()
    prepared.batch.req_pool_indices.zero_()
    torch.testing.assert_close(outputs(backend, prepared), before, rtol=0, atol=0)
    assert spy.schedules == [([40, 7], 16, False)]
    assert len({call["block_table"].data_ptr() for call in spy.calls}) == 1


def test_layers_of_other_heads_have_schedules_of_their_own() -> None:
    spy, step = Spy(), decode(40, 7)
    world = world_of(step)
    first, second = world.context.layers
    layers = (first, replace(second, tp_q_head_num=80))
    backend = FlashMLABackend(replace(world.context, layers=layers), {}, spy.kernels)
    backend.init_forward_metadata(prepare_step(world, step).batch)
    assert spy.schedules == [([40, 7], 16, False), ([40, 7], 80, False)]


def test_verification_is_one_call_of_all_drafts() -> None:
    spy = Spy()
    outputs(*made(verify(4, 9, 64), spy.kernels, spec_topk=1))
    call = spy.calls[0]
    assert call["q"].shape == (2, 4, 16, 576)
    assert call["causal"]
    assert call["cache_seqlens"].tolist() == [13, 68]
    assert spy.schedules == [([13, 68], 64, False)]


def test_drafts_of_different_numbers_are_requests_of_their_own() -> None:
    spy = Spy()
    outputs(*made(DRAFTS, spy.kernels, spec_topk=1))
    call = spy.calls[0]
    assert call["q"].shape == (10, 1, 16, 576)
    assert call["cache_seqlens"].tolist() == [21, 22, 23, 65, 10, 11, 12, 13, 1, 2]


def test_tokens_of_no_request_see_nothing() -> None:
    spy = Spy()
    step = replace(DRAFTS, padding=1, trailing=2)
    first, _ = outputs(*made(step, spy.kernels, spec_topk=1))
    assert spy.calls[0]["cache_seqlens"].tolist()[10:] == [1, 0, 0]
    assert not first[-2:].any()


def test_a_request_without_keys_is_told_as_it_is_but_for_e4m3() -> None:
    for settings, told in (({}, [5, 0]), (FP8, [5, 1])):
        spy = Spy()
        outputs(*made(decode(5, 0), spy.kernels, **settings))
        assert spy.calls[0]["cache_seqlens"].tolist() == told
        assert spy.schedules[-1][0] == told


def test_scales_of_the_pool_are_the_descales() -> None:
    spy = Spy()
    outputs(*made(decode(5), spy.kernels, **FP8))
    assert [call["descale_k"].tolist() for call in spy.calls] == [[0.5], [1.0]]
    assert [call["descale_q"].tolist() for call in spy.calls] == [[1.0], [1.0]]
    spy = Spy()
    outputs(*made(decode(5), spy.kernels, kv_scales=(0.5, 3.0)))
    assert "descale_k" not in spy.calls[0]


def test_descales_are_float32_whatever_the_default_is() -> None:
    """Which engines change while they load a model."""
    spy, step = Spy(), decode(5)
    world = world_of(step, kv_in_pool=True, **FP8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        try_kernels(spy.kernels, world.context)
        backend = FlashMLABackend(world.context, {}, spy.kernels)
    finally:
        torch.set_default_dtype(torch.float32)
    prepared = prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    assert all(out.isfinite().all() for out in outputs(backend, prepared))
    kinds = {call[name].dtype for call in spy.calls for name in ("descale_q", "descale_k")}
    assert kinds == {torch.float32}


def test_queries_beyond_the_range_of_fp8_saturate() -> None:
    backend, prepared = made(decode(5), **FP8)
    given = prepared.inputs[0]
    out = backend.forward(
        given.q * 1e4, None, None, given.layer, prepared.batch, q_rope=given.q_rope * 1e4
    )
    assert out.isfinite().all()


def test_a_result_is_of_the_dtype_of_the_queries() -> None:
    backend, prepared = made(decode(5), **FP8, dtype="float16")
    assert {out.dtype for out in outputs(backend, prepared)} == {torch.float16}


def test_graphs_of_several_modes_live_side_by_side() -> None:
    """The second's buffers are larger than the first's, whose schedule has to stay."""
    small, large = decode(40, 70), verify(3, 9, 21, 130, 5)
    world = world_of(small, large, spec_topk=1, kv_in_pool=True)
    backend = FlashMLABackend(world.context, {}, EMULATED["flash_mla"])
    graphs = RecordingGraphs()
    pool = world.context.token_to_kv_pool
    table = world.context.req_to_token_pool.req_to_token

    def capture(step: Step):
        """The graph, and what it reads, which has to live as long."""
        prepared = prepare_step(world, step)
        batch, given = prepared.batch, prepared.inputs[0]
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        step_of_graph = GraphStep(
            prepare=lambda: backend.init_forward_metadata_in_graph(batch),
            forward=lambda: backend.forward(
                given.q, None, None, given.layer, batch, q_rope=given.q_rope
            ),
        )
        with torch.no_grad():
            return graphs.capture(step_of_graph), prepared

    graph, of_small = capture(small)
    graph.replay()
    expected = graph.outputs.clone()
    kept = pool.get_key_buffer(1).clone(), table.clone()
    other, of_large = capture(large)
    other.replay()
    pool.get_key_buffer(1).copy_(kept[0])
    table.copy_(kept[1])
    graph.outputs.zero_()
    graph.replay()
    assert torch.equal(graph.outputs, expected)
    assert (of_small.batch.batch_size, of_large.batch.batch_size) == (2, 4)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_capture_without_room_is_refused(max_batch_size) -> None:
    world = world_of(decode(5, 6))
    backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    if max_batch_size:
        backend.init_cuda_graph_state(max_batch_size, max_batch_size)
    batch = prepare_step(world, decode(5, 6)).batch
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_drafts_of_different_numbers_are_not_captured() -> None:
    world = world_of(DRAFTS, spec_topk=1)
    backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    backend.init_cuda_graph_state(8, 16)
    with pytest.raises(GraphUnsupported, match="DRAFT_EXTEND eagerly"):
        backend.init_forward_metadata_out_graph(prepare_step(world, DRAFTS).batch, in_capture=True)


MASKED = prepare_step(world_of(verify(3, 5), spec_topk=4), verify(3, 5)).batch.spec_info


@pytest.mark.parametrize(
    ("step", "fields", "argument"),
    [
        (extend((0, 3)), {}, "forward_mode"),
        (extend((0, 3), (4, 1), mode=ForwardMode.MIXED), {}, "forward_mode"),
        (verify(3, 5), {"spec_info": MASKED}, "custom_mask"),
        (verify(3, 5), {"spec_info": None}, "spec_info"),
        (DRAFTS, {"extend_seq_lens": None}, "extend_seq_lens"),
    ],
)
def test_steps_that_are_refused(step, fields, argument) -> None:
    world = world_of(step, spec_topk=1)
    backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    with pytest.raises(InvalidInput) as refusal:
        backend.init_forward_metadata(replace(prepare_step(world, step).batch, **fields))
    assert refusal.value.argument == argument


@pytest.mark.parametrize("quantised", [{}, FP8])
def test_more_requests_than_the_kernel_over_e4m3_takes(quantised) -> None:
    world = world_of(decode(5), **quantised)
    backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    count = FP8_REQUESTS + 1
    batch = replace(
        prepare_step(world, decode(5)).batch,
        batch_size=count,
        req_pool_indices=torch.zeros(count, dtype=torch.int64),
        seq_lens=torch.ones(count, dtype=torch.int32),
        out_cache_loc=torch.zeros(count, dtype=torch.int64),
        positions=torch.zeros(count, dtype=torch.int64),
    )
    if not quantised:
        backend.init_forward_metadata(batch)
        backend.init_cuda_graph_state(count, count)
        return
    for refused in (
        lambda: backend.init_forward_metadata(batch),
        lambda: backend.init_cuda_graph_state(count, count),
    ):
        with pytest.raises(InvalidInput, match="at most 4095"):
            refused()


LONG: dict[str, Any] = {"spec_topk": 1, "max_context_len": 640}


@pytest.mark.parametrize(("drafts", "heads", "status"), [(32, 128, "passed"), (33, 2, "refused")])
def test_the_card_has_fewer_drafts_over_e4m3(drafts, heads, status) -> None:
    """As many as every Hopper GPU serves."""
    settings = {**LATENT, **FP8, **LONG, "num_q_heads": heads, "lse": True}
    case = Case(name="drafts", steps=(verify(drafts, 0, 63, 300),), **settings)
    outcome = run_case(candidate(EMULATED["flash_mla"]), case)
    assert outcome.status == status, outcome.message


@pytest.mark.parametrize(("drafts", "heads"), [(66, 2), (64, 130)])
def test_as_many_drafts_as_the_kernel_over_e4m3_takes(drafts, heads) -> None:
    settings = {**LATENT, **FP8, **LONG, "num_q_heads": heads, "lse": True}
    case = Case(name="drafts", steps=(verify(drafts, 0, 63, 300),), **settings)
    mine = candidate(EMULATED["flash_mla"])
    clauses = tuple(replace(clause, spec_draft_tokens=ANY) for clause in mine.card.clauses)
    mine = replace(mine, card=replace(mine.card, clauses=clauses))
    outcome = run_case(mine, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize(("drafts", "heads", "most"), [(67, 2, 66), (65, 130, 64)])
def test_more_drafts_than_the_kernel_over_e4m3_takes(drafts, heads, most) -> None:
    """It would show some of them later keys, or trap."""
    step = verify(drafts, 0, 63)
    for quantised in (FP8, {}):
        world = world_of(step, num_q_heads=heads, **LONG, **quantised)
        backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
        batch = prepare_step(world, step).batch
        if not quantised:
            backend.init_forward_metadata(batch)
            continue
        with pytest.raises(InvalidInput, match=rf"at most {most} over .*, got {drafts} draft"):
            backend.init_forward_metadata(batch)


def test_more_rows_than_the_kernels_count() -> None:
    world = world_of(decode(5))
    backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    batch = prepare_step(world, decode(5)).batch
    count = ROWS // 16 + 1
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
        batch = replace(batch, **{name: getattr(batch, name).expand(count)})
    with pytest.raises(InvalidInput, match=f"at most {ROWS} in one call"):
        backend.init_forward_metadata(replace(batch, batch_size=count))


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"page_size": 32}, "token_to_kv_pool"),
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e5m2"}, "token_to_kv_pool"),
        ({"kv_lora_rank": 256}, "layer 1"),
        ({"logit_cap": 2.0}, "layer 1"),
        ({"windows": (8, None)}, "layer 1"),
        ({"attention_chunk": 16}, "layer 1"),
        ({"sinks": True}, "layer 1"),
        ({"kind": "mha", "kv_lora_rank": None, "qk_rope_head_dim": None}, "layers"),
    ],
)
def test_pools_and_layers_that_are_refused(settings, argument) -> None:
    world = world_of(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    assert refusal.value.argument == argument


def test_layers_of_the_expanded_prefill_are_left_to_others() -> None:
    step = decode(3, 70)
    world = world_of(step, kv_in_pool=True)
    expanded = LayerSpec(
        layer_id=100,
        tp_q_head_num=16,
        tp_k_head_num=16,
        tp_v_head_num=16,
        qk_head_dim=192,
        v_head_dim=128,
        scaling=1.0,
    )
    context = replace(world.context, layers=(expanded, *world.context.layers))
    try_kernels(EMULATED["sgl_kernel"], context)
    backend = FlashMLABackend(context, {}, EMULATED["sgl_kernel"])
    prepared = prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    assert all(out.isfinite().all() for out in outputs(backend, prepared))
    with pytest.raises(InvalidInput, match="expected mla, got mha, id 100"):
        backend.forward(
            torch.zeros(2, 16, 192, dtype=torch.bfloat16), None, None, expanded, prepared.batch
        )


def test_keys_of_the_call_are_refused_before_the_pool_is_touched() -> None:
    step = verify(3, 5)
    world = world_of(step, spec_topk=1)
    backend, prepared = (
        FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"]),
        prepare_step(world, step),
    )
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    with pytest.raises(InvalidInput, match="save_kv_cache"):
        backend.forward(
            given.q,
            given.k,
            None,
            given.layer,
            prepared.batch,
            save_kv_cache=False,
            q_rope=given.q_rope,
            k_rope=given.k_rope,
        )


def test_forward_needs_a_prepared_step() -> None:
    step = decode(3)
    world = world_of(step, kv_in_pool=True)
    backend = FlashMLABackend(world.context, {}, EMULATED["sgl_kernel"])
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        outputs(backend, prepare_step(world, step))


def test_a_step_of_nobody() -> None:
    backend, prepared = made(decode(), **FP8)
    assert [out.shape for out in outputs(backend, prepared)] == [(0, 16, 512)] * 2


def failing(error: Exception):
    def fails(*args: object, **kwargs: object):
        raise error

    return fails


@pytest.mark.parametrize("quantised", [{}, FP8])
@pytest.mark.parametrize("provider", EMULATED)
def test_the_trial_runs_what_the_pool_is_for(provider, quantised) -> None:
    try_kernels(EMULATED[provider], world_of(decode(3), **quantised).context)


def test_kernels_that_do_not_run_here() -> None:
    error = RuntimeError("Dense decode MLA is only supported on SM90a architecture\nmore lines")
    kernels = replace(EMULATED["sgl_kernel"], flash_mla_with_kvcache=failing(error))
    with pytest.raises(BackendFailed, match=r"only supported on SM90a architecture$"):
        try_kernels(kernels, world_of(decode(3)).context)


def install(monkeypatch, **modules: Any) -> None:
    """What `import` finds: None stands for a package that is not there."""
    monkeypatch.setitem(sys.modules, "flash_mla", modules.get("flash_mla"))
    library = modules.get("sgl_kernel")
    monkeypatch.setitem(sys.modules, "sgl_kernel", library and SimpleNamespace(flash_mla=library))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", library)


def test_either_package_serves(monkeypatch) -> None:
    context = world_of(decode(3)).context
    for installed in ({"flash_mla": flash_mla}, {"sgl_kernel": sgl_kernel}):
        install(monkeypatch, **installed)
        backend = make(context, {})
        real = next(iter(installed.values())).flash_mla_with_kvcache
        assert backend._kernels.flash_mla_with_kvcache is real


def test_a_package_that_does_not_run_gives_way_to_the_other(monkeypatch) -> None:
    broken = SimpleNamespace(
        get_mla_decoding_metadata=failing(RuntimeError("legacy kernels are not available")),
        get_mla_metadata=flash_mla.get_mla_metadata,
        flash_mla_with_kvcache=flash_mla.flash_mla_with_kvcache,
    )
    context = world_of(decode(3)).context
    install(monkeypatch, flash_mla=broken, sgl_kernel=sgl_kernel)
    backend = make(context, {})
    assert backend._kernels.flash_mla_with_kvcache is sgl_kernel.flash_mla_with_kvcache
    install(monkeypatch, flash_mla=broken)
    with pytest.raises(BackendFailed, match=r"flash_mla: .*not available; sgl_kernel\.flash_mla: "):
        make(context, {})


def test_another_build_of_the_same_name_gives_way_too(monkeypatch) -> None:
    """FlashMLA's own has no schedule to be made ahead, and no legacy half."""
    other = SimpleNamespace(
        get_mla_metadata=flash_mla.get_mla_metadata,
        flash_mla_with_kvcache=lambda q, k_cache: (q, k_cache),
    )
    install(monkeypatch, flash_mla=other, sgl_kernel=sgl_kernel)
    backend = make(world_of(decode(3)).context, {})
    assert backend._kernels.flash_mla_with_kvcache is sgl_kernel.flash_mla_with_kvcache
    other.get_mla_decoding_metadata = flash_mla.get_mla_decoding_metadata
    backend = make(world_of(decode(3)).context, {})
    assert backend._kernels.flash_mla_with_kvcache is sgl_kernel.flash_mla_with_kvcache


def test_a_pool_that_no_package_serves_is_the_asker_s_mistake(monkeypatch) -> None:
    install(monkeypatch, flash_mla=flash_mla)
    with pytest.raises(InvalidInput, match="pages of 64"):
        make(world_of(decode(3), page_size=32).context, {})
