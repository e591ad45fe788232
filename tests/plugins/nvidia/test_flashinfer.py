"""FlashInferBackend on the emulator of the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import (
    ForwardMode,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    InvalidInput,
    MultiItem,
    Offer,
    Platform,
    Request,
    solve,
)
from attnmux.core.plugin import rehearse
from attnmux.emulators.candidates import WRAPPERS as EMULATED
from attnmux.nvidia.cards.flashinfer import FLASHINFER
from attnmux.nvidia.flashinfer.backend import make
from attnmux.nvidia.flashinfer.layers import PlanGroup
from attnmux.nvidia.flashinfer.settings import graph_plan_bytes, graph_workspace_bytes
from attnmux.nvidia.flashinfer.shared import MIB, Staging
from attnmux.nvidia.flashinfer.step import LONGEST, Items
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    RecordingGraphs,
    Step,
    decode,
    extend,
    make_setup,
    prepare_step,
    reference,
    run_case,
    verify,
)
from attnmux.testing.adapters.checks import check_rows_are_copied, check_runners_of_two_modes
from attnmux.testing.adapters.tests import (
    AdapterTests,
    AdapterWorld,
    KernelCall,
    assert_passes,
    outputs,
    recorded,
)
from gaps import gap

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
ADAPTER = AdapterWorld(
    library=make,
    kernels=EMULATED,
    platform=HOPPER,
    host_lens=True,
    settings={"max_context_len": 64},
)
CANDIDATE = ADAPTER.candidate(FLASHINFER)
UNEVEN = extend((0, 7), (9, 3))


class TestFlashInferEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)


class TestFlashInferAdapter(AdapterTests):
    adapter = ADAPTER


DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PAGED = "BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"


def counts(calls: list[KernelCall]) -> Counter[str]:
    """How often each function is called, but for the making of wrappers."""
    return Counter(call.name for call in calls if call.name not in (DECODE, PAGED, RAGGED))


def given(calls: list[KernelCall], name: str, keyword: str) -> list[Any]:
    return [call.kwargs[keyword] for call in calls if call.name == name]


def groups_of(**settings: Any) -> tuple[PlanGroup, ...]:
    context = ADAPTER.world(decode(1), **settings).context
    return tuple(dict.fromkeys(PlanGroup.of(layer, context) for layer in context.layers))


def test_extend_without_a_prefix_reads_the_calls_keys() -> None:
    calls = ADAPTER.calls(extend((0, 7), (0, 3)))
    assert counts(calls) == {f"{RAGGED}.plan": 1, f"{RAGGED}.run": 2}
    assert given(calls, f"{RAGGED}.plan", "causal") == [True]


def test_a_prefix_is_merged_by_lse() -> None:
    calls = ADAPTER.calls(UNEVEN)
    for name in ("merge_state_in_place", f"{RAGGED}.run", f"{PAGED}.run"):
        assert counts(calls)[name] == 2
    assert given(calls, f"{PAGED}.plan", "causal") == [False]
    assert given(calls, f"{RAGGED}.plan", "causal") == [True]


@pytest.mark.parametrize(
    "settings",
    [{"windows": (8, None)}, {"kv_dtype": "fp8_e4m3"}, {"kv_in_pool": True}],
    ids=["window", "quantised", "nothing-given"],
)
def test_other_extends_read_the_pool(settings) -> None:
    calls = ADAPTER.calls(UNEVEN, **settings)
    assert counts(calls)[f"{PAGED}.run"] == 2
    assert not counts(calls)[f"{RAGGED}.run"]
    assert not counts(calls)["merge_state_in_place"]


def test_cross_attention_reads_the_pool_and_is_not_causal() -> None:
    calls = ADAPTER.calls(extend((0, 5), (0, 3), encoder=(12, 4)))
    assert given(calls, f"{PAGED}.plan", "causal") == [True, False]
    assert not counts(calls)[f"{RAGGED}.run"]


def test_cross_attention_has_no_window() -> None:
    step = extend((0, 5), (0, 3), encoder=(12, 4))
    calls = ADAPTER.calls(step, windows=(4, 4))
    assert given(calls, f"{PAGED}.plan", "window_left") == [4, -1]
    assert_passes(CANDIDATE, step, windows=(4, 4))


def test_windows_have_a_plan_each_and_layers_share_it() -> None:
    calls = ADAPTER.calls(decode(5, 30), windows=(8, None, 21, 8))
    assert counts(calls) == {f"{DECODE}.plan": 3, f"{DECODE}.run": 4}
    assert given(calls, f"{DECODE}.plan", "window_left") == [8, -1, 21]


def test_layers_of_another_scale_or_cap_have_a_plan_of_their_own() -> None:
    calls = ADAPTER.calls(decode(5, 30), scaling=0.3, logit_cap=2.0)
    assert given(calls, f"{DECODE}.plan", "sm_scale") == [0.3, 0.6]
    assert given(calls, f"{DECODE}.plan", "logits_soft_cap") == [2.0, 4.0]


@pytest.mark.parametrize("save_kv_cache", [True, False])
def test_hidden_keys_stay_hidden_under_a_small_scale(save_kv_cache) -> None:
    """As where K is what a pool of 8-bit floats stores, and the scale has the pool's factor."""
    step = extend((0, 41), (0, 20))
    assert_passes(CANDIDATE, step, scaling=1e-6, save_kv_cache=save_kv_cache, host_lens=True)


def test_scales_of_quantised_pools_are_numbers() -> None:
    calls = ADAPTER.calls(decode(5, 30), kv_dtype="fp8_e5m2", kv_scales=(0.5, 3.0))
    assert given(calls, f"{DECODE}.run", "k_scale") == [0.5, None]
    assert given(calls, f"{DECODE}.run", "v_scale") == [3.0, 6.0]


def test_steps_plan_once_and_layers_do_not() -> None:
    calls = ADAPTER.calls(decode(5, 30), decode(6, 31), windows=(None,) * 5)
    assert counts(calls) == {f"{DECODE}.plan": 2, f"{DECODE}.run": 10}


def test_only_replays_of_decode_take_the_fast_plan() -> None:
    kernels, calls = recorded(EMULATED)
    backend, prepared = ADAPTER.prepared(decode(5, 30), kernels=kernels)
    runner = GraphRunner(
        backend,
        lambda batch, inputs: batch.positions + 1,
        GraphConfig(batch_sizes=(2, 4), host_lens=True),
        devices=RecordingGraphs(),
        progress=iter,
    )
    calls.clear()
    runner.capture(prepared.batch)
    assert counts(calls) == {f"{DECODE}.plan": 2}
    calls.clear()
    runner.replay(prepared.batch)
    assert counts(calls) == {"fast_decode_plan": 1}
    calls.clear()
    backend.init_forward_metadata(prepared.batch)
    assert counts(calls) == {f"{DECODE}.plan": 1}


def test_keys_of_another_dtype_are_read_as_the_pool_casts_them() -> None:
    backend, prepared = ADAPTER.prepared(extend((0, 9), (0, 4)), kv_in_pool=False)
    wide = [replace(each, k=each.k.float(), v=each.v.float()) for each in prepared.inputs]
    found = outputs(backend, replace(prepared, inputs=tuple(wide)))
    torch.testing.assert_close(found, outputs(backend, prepared), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_q_heads": 8, "num_kv_heads": 2}, True),
        ({"num_q_heads": 6, "num_kv_heads": 2}, False),
        ({"num_q_heads": 6, "num_kv_heads": 2, "kv_dtype": "fp8_e4m3"}, True),
        ({"num_q_heads": 2, "num_kv_heads": 2, "deterministic": True}, True),
    ],
)
def test_tensor_cores_from_four_heads_on_and_with_fp8(settings, expected) -> None:
    off = expected and bool(settings.get("deterministic"))
    for option, used in (("auto", expected), ("on", True), ("off", off)):
        calls = ADAPTER.rehearsed(decode(5), options={"use_tensor_cores": option}, **settings)
        assert given(calls, DECODE, "use_tensor_cores") == [used]


def test_deterministic_decode_does_not_split_keys() -> None:
    calls = ADAPTER.calls(decode(5, 30), deterministic=True, kv_in_pool=True)
    assert given(calls, f"{DECODE}.plan", "disable_split_kv") == [True]


@pytest.mark.parametrize(
    ("heads", "head_dim", "mib"),
    [((32, 8), 128, 256), ((28, 4), 128, 256), ((64, 4), 128, 512), ((32, 2), 256, 512)],
)
def test_workspace_follows_the_head_counts(heads, head_dim, mib) -> None:
    dims = {"head_dim": head_dim, "v_head_dim": head_dim}
    for options, expected in (({}, mib), ({"workspace_bytes": 64 * MIB}, 64)):
        setup = ADAPTER.world(decode(1), num_q_heads=heads[0], num_kv_heads=heads[1], **dims)
        ADAPTER.backend(setup.context, options)
        assert setup.context.workspace.nbytes == expected * MIB


@pytest.mark.parametrize(
    ("sizes", "tiles", "rows"),
    [
        ((160, 160), 40 + 160, 16),
        ((160, 640), 20 + 160, 128),
        ((512, 512), 128 + 512, 16),
        ((1, 8), 40, 64),  # one request is split over the whole device
    ],
)
def test_workspace_of_graphs(sizes, tiles, rows) -> None:
    """32 query heads over 8 of 128, so 4 rows a token; a partial output and its LSE in float32."""
    groups = groups_of(num_q_heads=32, num_kv_heads=8)
    assert graph_workspace_bytes(groups, *sizes) == 32 * tiles * rows * (128 + 1) * 4


@pytest.mark.parametrize(
    ("heads", "sizes", "lists"),
    [
        # fa2: 3 numbers and a flag of a tile; a tile a request; a sum of each row and request
        ((32, 8), (160, 160), (40 + 160, 13, 161 + 161)),
        ((64, 4), (32, 256), (256 + 32, 13, 257 + 33)),
        # fa3: 7 numbers of a tile of a head; where those of each of 132 SMs begin
        ((64, 8), (160, 160), (64 * (2 + 159), 28, 133)),
    ],
)
def test_plans_of_graphs_fit_their_memory(heads, sizes, lists) -> None:
    (group, *_) = groups_of(num_q_heads=heads[0], num_kv_heads=heads[1])
    tiles, of_tile, others = lists
    assert tiles * of_tile + 4 * others < graph_plan_bytes(group, *sizes) < 2 * MIB


def test_deterministic_decode_is_not_captured() -> None:
    """Whatever the engine asked the selector for: padded blocks would read beyond the plan."""
    backend = ADAPTER.backend(ADAPTER.world(decode(5), deterministic=True).context)
    with pytest.raises(GraphUnsupported, match="deterministic"):
        backend.init_cuda_graph_state(2, 2)


def test_a_batch_without_host_lengths_is_refused() -> None:
    ADAPTER.refuses("seq_lens_cpu", decode(5), batch={"seq_lens_cpu": None})


@pytest.mark.parametrize(
    ("step", "num_tokens"), [(decode(5, 6), 3), (decode(5, 6), 1), (extend((0, 5)), 4)]
)
def test_tokens_that_are_not_the_requests_are_refused(step, num_tokens) -> None:
    backend, prepared = ADAPTER.prepared(step)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    extends = {} if step.mode.is_decode() else {"extend_num_tokens": num_tokens}
    batch = replace(prepared.batch, out_cache_loc=tokens, positions=tokens, **extends)
    with pytest.raises(InvalidInput, match="out_cache_loc"):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("settings", "options", "option"),
    [
        ({"kv_dtype": "fp8_e4m3"}, {"prefill_backend": "fa3"}, "prefill_backend"),
        ({"kv_dtype": "fp8_e5m2"}, {"decode_backend": "fa3"}, "decode_backend"),
        ({"num_q_heads": 14}, {"use_tensor_cores": "off"}, "use_tensor_cores"),
    ],
)
def test_options_that_no_kernel_serves(settings, options, option) -> None:
    ADAPTER.refuses(option, decode(5), options=options, **settings)


@pytest.mark.parametrize("settings", [{"spec_topk": 1}, {"spec_topk": 4}])
def test_drafts_and_masks_are_not_given_to_fa3(settings) -> None:
    """The library keeps its first choice for "auto", and fa3 would drop the mask."""
    calls = ADAPTER.rehearsed(verify(4, 9, 20), options={"prefill_backend": "fa3"}, **settings)
    assert given(calls, PAGED, "backend") == ["fa2"]


def test_a_kernel_that_does_not_compile_is_a_reason_with_a_hint() -> None:
    error = RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda'\nmore")
    failed = ADAPTER.fails(error, DECODE, step=decode(5))
    assert failed.address == "nvidia/flashinfer"
    assert "Could not find nvcc" in str(failed)
    assert "pip install 'attnmux-nvidia[flashinfer]'" in str(failed)
    assert "more" not in str(failed)


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (decode(5), {}, {DECODE}),
        (extend((3, 5)), {}, {RAGGED, PAGED, "merge_state_in_place"}),
        (extend((3, 5)), {"windows": (4,)}, {PAGED}),
        (extend((0, 5), encoder=(12,)), {}, {PAGED}),
        (verify(4, 9), {"spec_topk": 4}, {PAGED}),
        (extend((0, 5)), {"is_encoder": True, "save_kv_cache": False}, {RAGGED}),
    ],
)
def test_the_trial_runs_the_kernels_of_the_steps(step, settings, expected) -> None:
    """Each phase that the request asks for, so that no step compiles anything."""
    calls = ADAPTER.rehearsed(step, **settings)
    assert {call.name.removesuffix(".run") for call in calls if "plan" not in call.name} == expected
    kernels, calls = recorded(EMULATED)
    setup = ADAPTER.world(step, **settings)
    backend = ADAPTER.backend(setup.context, kernels=kernels)
    rehearse(backend)
    calls.clear()
    prepared = ADAPTER.prepare(setup, step)
    backend.init_forward_metadata(prepared.batch)
    outputs(backend, prepared)
    assert not {call.name for call in calls} & {DECODE, PAGED, RAGGED}


def test_more_heads_than_a_block_of_the_merge_holds() -> None:
    assert_passes(CANDIDATE, UNEVEN, num_q_heads=72, num_kv_heads=8, lse=True, head_dim=128)


@pytest.mark.parametrize("step", [extend((0, 9), (0, 4)), UNEVEN, decode(9, 4)])
def test_rows_that_the_kernels_cannot_load_are_copied(step) -> None:
    check_rows_are_copied(*ADAPTER.prepared(step, kv_in_pool=False))


def test_a_merge_writes_where_the_caller_wants() -> None:
    """Neither out nor LSE is copied: the second part is merged into the first in place."""
    kernels, calls = recorded(EMULATED)
    backend, prepared = ADAPTER.prepared(UNEVEN, kernels=kernels, kv_in_pool=False)
    first = prepared.inputs[0]
    out, lse = torch.empty_like(first.q), torch.zeros(first.q.shape[:2])
    outputs(backend, replace(prepared, inputs=(first,)), out=out, lse=lse)
    assert given(calls, f"{RAGGED}.run", "out") == [out]
    assert given(calls, f"{RAGGED}.run", "lse") == [lse]


def test_plans_are_made_when_those_of_the_step_before_were_copied(monkeypatch) -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_, **__: order.append(name)

    for name in ("wait", "mark"):
        monkeypatch.setattr(Staging, name, noted(name))
    planner = "attnmux.nvidia.flashinfer.planning.Planner.plan_eager"
    monkeypatch.setattr(planner, lambda *_: order.append("plan") or Stub())
    ADAPTER.calls(UNEVEN, decode(5), kv_in_pool=True)
    eager, lazy = ["wait", "plan", "plan", "mark"], ["plan", "mark"]
    assert order == [*eager, *lazy, "wait", "plan", "mark"]


class Stub:
    def run(self, *args: Any, **kwargs: Any) -> None:
        pass


ITEMS = extend((9, 13), (0, 30), (21, 9), items=((6, 7), (3, 5, 2, 11), (1, 14, 5)))
"""A prefix that is cached in part, one that is not, and one whose first item is cached too."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"lse": True},
    "cap": {"logit_cap": 2.0},
    "windows": {"windows": (5, None, 40)},
    "in-pool": {"kv_in_pool": True},
    "fp8": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
}


@pytest.mark.parametrize("settings", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED], ids=lambda m: m.name)
def test_many_items_with(mode, settings) -> None:
    assert_passes(
        CANDIDATE,
        replace(ITEMS, mode=mode),
        replace(ITEMS, mode=mode, trailing=4),
        page_size=3,
        **settings,
    )


def test_the_last_of_many_short_items_load_no_value_after_the_keys() -> None:
    """The reserved slot's value is then multiplied by 0, and here it is NaN."""
    assert_passes(CANDIDATE, extend((30, 20), (0, 126), items=((5, 5, 5), (5,) * 24)), page_size=1)


def test_items_are_planned_once_a_step_and_for_fa2() -> None:
    calls = ADAPTER.calls(ITEMS, extend((0, 7)), windows=(8, None))
    plans = [call.kwargs for call in calls if call.name == f"{PAGED}.plan"]
    first, second, *others = [plan.get("prefix_len_ptr") for plan in plans]
    assert first is second
    assert first.tolist() == [9, 9, 10]
    assert others == [None, None]
    assert plans[0]["token_pos_in_items_len"] == 31
    assert plans[0]["max_item_len_ptr"].tolist() == [128, 128, 128]
    assert RAGGED not in {call.name for call in calls}
    calls = ADAPTER.rehearsed(ITEMS, options={"prefill_backend": "fa3"})
    assert given(calls, PAGED, "backend") == ["fa3", "fa2"]


def with_items(step: Step, **settings: Any) -> tuple[Any, Any, Any]:
    """A backend and a step, and the step's batch with items, which the backend was not made for."""
    setup = ADAPTER.world(step, **settings)
    prepared = ADAPTER.prepare(setup, step)
    lens, tokens = prepared.batch.seq_lens, prepared.batch.num_tokens
    items = MultiItem(
        prefix_lens=torch.zeros_like(lens),
        token_pos_in_items=torch.zeros(tokens, dtype=torch.int32),
    )
    backend = ADAPTER.backend(setup.context)
    return backend, prepared, replace(prepared.batch, multi_item=items)


@pytest.mark.parametrize(
    ("step", "settings", "mode"),
    [
        (decode(5), {}, "DECODE"),
        (verify(4, 9), {"spec_topk": 1}, "TARGET_VERIFY"),
        (extend((2, 3), mode=ForwardMode.DRAFT_EXTEND), {"spec_topk": 1}, "DRAFT_EXTEND"),
    ],
)
def test_items_are_refused_where_no_kernel_masks_by_them(step, settings, mode) -> None:
    backend, _, batch = with_items(step, **settings)
    with pytest.raises(InvalidInput, match=f"multi_item.*{mode}"):
        backend.init_forward_metadata(batch)


def test_items_over_the_calls_keys_are_refused() -> None:
    backend, prepared, batch = with_items(extend((0, 5)))
    backend.init_forward_metadata(batch)
    with pytest.raises(InvalidInput, match=r"multi_item.*save_kv_cache=True"):
        outputs(backend, replace(prepared, batch=batch, save_kv_cache=False))


def test_an_item_beyond_16_bits_is_refused() -> None:
    _, _, batch = with_items(extend((0, 5)))
    items, lens = batch.multi_item, torch.tensor([LONGEST + 5], dtype=torch.int32)
    items.token_pos_in_items[3] = LONGEST
    with pytest.raises(InvalidInput, match=f"an item of {LONGEST + 1} tokens"):
        Items.of(items, batch.positions, batch.extend_seq_lens_cpu, lens)
    items.token_pos_in_items[3] = LONGEST - 1
    laid = Items.of(items, batch.positions, batch.extend_seq_lens_cpu, lens)
    assert laid.longest.tolist() == [LONGEST]


SUNK: dict[str, tuple[Step, dict[str, Any]]] = {
    "verify": (verify(4, 9, 30, 16), {"spec_topk": 1}),
    "draft": (extend((20, 3), (5, 1), mode=ForwardMode.DRAFT_EXTEND), {"spec_topk": 1}),
    "deterministic": (decode(45, 3, 17), {"deterministic": True, "kv_in_pool": True}),
    "scale": (decode(45, 3), {"scaling": 0.3}),
    "fp8": (decode(45, 3), {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}),
    "small-scale": (extend((7, 20)), {"kv_dtype": "fp8_e5m2", "kv_scales": (1e-5, 1.5)}),
    "padding": (extend((4, 9), (0, 20), padding=2, trailing=3), {"windows": (8, None)}),
}


@pytest.mark.parametrize(("step", "settings"), SUNK.values(), ids=SUNK)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_sinks_with(request, step, settings, graph) -> None:
    if graph and not step.can_be_captured:
        pytest.skip("prompts are not captured")
    if graph and settings.get("deterministic"):
        why = "a captured decode without splits runs blocks that its plan leaves unset"
        gap(request, "notyet", raises=AssertionError, reason=why)
    assert_passes(CANDIDATE, step, sinks=True, lse=True, graph=graph, **settings)


def test_sinks_are_compiled_into_the_paged_kernels() -> None:
    calls = ADAPTER.calls(decode(5, 30), windows=(8, None), sinks=True)
    assert counts(calls) == {
        "get_batch_prefill_attention_sink_uri": 2, f"{PAGED}.plan": 2, f"{PAGED}.run": 2,
    }  # fmt: skip
    calls = ADAPTER.rehearsed(extend((3, 5)), windows=(8, None), sinks=True)
    assert given(calls, PAGED, "backend") == ["fa2", "fa2"]
    windowed, full = given(calls, PAGED, "jit_args")
    assert windowed[0] != full[0]
    assert given(calls, PAGED, "jit_kwargs") == [
        {"use_sliding_window": True},
        {"use_sliding_window": False},
    ]


@pytest.mark.parametrize("sink", [-torch.inf, 3e4])
@pytest.mark.parametrize("step", [decode(0, 5), extend((0, 9), (4, 2))])
def test_sinks_of_any_size(step, sink) -> None:
    backend, prepared = ADAPTER.prepared(step, sinks=True)
    context, first = backend.context, prepared.inputs[0]
    for layer in context.layers:
        layer.sinks[:2] = sink
    lse = torch.zeros(first.q.shape[:2])
    out = outputs(backend, replace(prepared, inputs=(first,)), lse=lse)[0]
    table, pool = context.req_to_token_pool.req_to_token, context.token_to_kv_pool
    expected = reference.attention(first.q, first.layer, prepared.batch, table, pool)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("step", "settings", "argument"),
    [
        (decode(5), {"logit_cap": 2.0}, "logit_cap.*2 and sinks"),
        (verify(4, 9), {"spec_topk": 4}, "sinks.*custom mask"),
        (ITEMS, {}, "sinks.*many items"),
        (extend((0, 5)), {"is_encoder": True, "save_kv_cache": False}, "sinks.*of the call"),
    ],
)
def test_sinks_that_no_kernel_looks_at_are_refused(step, settings, argument) -> None:
    ADAPTER.refuses(argument, step, sinks=True, **settings)


def test_sinks_over_the_calls_keys_are_refused() -> None:
    backend, prepared = ADAPTER.prepared(extend((0, 5)), sinks=True, kv_in_pool=False)
    with pytest.raises(InvalidInput, match=r"sinks.*of the call"):
        outputs(backend, replace(prepared, save_kv_cache=False))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_steps_that_are_prepared_while_the_device_is_behind() -> None:
    """Plans of later steps must not reach the device in place of an earlier one's."""
    pytest.importorskip("flashinfer", exc_type=ImportError)
    steps = [decode(*lens) for lens in ((700, 3), (5, 900), (64, 64), (1, 1000))]
    case = Case(name="behind", steps=steps, max_context_len=1024, page_size=1, kv_in_pool=True)
    setup = make_setup(case, HOPPER, "cuda")
    backend = make(setup.context)
    prepared = [prepare_step(setup, step, host_lens=True) for step in steps]
    # Each step wrote to the pool in place of the one before.
    buffers = setup.context.token_to_kv_pool.get_kv_buffer(prepared[0].inputs[0].layer.layer_id)
    for buffer in buffers:
        buffer.normal_()
    setup.context.req_to_token_pool.req_to_token.random_(1, len(buffers[0]))

    def results(behind: bool) -> list[torch.Tensor]:
        made = []
        if behind:
            torch.cuda._sleep(500_000_000)
        for each in prepared:
            backend.init_forward_metadata(each.batch)
            made += outputs(backend, replace(each, inputs=each.inputs[:1]))
            if not behind:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return made

    torch.testing.assert_close(results(behind=True), results(behind=False), rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_of_trees_that_spec_topk_alone_asks_for(page_size) -> None:
    """A request names masks of its own by custom_mask, and trees by spec_topk."""

    def make_backend(context, options):
        asked = context.request.replace(custom_mask=False)
        return ADAPTER.backend(replace(context, request=asked), options)

    steps = verify(6, 9, 30), verify(6, 40, 11)
    case = Case(name="trees", steps=steps, spec_topk=4, page_size=page_size, graph=True)
    outcome = run_case(replace(CANDIDATE, factory=make_backend), case)
    assert outcome.status == "passed", (outcome.message, outcome.reasons)


def test_graphs_of_two_modes_on_one_backend() -> None:
    """The second runner's sizes do not take the buffers of the first."""
    check_runners_of_two_modes(ADAPTER)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("dtype=bf16", "fa3"),
        ("dtype=bf16,spec_topk=4,custom_mask=true", "flashinfer"),
        ("dtype=bf16,spec_topk=1,page_size=64", "flashinfer"),
    ],
)
def test_rank_next_to_fa3(asked, chosen) -> None:
    from_plugin = pytest.importorskip("attnmux.nvidia.plugin").attnmux_cards()
    offers = [Offer(card=card, plugin="nvidia") for card in from_plugin]
    decision = solve(Request.parse(asked), HOPPER, offers)
    assert {choice.backend for choice in decision.phases.values()} == {chosen}


@pytest.mark.parametrize("platform", ["nvidia:sm80,cuda=13.0", "nvidia:sm89,cuda=12.6"])
def test_first_on_other_devices(platform) -> None:
    offers = [Offer(card=FLASHINFER, plugin="nvidia")]
    decision = solve(
        Request.parse("dtype=fp16,kv_dtype=fp8_e5m2,head_dim=64,page_size=7,sliding_window=9"),
        Platform.parse(platform),
        offers,
    )
    assert {choice.backend for choice in decision.phases.values()} == {"flashinfer"}
