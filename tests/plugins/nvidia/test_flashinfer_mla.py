"""FlashInferMLABackend on the emulator of the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import (
    BackendFailed,
    ForwardBatch,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
    MultiItem,
    Platform,
)
from attnmux.emulators.candidates import LATENT_WRAPPERS as EMULATED
from attnmux.emulators.nvidia import flashinfer as emulator
from attnmux.nvidia.cards.flashinfer_mla import FLASHINFER_MLA
from attnmux.nvidia.flashinfer.shared import MIB, Staging
from attnmux.nvidia.flashinfer_mla import planning
from attnmux.nvidia.flashinfer_mla import step as steps_module
from attnmux.nvidia.flashinfer_mla.backend import LEAST_WORKSPACE_BYTES, make
from attnmux.nvidia.flashinfer_mla.kernels import FlashInferMLAKernels
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    Step,
    decode,
    extend,
    reference,
    run_case,
    verify,
)
from attnmux.testing.adapters.checks import (
    check_keys_of_another_dtype_are_refused,
    check_rows_are_copied,
    check_runners_of_two_modes,
)
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterTests,
    AdapterWorld,
    KernelCall,
    assert_passes,
    outputs,
    recorded,
)

HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
SETTINGS = {**LATENT, "page_size": 16}
ADAPTER = AdapterWorld(
    library=make, kernels=EMULATED, platform=HOPPER, host_lens=True, settings=SETTINGS
)
CANDIDATE = ADAPTER.candidate(FLASHINFER_MLA)


class TestFlashInferMLAEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 64)


class TestFlashInferMLAAdapter(AdapterTests):
    adapter = ADAPTER


def case_of(*steps: Step, **settings: Any) -> Case:
    return Case(name="of-this-test", steps=steps, **{**SETTINGS, **settings})


def assert_agrees(*steps: Step, **settings: Any) -> None:
    assert_passes(CANDIDATE, *steps, **{**SETTINGS, **settings})


def arguments(calls: list[KernelCall], method: str, name: str) -> list[Any]:
    """An argument of every call of a wrapper's method, by the library's name."""
    return [
        call.kwargs[name] if name in call.kwargs else getattr(call.kwargs["metadata"], name)
        for call in calls
        if call.name == f"BatchMLAPagedAttentionWrapper.{method}"
    ]


def test_layers_share_a_plan_a_step() -> None:
    calls = ADAPTER.calls(decode(5, 30), decode(6, 31, 7), windows=(None,) * 5)
    assert len(arguments(calls, "plan", "causal")) == 2
    assert len(arguments(calls, "run", "out")) == 10


def test_steps_of_one_shape_plan_into_one_workspace() -> None:
    """Each `plan` of the library allocates one."""
    steps = (
        *(decode(5, 30), extend((9, 3), (0, 40)), decode(100, 1), decode(6, 31)),
        *(extend((70, 40), (2, 3)), decode(7), decode(8), decode(9, 3)),
    )
    assert len(arguments(ADAPTER.calls(*steps), "plan", "causal")) == 4
    assert_agrees(*steps, lse=True)


def test_layers_of_another_scale_have_a_plan_of_their_own() -> None:
    calls = ADAPTER.calls(decode(5, 30), scaling=0.3)
    assert arguments(calls, "plan", "sm_scale") == [0.3, 0.6]
    assert_agrees(decode(5, 30), extend((0, 9), (17, 4)), scaling=0.3)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_pools_pages_are_the_kernels(page_size) -> None:
    calls = ADAPTER.calls(decode(5, 30), page_size=page_size)
    assert arguments(calls, "plan", "page_size") == [page_size]
    pages = [-(-length // page_size) for length in (5, 30)]
    (indices,) = arguments(calls, "plan", "kv_indices")
    assert len(indices) == sum(pages)
    assert arguments(calls, "plan", "kv_indptr")[0].tolist() == [0, pages[0], sum(pages)]


@pytest.mark.parametrize("page_size", [3, 48])
def test_pages_of_any_size(page_size) -> None:
    """No powers of two; requests end within a page, with one and after one."""
    ends = (page_size - 1, page_size, page_size + 1, 100)
    steps = decode(*ends), extend(*((end, 5) for end in ends))
    assert_agrees(*steps, page_size=page_size, lse=True)


def test_only_steps_of_several_rows_are_causal() -> None:
    calls = ADAPTER.calls(decode(5), extend((9, 1), (4, 1)), extend((9, 1), (4, 2)), verify(3, 9),
                  spec_topk=1)  # fmt: skip
    assert arguments(calls, "plan", "causal") == [False, False, True, True]


@pytest.mark.parametrize(("heads", "padded"), [(20, 32), (48, 64), (96, 128), (64, 64), (128, 128)])
def test_heads_are_padded_only_for_causal_kernels(heads, padded) -> None:
    calls = ADAPTER.calls(decode(5), extend((3, 4)), num_q_heads=heads)
    assert arguments(calls, "plan", "num_heads") == [heads, padded]
    assert {q.shape[1] for q, _ in arguments(calls, "run", "query")} == {heads, padded}


@pytest.mark.parametrize("heads", [20, 96])
def test_tiles_that_end_within_a_token(monkeypatch, heads) -> None:
    """The kernels would leave out keys of tokens whose keys end on a multiple of 64."""
    step = extend(*((prefix, 10) for prefix in range(54, 66, 1 if heads == 20 else 5)))
    assert_agrees(step, num_q_heads=heads, lse=True)
    monkeypatch.setattr(planning, "padded_heads", lambda num_heads: num_heads)
    outcome = run_case(CANDIDATE, case_of(step, num_q_heads=heads))
    assert outcome.status == "failed"
    assert "values differ" in outcome.message


def test_requests_without_rows_are_left_out() -> None:
    """They would make the tiles of 128 heads end within a token."""
    step = extend((5, 0), (64, 2), (7, 0), (30, 0), (17, 0), (0, 3), (9, 0), (3, 0))
    assert_agrees(step, num_q_heads=128)
    calls = ADAPTER.calls(step, num_q_heads=128)
    assert arguments(calls, "plan", "qo_indptr")[0].tolist() == [0, 2, 5]
    assert arguments(calls, "plan", "kv_len_arr")[0].tolist() == [66, 3]
    assert len(arguments(calls, "plan", "kv_indices")[0]) == 5 + 1


def test_nothing_is_planned_for_a_step_without_rows() -> None:
    calls = ADAPTER.calls(extend((17, 0), (3, 0)), extend(mode=ForwardMode.IDLE))
    assert not calls


def test_keys_of_the_call_are_planned_when_they_come() -> None:
    calls = ADAPTER.calls(extend((0, 7), (0, 3)), save_kv_cache=False)
    assert len(arguments(calls, "run", "out")) == 2
    assert arguments(calls, "plan", "page_size") == [16, 1]
    assert arguments(calls, "plan", "kv_indices")[1].tolist() == list(range(10))


@pytest.mark.parametrize("room", [4, 7, 20])
@pytest.mark.parametrize(
    "settings",
    [
        {"lse": True},
        {"kv_dtype": "fp8_e4m3"},
        {"num_q_heads": 20, "lse": True},
        {"save_kv_cache": False},
    ],
    ids=["pool", "widened", "padded", "call"],
)
@pytest.mark.turns(2)
def test_a_step_that_no_plan_holds_is_cut(monkeypatch, room, settings) -> None:
    """Within requests too: what ends early sees fewer keys."""
    monkeypatch.setattr(steps_module, "PLAN_TILES", room)
    saved = settings.get("save_kv_cache", True)
    prefixes = (0, 21, 9, 0, 33) if saved else (0,) * 5
    steps = [extend(*zip(prefixes, (1, 50, 0, 37, 7), strict=True), trailing=2)]
    if saved:
        steps.append(decode(5, 9, 40, 3, 2, 8, 60, 1))
    assert_agrees(*steps, **settings)


@pytest.mark.parametrize(("num_tokens", "parts"), [(15800, 1), (16400, 2)])
def test_tiles_of_a_plan(monkeypatch, num_tokens, parts) -> None:
    """128 heads of a token are one, and the library would write beyond its lists."""
    world = ADAPTER.world(extend((1, 1)), num_q_heads=128, max_context_len=16640)
    kernels, calls = recorded(EMULATED)
    backend = ADAPTER.backend(world.context, kernels=kernels)
    batch = ADAPTER.prepare(world, extend((1, 1))).batch
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    longer = replace(
        batch,
        out_cache_loc=tokens,
        positions=tokens,
        seq_lens=lens + 1,
        seq_lens_cpu=lens + 1,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lens,
        extend_num_tokens=num_tokens,
    )
    backend.init_forward_metadata(longer)
    planned = [int(bounds[-1]) for bounds in arguments(calls, "plan", "qo_indptr")]
    assert len(planned) == parts
    assert sum(planned) == num_tokens
    assert [int(lens[-1]) for lens in arguments(calls, "plan", "kv_len_arr")][-1] == num_tokens + 1
    if parts > 1:
        monkeypatch.setattr(steps_module, "PLAN_TILES", 1 << 20)
        with pytest.raises(RuntimeError, match="works"):
            backend.init_forward_metadata(longer)


def test_results_go_where_the_caller_wants() -> None:
    kernels, calls = recorded(EMULATED)
    backend, prepared = ADAPTER.prepared(extend((0, 7), (9, 3)), kernels=kernels)
    first = replace(prepared, inputs=prepared.inputs[:1])
    out, lse = torch.empty_like(first.inputs[0].q), torch.zeros(first.inputs[0].q.shape[:2])
    assert outputs(backend, first, out=out, lse=lse)[0] is out
    assert arguments(calls, "run", "out") == [out]
    assert arguments(calls, "run", "lse") == [lse]
    assert arguments(calls, "run", "return_lse_base_on_e") == [True]


@pytest.mark.parametrize("save", [True, False])
def test_rows_that_the_kernels_cannot_load_are_copied(save) -> None:
    step = extend((0, 9), (0, 4))
    check_rows_are_copied(*ADAPTER.prepared(step, kv_in_pool=False, save_kv_cache=save))


WIDENED: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "lse": True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [2**-8, 4.0])
def test_powers_of_2_are_no_loss(scale, dtype) -> None:
    steps = decode(5, 0, 40), extend((0, 9), (17, 4))
    assert_agrees(*steps, dtype=dtype, kv_scales=(scale, 2.0), **WIDENED)


@pytest.mark.parametrize("scale", [2 / 448, 0.37, 5.9])
def test_other_scales_round_queries_and_output_once_more(scale) -> None:
    settings = {"kv_scales": (scale, 2.0), **WIDENED}
    backend, prepared = ADAPTER.prepared(extend((0, 9), (17, 4)), **settings)
    pools = backend.context.req_to_token_pool.req_to_token, backend.context.token_to_kv_pool
    for given in prepared.inputs:
        lse = torch.zeros(given.q.shape[:2])
        out = outputs(backend, replace(prepared, inputs=(given,)), lse=lse)[0]
        expected = reference.attention(
            given.q, given.layer, prepared.batch, *pools, q_rope=given.q_rope
        )
        torch.testing.assert_close(out, expected[0].to(out.dtype), atol=1.6e-2, rtol=3.2e-2)
        torch.testing.assert_close(lse, expected[1].float(), atol=1.6e-2, rtol=4e-3)


def test_the_steps_rows_alone_are_widened() -> None:
    calls = ADAPTER.calls(decode(5, 30), extend((0, 9), (17, 4)), kv_dtype="fp8_e4m3")
    assert len(arguments(calls, "plan", "causal")) == 2
    shapes = [tuple(latents.shape) for latents, _ in arguments(calls, "run", "kv_cache")]
    assert shapes == [(35, 1, 512)] * 2 + [(30, 1, 512)] * 2


def test_a_length_of_0_and_rows_after_the_requests() -> None:
    assert_agrees(decode(0, 5, 1), decode(0, 0), lse=True)
    assert_agrees(extend((9, 3), (0, 5), padding=2, trailing=3), lse=True)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3)])
def test_graphs_of_two_modes_on_one_backend(sizes) -> None:
    """What the second runner allocates does not take the place of what the first one captured."""
    check_runners_of_two_modes(ADAPTER, sizes=sizes)


@pytest.mark.parametrize("heads", [16, 20])
def test_graphs_of_padded_heads(heads) -> None:
    steps = verify(4, 9, 60), verify(4, 58, 3)
    assert_agrees(*steps, spec_topk=1, num_q_heads=heads, lse=True, graph=True)


def test_a_step_that_is_cut_is_in_no_graph(monkeypatch) -> None:
    monkeypatch.setattr(steps_module, "PLAN_TILES", 4)
    ADAPTER.captures_no("one plan", verify(4, 9, 60), spec_topk=1)


def test_a_captured_batch_has_a_wrapper_and_plans_into_its_workspace() -> None:
    world = ADAPTER.world(decode(5, 30))
    kernels, calls = recorded(EMULATED)
    backend = ADAPTER.backend(world.context, kernels=kernels)
    backend.init_cuda_graph_state(8, 8)
    batches = [ADAPTER.prepare(world, decode(*lens)).batch for lens in ((5,), (5, 30), (5, 30, 3))]
    for batch in batches:
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    for batch in batches:
        backend.init_forward_metadata_out_graph(batch)
    names = [call.name for call in calls]
    assert names.count("BatchMLAPagedAttentionWrapper") == 3
    assert names.count("BatchMLAPagedAttentionWrapper.plan") == 3
    indices = arguments(calls, "plan", "kv_indices")
    assert len({(each.data_ptr(), len(each)) for each in indices}) == 1


def test_0_6_takes_flat_arguments() -> None:
    older = FlashInferMLAKernels(
        BatchMLAPagedAttentionWrapper=emulator.BatchMLAPagedAttentionWrapper
    )
    kernels, calls = recorded(older)
    outcomes = [
        outputs(*ADAPTER.prepared(extend((0, 7), (9, 3)), kernels=of)) for of in (kernels, EMULATED)
    ]
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert arguments(calls, "plan", "kv_len_arr")[0].tolist() == [7, 12]


@pytest.mark.parametrize("mode", [ForwardMode.DRAFT_EXTEND, ForwardMode.EXTEND])
def test_steps_of_requests_of_many_lengths_are_in_no_graph(mode) -> None:
    ADAPTER.captures_no(f"{mode.name}.*eagerly", extend((9, 3), (5, 1), mode=mode))


def test_widened_keys_are_in_no_graph() -> None:
    backend = ADAPTER.backend(ADAPTER.world(decode(5), kv_dtype="fp8_e4m3").context)
    with pytest.raises(GraphUnsupported, match="without graphs"):
        backend.init_cuda_graph_state(2, 2)
    request = case_of(decode(5), kv_dtype="fp8_e4m3").request
    assert not CANDIDATE.refusals(request)
    assert CANDIDATE.refusals(replace(request, graph=True))


def refused_batches(batch: ForwardBatch) -> dict[str, ForwardBatch]:
    """By what is wrong with them."""
    lens, tokens = batch.seq_lens, torch.zeros(1, dtype=torch.int64)
    assert batch.spec_info is not None
    mask = replace(batch.spec_info, custom_mask=torch.ones(40, dtype=torch.bool))
    items = MultiItem(prefix_lens=lens, token_pos_in_items=lens)
    return {
        "custom_mask": replace(batch, spec_info=mask),
        "multi_item": replace(batch, multi_item=items),
        "topk_indices": replace(batch, topk_indices=torch.zeros(8, 4, dtype=torch.int32)),
        "extend_seq_lens_cpu": replace(batch, extend_seq_lens_cpu=None),
        "extend_prefix_lens_cpu": replace(batch, extend_prefix_lens_cpu=None),
        "out_cache_loc": replace(batch, extend_num_tokens=1, out_cache_loc=tokens),
    }


@pytest.mark.parametrize(
    "field",
    [
        "custom_mask",
        "multi_item",
        "topk_indices",
        "extend_seq_lens_cpu",
        "extend_prefix_lens_cpu",
        "out_cache_loc",
    ],
)
def test_steps_that_are_refused(field) -> None:
    backend, prepared = ADAPTER.prepared(verify(4, 5, 6), spec_topk=1)
    with pytest.raises(InvalidInput, match=field):
        backend.init_forward_metadata_out_graph(refused_batches(prepared.batch)[field])


def test_decode_needs_lengths_on_the_host() -> None:
    ADAPTER.refuses("seq_lens_cpu", decode(5), batch={"seq_lens_cpu": None})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"sliding_window_size": 9}, "window"),
        ({"attention_chunk_size": 9}, "chunk"),
        ({"sinks": torch.zeros(16)}, "sinks"),
        ({"tp_q_head_num": 192}, "128 heads"),
        ({"v_head_dim": 256}, "512"),
        ({"kind": "mha"}, "mha"),
    ],
)
def test_layers_that_are_refused(changes, says) -> None:
    ADAPTER.refuses(says, decode(5), layer=changes)


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"kv_dtype": "fp8_e5m2"}])
def test_dtypes_that_are_refused(settings) -> None:
    ADAPTER.refuses("dtype|token_to_kv_pool", decode(5), **settings)


def test_keys_of_another_dtype_are_refused() -> None:
    check_keys_of_another_dtype_are_refused(ADAPTER, "float32")


def test_workspace_bytes() -> None:
    context = ADAPTER.world(decode(5)).context
    ADAPTER.backend(context, {"workspace_bytes": LEAST_WORKSPACE_BYTES})
    assert context.workspace.nbytes == LEAST_WORKSPACE_BYTES
    ADAPTER.backend(context)
    assert context.workspace.nbytes == 256 * MIB
    with pytest.raises(InvalidInput, match="16 bytes more"):
        ADAPTER.backend(context, {"workspace_bytes": LEAST_WORKSPACE_BYTES - 16})


@pytest.mark.parametrize("name", ["auto", "fa2", "fa3"])
def test_the_option_names_the_kernels(name) -> None:
    kernels, calls = recorded(EMULATED)
    ADAPTER.prepared(decode(5), kernels=kernels, options={"backend": name})
    assert calls[0].kwargs == {"backend": name}


@pytest.mark.parametrize("fails", ["plan", "run"])
def test_a_kernel_that_does_not_run_is_a_reason_with_a_hint(monkeypatch, fails) -> None:
    def failing(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(emulator.BatchMLAPagedAttentionWrapper, fails, failing)
    library = replace(make, providers={"flashinfer": lambda: EMULATED})
    with pytest.raises(BackendFailed, match="no kernel image") as failed:
        library(ADAPTER.world(decode(5)).context)
    assert failed.value.address == "nvidia/flashinfer_mla"
    assert "pip install 'attnmux-nvidia[flashinfer]'" in str(failed.value)
    assert "more" not in str(failed.value)


def test_plans_are_made_when_those_of_the_step_before_were_copied(monkeypatch) -> None:
    order: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *_, **__: order.append(name)

    wrapper = emulator.BatchMLAPagedAttentionWrapper
    for owner, name in ((Staging, "wait"), (Staging, "mark"), (wrapper, "plan"), (wrapper, "run")):
        monkeypatch.setattr(owner, name, noted(name))
    ADAPTER.calls(extend((0, 4)), save_kv_cache=False)
    assert order[:6] == ["wait", "plan", "mark", "plan", "mark", "run"]
