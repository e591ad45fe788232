"""The adapter of AITER's assembly kernels for MLA, on an emulator of `aiter.mla`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnmux.amd.aiter_mla import AiterMLAKernels, make
from attnmux.amd.cards.aiter_mla import AITER_MLA
from attnmux.amd.cards.aiter_mla_prefill import AITER_MLA_PREFILL
from attnmux.core import ForwardMode, InvalidInput, Platform
from attnmux.core.plugin import KernelLibrary
from attnmux.emulators.amd import aiter_mla as emulator
from attnmux.testing import AttentionBackendTests, decode, extend, prepare_step, verify
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    LatentDecodeTests,
    LatentTests,
    assert_passes,
    check_graphs_side_by_side,
    check_layers_outside_the_pool,
    outputs,
    recorded,
)

EMULATED = KernelLibrary.imported(AiterMLAKernels, emulator.__name__)
SETTINGS: dict[str, Any] = {**LATENT, "page_size": 1}
WORLD = AdapterWorld(
    library=make, kernels=EMULATED, platform=Platform.parse("amd:gfx942"), settings=SETTINGS
)
MI350 = replace(WORLD, platform=Platform.parse("amd:gfx950"))
CANDIDATE = WORLD.candidate(AITER_MLA)
PREFILL = WORLD.candidate(AITER_MLA_PREFILL)
FNUZ, E4M3 = {"kv_dtype": "fp8_e4m3fnuz"}, {"kv_dtype": "fp8_e4m3"}


class TestAiterMLA(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 64)


class TestAiterMLAOnMI350(AttentionBackendTests):
    backend = MI350.candidate(AITER_MLA)
    page_sizes = (16,)


class TestAiterMLAAdapterWithPlans(LatentDecodeTests):
    adapter = replace(WORLD, settings={**SETTINGS, "num_q_heads": 64})


class TestAiterMLAPrefill(AttentionBackendTests):
    backend = PREFILL
    page_sizes = (1, 64)


class TestAiterMLAAdapter(LatentTests):
    adapter = WORLD


class TestAiterMLAAdapterInPrefill(LatentTests):
    adapter = WORLD
    step = extend((20, 3), (0, 18))


class TestAiterMLAAdapterInEightBits(LatentDecodeTests):
    adapter = replace(WORLD, settings={**SETTINGS, **FNUZ})


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("stored", [{}, FNUZ], ids=["bfloat16", "e4m3fnuz"])
@pytest.mark.parametrize("steps", [(decode(1, 0, 130), decode(0, 0, 3)), (decode(45, 3, 300),)])
def test_other_steps(steps, stored, heads, graph) -> None:
    settings = {**SETTINGS, **stored, "num_q_heads": heads}
    assert_passes(CANDIDATE, *steps, **settings, max_context_len=320, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("heads", "stored"),
    # 64 heads over e4m3 are refused.
    [(32, {}), (64, {}), (112, {}), (32, FNUZ), (48, FNUZ), (112, FNUZ)],
)
@pytest.mark.turns(3)
def test_work_that_is_planned_ahead(stored, heads, graph) -> None:
    settings = {**SETTINGS, **stored, "num_q_heads": heads, "max_context_len": 320}
    steps = decode(1, 0, 130), decode(0, 0, 3), decode(45, 3, 300)
    assert_passes(CANDIDATE, *steps, **settings, graph=graph)


def test_graphs_keep_their_own_plans() -> None:
    check_graphs_side_by_side(WORLD, decode(9, 40), decode(5, 60, 7), num_q_heads=32)


def test_a_plan_is_made_once_a_step() -> None:
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(decode(9, 40), kernels=kernels, num_q_heads=32)
    outputs(backend, made)
    names = [call.name for call in calls]
    assert names.count("get_mla_metadata_v1") == 1
    assert names.count("mla_decode_fwd") == len(made.inputs)


def test_tables_of_a_plan_in_each_other_s_place_are_refused() -> None:
    """As the names of the library's Python have them."""
    shapes = emulator.get_mla_metadata_info_v1(
        2, 1, 32, torch.bfloat16, torch.bfloat16, is_sparse=False
    )
    tables = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="beyond a table"):
        emulator.get_mla_metadata_v1(bounds, bounds, 32, 1, True, *tables, 16, 1, 1)


@pytest.mark.parametrize("host_lens", [False, True])
@pytest.mark.parametrize("stored", [{}, FNUZ])
def test_fewer_keys_than_requests(stored, host_lens) -> None:
    """In 8 bits the library splits these into 0 parts."""
    for step in (decode(0, 0), decode(1, 0)):
        assert_passes(CANDIDATE, step, **SETTINGS, **stored, host_lens=host_lens)


def test_a_scale_of_the_layer_is_a_tensor_on_the_device() -> None:
    (call, _) = WORLD.calls(decode(9, 4), kv_in_pool=True, **FNUZ)
    assert call.kwargs["q"].dtype is call.kwargs["kv_buffer"].dtype is torch.float8_e4m3fnuz
    assert call.kwargs["q_scale"].tolist() == [1]
    assert call.kwargs["kv_scale"].dtype is torch.float32


def test_the_pool_is_read_where_it_lies() -> None:
    kernels, calls = recorded(EMULATED)
    backend, made = WORLD.prepared(decode(9, 4), kernels=kernels, page_size=64)
    outputs(backend, made)
    buffer = backend.context.token_to_kv_pool.get_key_buffer(made.inputs[0].layer.layer_id)
    assert calls[0].kwargs["kv_buffer"].data_ptr() == buffer.data_ptr()
    assert calls[0].kwargs["kv_buffer"].shape[1:] == (1, 1, 576)


def test_graphs_keep_the_parts_that_they_were_captured_with() -> None:
    """The library forgets the tensor at the next other call, and the graph still reads it."""
    check_graphs_side_by_side(WORLD, decode(9, 4), decode(5, 6, 7))


def test_a_capture_finds_the_parts_that_were_made_before_it() -> None:
    world = WORLD.world(decode(9, 4), kv_in_pool=True)
    backend = WORLD.backend(world.context)
    backend.init_cuda_graph_state(2, 2)
    made = prepare_step(world, decode(9, 4))
    backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
    before = emulator.get_meta_param.cache_info().misses
    backend.init_forward_metadata_in_graph(made.batch)
    outputs(backend, made)
    assert emulator.get_meta_param.cache_info().misses == before


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("stored", "drafts"), [({}, 1), ({}, 3), ({}, 4), ({}, 7), (FNUZ, 1), (FNUZ, 2), (FNUZ, 4)]
)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.turns(8)
def test_chains(heads, stored, drafts, graph) -> None:
    settings = {**SETTINGS, **stored, "num_q_heads": heads, "max_context_len": 320}
    steps = verify(drafts, 40, 0, 5), verify(drafts, 3, 300)
    assert_passes(CANDIDATE, *steps, **settings, spec_topk=1, graph=graph)


@pytest.mark.parametrize("host_lens", [False, True])
@pytest.mark.parametrize(
    "step",
    [
        extend((0, 150), (37, 3), (0, 0), (9, 1)),
        extend((0, 30), (200, 1), (5, 1), mode=ForwardMode.MIXED),
        extend((90, 2), (4, 3), mode=ForwardMode.DRAFT_EXTEND),
    ],
)
def test_prompts(step, host_lens) -> None:
    settings = {**SETTINGS, "max_context_len": 320, "spec_topk": 1, "host_lens": host_lens}
    assert_passes(PREFILL, step, **settings)


def test_the_call_s_own_keys_are_all_keys() -> None:
    check_layers_outside_the_pool(WORLD, extend((0, 21), (0, 4)))


@pytest.mark.parametrize(
    ("heads", "drafts", "stored", "name"),
    [
        (16, 4, {}, "mla_decode_fwd"),
        (16, 5, {}, "mla_prefill_fwd"),
        (128, 2, {}, "mla_prefill_fwd"),
        (128, 2, FNUZ, "mla_decode_fwd"),
    ],
)
def test_the_kernel_of_a_chain(heads, drafts, stored, name) -> None:
    settings = {**SETTINGS, **stored, "num_q_heads": heads, "kv_in_pool": True}
    calls = WORLD.calls(verify(drafts, 9, 4), spec_topk=1, **settings)
    assert {call.name for call in calls} == {name}
    assert calls[0].kwargs["max_seqlen_q"] == drafts


@pytest.mark.parametrize(
    "step", [verify(3, 5), verify(5, 5), extend((9, 2), mode=ForwardMode.DRAFT_EXTEND)]
)
def test_drafts_are_refused_in_eight_bits(step) -> None:
    world = WORLD.world(step, spec_topk=1, **FNUZ)
    with pytest.raises(InvalidInput, match="forward_mode: expected DECODE or chains"):
        WORLD.backend(world.context).init_forward_metadata(prepare_step(world, step).batch)


def test_trees_are_refused() -> None:
    world = WORLD.world(verify(3, 5), spec_topk=2)
    with pytest.raises(InvalidInput, match="custom_mask"):
        WORLD.backend(world.context).init_forward_metadata(prepare_step(world, verify(3, 5)).batch)


@pytest.mark.parametrize(
    ("adapter", "settings", "argument"),
    [
        (WORLD, {"num_q_heads": 8}, "layer 1"),
        (WORLD, {"num_q_heads": 144}, "layer 1"),
        (WORLD, {"dtype": "float16"}, "dtype"),
        (WORLD, {"kv_dtype": "float16"}, "token_to_kv_pool"),
        (WORLD, E4M3, "token_to_kv_pool"),
        (MI350, FNUZ, "token_to_kv_pool"),
        (WORLD, {"kind": "mha", "kv_lora_rank": None, "qk_rope_head_dim": None}, "layers"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(adapter, settings, argument) -> None:
    world = adapter.world(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        adapter.backend(world.context)
    assert refusal.value.argument == argument


def test_a_large_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmux.amd.aiter_mla.MOST_BYTES", 1 << 10)
    with pytest.raises(InvalidInput, match="bytes a layer"):
        WORLD.backend(WORLD.world(decode(3)).context)


def test_there_is_no_lse() -> None:
    backend, made = WORLD.prepared(decode(5))
    with pytest.raises(InvalidInput, match="gives no LSE"):
        outputs(backend, made, lse=torch.zeros(1, 16))


def arguments(dtype: torch.dtype = torch.bfloat16, heads: int = 16) -> dict[str, Any]:
    """Requests of 3 and 0 keys; row 1 is of no request."""
    rows = torch.randn(5, 1, 1, 576)
    rows[1] = torch.nan
    one = None if dtype == torch.bfloat16 else torch.ones(1)
    return {
        "q": torch.randn(2, heads, 576).to(dtype),
        "kv_buffer": rows.to(dtype),
        "o": torch.zeros(2, heads, 512).bfloat16(),
        "qo_indptr": torch.tensor([0, 1, 2], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 3, 3], dtype=torch.int32),
        "kv_indices": torch.tensor([4, 2, 3], dtype=torch.int32),
        "kv_last_page_lens": torch.ones(2, dtype=torch.int32),
        "max_seqlen_q": 1,
        "q_scale": one,
        "kv_scale": one,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz])
def test_the_emulator_writes_nan_without_keys(dtype) -> None:
    given = arguments(dtype)
    emulator.mla_decode_fwd(**given)
    assert given["o"][0].isfinite().all()
    assert given["o"][1].isnan().all()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"q": torch.zeros(2, 16, 576)}, RuntimeError),
        ({"q": torch.zeros(16, 2, 576).bfloat16().transpose(0, 1)}, RuntimeError),
        ({"o": torch.zeros(2, 16, 512)}, RuntimeError),
        ({"kv_buffer": torch.zeros(5, 1, 1, 576).to(torch.float8_e4m3fnuz)}, RuntimeError),
        ({"kv_indices": torch.zeros(3, dtype=torch.int64)}, RuntimeError),
        ({"kv_last_page_lens": torch.ones(1, dtype=torch.int32)}, RuntimeError),
        ({"logit_cap": 30.0}, AssertionError),
        ({"max_seqlen_q": 2}, RuntimeError),
        ({"work_meta_data": torch.zeros(2)}, AssertionError),
        ({"kv_buffer": torch.zeros(5, 2, 1, 576).bfloat16()}, NotImplementedError),
        (arguments(heads=32), AssertionError),
        ({**arguments(torch.float8_e4m3fn), "q_scale": None}, AssertionError),
        (
            {
                **arguments(torch.float8_e4m3fn),
                "kv_indices": torch.zeros(0, dtype=torch.int32),
            },
            RuntimeError,
        ),
    ],
)
def test_what_the_library_refuses(changes, error) -> None:
    with pytest.raises(error):
        emulator.mla_decode_fwd(**{**arguments(), **changes})


def in_prefill(**changes: Any) -> dict[str, Any]:
    """The first request has 2 queries, and row 2 is of no request."""
    given = arguments()
    more = {"q": torch.randn(3, 16, 576).bfloat16(), "o": torch.full((3, 16, 512), 7).bfloat16()}
    bounds = torch.tensor([0, 2, 2], dtype=torch.int32)
    for name in ("q_scale", "kv_scale"):
        del given[name]
    given = {**given, **more, "qo_indptr": bounds, "max_seqlen_q": 2, "sm_scale": 0.1}
    return {**given, **changes}


def test_emulated_prefill_writes_the_rows_of_requests_alone() -> None:
    given = in_prefill()
    emulator.mla_prefill_fwd(**given)
    assert given["o"][:2].isfinite().all()
    assert (given["o"][2] == 7).all()
    short = in_prefill(max_seqlen_q=1)
    emulator.mla_prefill_fwd(**short)
    assert short["o"][0].isnan().all()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sm_scale": None}, UnboundLocalError),
        ({"logit_cap": 30.0}, AssertionError),
        ({"q": torch.zeros(3, 32, 576).bfloat16()}, RuntimeError),
        ({"kv_buffer": torch.zeros(5, 1, 1, 576).to(torch.float8_e4m3fnuz)}, RuntimeError),
        ({"kv_indptr": torch.tensor([0, 3], dtype=torch.int32)}, RuntimeError),
    ],
)
def test_what_prefill_refuses(changes, error) -> None:
    with pytest.raises(error):
        emulator.mla_prefill_fwd(**in_prefill(**changes))


MLA_PLANS = "ops/attention.py"


@pytest.mark.parametrize("name", AiterMLAKernels.__dataclass_fields__)
def test_the_emulator_has_the_library_s_signature(name) -> None:
    """`import aiter` needs an AMD device, so the signature is read from the file."""
    spec = importlib.util.find_spec("aiter")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs amd-aiter")
    files = (Path(spec.submodule_search_locations[0], each) for each in ("mla.py", MLA_PLANS))
    (found,) = (
        node
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    scope: dict[str, Any] = {}
    # A signature without its body
    head = "from __future__ import annotations\n"
    exec(f"{head}def {name}({ast.unparse(found.args)}): pass", scope)
    ours, theirs = map(inspect.signature, (getattr(emulator, name), scope[name]))
    assert [(each.name, each.kind, each.default) for each in ours.parameters.values()] == [
        (each.name, each.kind, each.default) for each in theirs.parameters.values()
    ]
