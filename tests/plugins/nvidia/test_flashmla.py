from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, ForwardMode, InvalidInput, Platform
from attnmux.core.plugin import ANY, rehearse
from attnmux.emulators.candidates import FLASH_MLA, FLASH_MLA_OF_VLLM, OF_SGL_KERNEL
from attnmux.emulators.nvidia.flash_mla import flash_mla, sgl_kernel
from attnmux.nvidia.cards.flashmla import FLASHMLA
from attnmux.nvidia.latent.flashmla import FP8_REQUESTS, ROWS, make
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    decode,
    extend,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.adapters.checks import check_large_queries_saturate
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    LatentDecodeTests,
    assert_passes,
    check_graphs_side_by_side,
    outputs,
    recorded,
)

SETTINGS: dict[str, Any] = {**LATENT, "page_size": 64, "max_context_len": 320}
FP8: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}
FLASH = AdapterWorld(
    library=make,
    kernels=OF_SGL_KERNEL,
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    settings=SETTINGS,
)
OF_ITS_OWN = replace(FLASH, kernels=FLASH_MLA)
OF_VLLM = replace(FLASH, kernels=FLASH_MLA_OF_VLLM)
CANDIDATES = {
    "sgl_kernel": FLASH.candidate(FLASHMLA),
    "flash_mla": OF_ITS_OWN.candidate(FLASHMLA),
    "vllm": OF_VLLM.candidate(FLASHMLA),
}


class TestFlashMLAOfSglKernel(AttentionBackendTests):
    backend = CANDIDATES["sgl_kernel"]
    page_sizes = (64,)


class TestFlashMLAOfItsOwn(AttentionBackendTests):
    backend = CANDIDATES["flash_mla"]
    page_sizes = (64,)


class TestFlashMLAOfVllm(AttentionBackendTests):
    backend = CANDIDATES["vllm"]
    page_sizes = (64,)


class TestFlashMLAAdapterOfVllm(LatentDecodeTests):
    adapter = OF_VLLM


class TestFlashMLAAdapter(LatentDecodeTests):
    adapter = FLASH


class TestFlashMLAAdapterOverE4M3(LatentDecodeTests):
    adapter = replace(OF_ITS_OWN, settings={**SETTINGS, **FP8})


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
@pytest.mark.turns(3)
def test_other_steps(name, graph, quantised) -> None:
    steps, settings = CASES[name]
    candidate = CANDIDATES["flash_mla" if graph else "sgl_kernel"]
    assert_passes(candidate, *steps, **{**SETTINGS, **quantised, **settings}, graph=graph)


@pytest.mark.parametrize("settings", [{}, FP8])
def test_graphs_of_several_modes_live_side_by_side(settings) -> None:
    steps = decode(40, 70), verify(3, 9, 21, 130, 5)
    check_graphs_side_by_side(FLASH, *steps, spec_topk=1, **settings)


class Spy:
    """Kernels whose calls are recorded."""

    def __init__(self) -> None:
        self.kernels, self._calls = recorded(OF_SGL_KERNEL)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Arguments of each attention."""
        names = "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"
        return [
            dict(zip(names, call.args, strict=True)) | call.kwargs
            for call in self._calls
            if call.name == "flash_mla_with_kvcache"
        ]

    @property
    def schedules(self) -> list[tuple[list[int], int, bool]]:
        made = [call.args for call in self._calls if call.name == "schedule"]
        return [(lens.tolist(), num_rows, is_fp8) for lens, num_rows, is_fp8 in made]


def test_a_step_has_one_schedule_and_one_table() -> None:
    spy = Spy()
    outputs(*FLASH.prepared(decode(40, 7), kernels=spy.kernels))
    assert spy.schedules == [([40, 7], 16, False)]
    assert len({call["block_table"].data_ptr() for call in spy.calls}) == 1


def test_layers_of_other_heads_have_schedules_of_their_own() -> None:
    spy, step = Spy(), decode(40, 7)
    world = FLASH.world(step)
    first, second = world.context.layers
    layers = (first, replace(second, tp_q_head_num=80))
    backend = FLASH.backend(replace(world.context, layers=layers), kernels=spy.kernels)
    backend.init_forward_metadata(prepare_step(world, step).batch)
    assert spy.schedules == [([40, 7], 16, False), ([40, 7], 80, False)]


def test_verification_is_one_call_of_all_drafts() -> None:
    spy = Spy()
    outputs(*FLASH.prepared(verify(4, 9, 64), kernels=spy.kernels, spec_topk=1))
    call = spy.calls[0]
    assert call["q"].shape == (2, 4, 16, 576)
    assert call["causal"]
    assert call["cache_seqlens"].tolist() == [13, 68]
    assert spy.schedules == [([13, 68], 64, False)]


def test_drafts_of_different_numbers_are_requests_of_their_own() -> None:
    spy = Spy()
    outputs(*FLASH.prepared(DRAFTS, kernels=spy.kernels, spec_topk=1))
    call = spy.calls[0]
    assert call["q"].shape == (10, 1, 16, 576)
    assert call["cache_seqlens"].tolist() == [21, 22, 23, 65, 10, 11, 12, 13, 1, 2]


def test_tokens_of_no_request_see_nothing() -> None:
    spy, step = Spy(), replace(DRAFTS, padding=1, trailing=2)
    first, _ = outputs(*FLASH.prepared(step, kernels=spy.kernels, spec_topk=1))
    assert spy.calls[0]["cache_seqlens"].tolist()[10:] == [1, 0, 0]
    assert not first[-2:].any()


@pytest.mark.parametrize(("settings", "given"), [({}, [5, 0]), (FP8, [5, 1])])
def test_a_request_without_keys_is_given_one_over_e4m3(settings, given) -> None:
    spy = Spy()
    outputs(*FLASH.prepared(decode(5, 0), kernels=spy.kernels, **settings))
    assert spy.calls[0]["cache_seqlens"].tolist() == given
    assert spy.schedules[-1][0] == given


def test_scales_of_the_pool_are_the_descales() -> None:
    spy = Spy()
    outputs(*FLASH.prepared(decode(5), kernels=spy.kernels, **FP8))
    assert [call["descale_k"].tolist() for call in spy.calls] == [[0.5], [1.0]]
    assert [call["descale_q"].tolist() for call in spy.calls] == [[1.0], [1.0]]
    spy = Spy()
    outputs(*FLASH.prepared(decode(5), kernels=spy.kernels, kv_scales=(0.5, 3.0)))
    assert "descale_k" not in spy.calls[0]


def test_descales_are_float32_whatever_the_default_is() -> None:
    """Engines change torch's default dtype while they load a model."""
    spy, step = Spy(), decode(5)
    world = FLASH.world(step, kv_in_pool=True, **FP8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        backend = FLASH.backend(world.context, kernels=spy.kernels)
        rehearse(backend)
    finally:
        torch.set_default_dtype(torch.float32)
    prepared = prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    assert all(out.isfinite().all() for out in outputs(backend, prepared))
    kinds = {call[name].dtype for call in spy.calls for name in ("descale_q", "descale_k")}
    assert kinds == {torch.float32}


def test_queries_beyond_the_range_of_fp8_saturate() -> None:
    check_large_queries_saturate(FLASH, **FP8)


def test_a_result_is_of_the_dtype_of_the_queries() -> None:
    results = outputs(*FLASH.prepared(decode(5), **FP8, dtype="float16"))
    assert {out.dtype for out in results} == {torch.float16}


def test_drafts_of_different_numbers_are_not_captured() -> None:
    FLASH.captures_no("DRAFT_EXTEND eagerly", DRAFTS, spec_topk=1)


MASKED = prepare_step(FLASH.world(verify(3, 5), spec_topk=4), verify(3, 5)).batch.spec_info


@pytest.mark.parametrize(
    ("step", "fields", "argument"),
    [
        (verify(3, 5), {"spec_info": MASKED}, "spec_info.custom_mask"),
        (verify(3, 5), {"spec_info": None}, "spec_info"),
        (DRAFTS, {"extend_seq_lens": None}, "extend_seq_lens"),
    ],
)
def test_steps_that_are_refused(step, fields, argument) -> None:
    FLASH.refuses(f"^{argument}: ", step, batch=fields, spec_topk=1)


@pytest.mark.parametrize("quantised", [{}, FP8])
def test_more_requests_than_the_kernel_over_e4m3_takes(quantised) -> None:
    world = FLASH.world(decode(5), **quantised)
    backend, count = FLASH.backend(world.context), FP8_REQUESTS + 1
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


def drafts_over_e4m3(drafts: int, heads: int) -> Case:
    one_layer = {"windows": (None,), "lse": True}
    settings = {**SETTINGS, **FP8, **LONG, **one_layer, "num_q_heads": heads}
    return Case(name="drafts", steps=(verify(drafts, 0, 63, 108),), **settings)


@pytest.mark.parametrize(("drafts", "heads", "status"), [(32, 128, "passed"), (33, 2, "refused")])
def test_the_card_has_fewer_drafts_over_e4m3(drafts, heads, status) -> None:
    """As many as every Hopper GPU serves."""
    outcome = run_case(CANDIDATES["flash_mla"], drafts_over_e4m3(drafts, heads))
    assert outcome.status == status, outcome.message


@pytest.mark.parametrize(("drafts", "heads"), [(66, 2), (64, 130)])
def test_as_many_drafts_as_the_kernel_over_e4m3_takes(drafts, heads) -> None:
    mine = CANDIDATES["flash_mla"]
    clauses = tuple(replace(clause, spec_draft_tokens=ANY) for clause in mine.card.clauses)
    mine = replace(mine, card=replace(mine.card, clauses=clauses))
    outcome = run_case(mine, drafts_over_e4m3(drafts, heads))
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize(("drafts", "heads", "most"), [(67, 2, 66), (65, 130, 64)])
def test_more_drafts_than_the_kernel_over_e4m3_takes(drafts, heads, most) -> None:
    """It would show some of them later keys, or trap."""
    step = verify(drafts, 0, 63)
    world = FLASH.world(step, num_q_heads=heads, **LONG)
    FLASH.backend(world.context).init_forward_metadata(prepare_step(world, step).batch)
    said = f"at most {most} over .*, got {drafts} draft"
    FLASH.refuses(said, step, batch={}, num_q_heads=heads, **LONG, **FP8)


def test_more_rows_than_the_kernels_count() -> None:
    world = FLASH.world(decode(5))
    batch = prepare_step(world, decode(5)).batch
    count = ROWS // 16 + 1
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
        batch = replace(batch, **{name: getattr(batch, name).expand(count)})
    with pytest.raises(InvalidInput, match=f"at most {ROWS} in one call"):
        FLASH.backend(world.context).init_forward_metadata(replace(batch, batch_size=count))


@pytest.mark.parametrize(
    "settings", [{"page_size": 32}, {"kv_dtype": "float16"}, {"kv_dtype": "fp8_e5m2"}]
)
def test_pools_that_are_refused(settings) -> None:
    FLASH.refuses("token_to_kv_pool", decode(3), **settings)


def test_keys_of_the_call_are_refused() -> None:
    backend, prepared = FLASH.prepared(verify(3, 5), spec_topk=1, kv_in_pool=False)
    given = prepared.inputs[0]
    more = {"save_kv_cache": False, "q_rope": given.q_rope, "k_rope": given.k_rope}
    with pytest.raises(InvalidInput, match="save_kv_cache"):
        backend.forward(given.q, given.k, None, given.layer, prepared.batch, **more)


def install(monkeypatch, **modules: Any) -> None:
    """What `import` finds: None is a package that is not installed."""
    monkeypatch.setitem(sys.modules, "flash_mla", modules.get("flash_mla"))
    library = modules.get("sgl_kernel")
    monkeypatch.setitem(sys.modules, "sgl_kernel", library and SimpleNamespace(flash_mla=library))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", library)


@pytest.mark.parametrize("settings", [{}, FP8])
def test_either_package_serves(monkeypatch, settings) -> None:
    context = FLASH.world(decode(3), **settings).context
    for installed in ({"flash_mla": flash_mla}, {"sgl_kernel": sgl_kernel}):
        install(monkeypatch, **installed)
        real = next(iter(installed.values())).flash_mla_with_kvcache
        assert make(context).kernels.flash_mla_with_kvcache is real


@pytest.mark.parametrize("settings", [{}, FP8])
def test_a_package_that_does_not_run_gives_way_to_the_other(monkeypatch, settings) -> None:
    def fails(*args: object, **kwargs: object):
        raise RuntimeError("legacy kernels are not available")

    broken = SimpleNamespace(
        get_mla_decoding_metadata=fails,
        get_mla_metadata=flash_mla.get_mla_metadata,
        flash_mla_with_kvcache=flash_mla.flash_mla_with_kvcache,
    )
    context = FLASH.world(decode(3), **settings).context
    install(monkeypatch, flash_mla=broken, sgl_kernel=sgl_kernel)
    taken = make(context).kernels.flash_mla_with_kvcache
    assert taken is sgl_kernel.flash_mla_with_kvcache
    install(monkeypatch, flash_mla=broken)
    with pytest.raises(BackendFailed, match=r"flash_mla: .*not available; sgl_kernel\.flash_mla: "):
        make(context)


def test_another_build_of_the_same_name_gives_way_too(monkeypatch) -> None:
    """FlashMLA's own has no schedule to be made ahead, and no legacy half."""
    other = SimpleNamespace(
        get_mla_metadata=flash_mla.get_mla_metadata,
        flash_mla_with_kvcache=lambda q, k_cache: (q, k_cache),
    )
    install(monkeypatch, flash_mla=other, sgl_kernel=sgl_kernel)
    context, expected = FLASH.world(decode(3)).context, sgl_kernel.flash_mla_with_kvcache
    assert make(context).kernels.flash_mla_with_kvcache is expected
    other.get_mla_decoding_metadata = flash_mla.get_mla_decoding_metadata
    assert make(context).kernels.flash_mla_with_kvcache is expected


def test_a_pool_that_no_package_serves_is_the_caller_s_mistake(monkeypatch) -> None:
    install(monkeypatch, flash_mla=flash_mla)
    with pytest.raises(InvalidInput, match="pages of 64"):
        make(FLASH.world(decode(3), page_size=32).context)
