from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, GraphUnsupported, InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.core.rehearsal import rehearse
from attnmux.emulators.nvidia import cutlass_mla as emulator
from attnmux.nvidia.cards.cutlass_mla import CUTLASS_MLA
from attnmux.nvidia.cutlass_mla import CutlassMLABackend, CutlassMLAKernels, make
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    prepare_step,
    run_case,
)
from attnmux.testing.adapters import AdapterTests, AdapterWorld, outputs, recorded
from attnmux.testing.cases import decode, extend, verify

EMULATED = CutlassMLAKernels(
    cutlass_mla_decode=emulator.cutlass_mla_decode,
    cutlass_mla_get_workspace_size=emulator.cutlass_mla_get_workspace_size,
)
BLACKWELL = Platform.parse("nvidia:sm100,cuda=13.0")
CANDIDATE = Candidate(
    card=replace(CUTLASS_MLA, status="available", requires=()),
    platform=BLACKWELL,
    device="cpu",
    factory=lambda context, options: CutlassMLABackend(context, options, EMULATED),
)


class TestCutlassMLAEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (128,)


LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 16,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 128,
    "max_context_len": 640,
}
CASES = {
    "nothing": ((decode(1, 0, 130), decode(0, 0, 3)), {}),
    "longer": ((decode(640, 639, 256, 128, 129), decode(1, 128)), {}),
    "float16": ((decode(45, 3, 130),), {"dtype": "float16"}),
    "scale": ((decode(45, 3),), {"scaling": 0.1}),
    "heads": ((decode(45, 3),), {"num_q_heads": 40}),
    "all-heads": ((decode(45, 0, 300),), {"num_q_heads": 128}),
    "idle": ((decode(7, 12), extend(mode=ForwardMode.IDLE), decode(8)), {}),
    "larger-than-graphs": (
        (decode(9, 40), decode(2, 60, 17, 5, 33), decode(10, 41)),
        {"max_graph_batch_size": 2},
    ),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_other_steps(name, splits, graph) -> None:
    steps, settings = CASES[name]
    case = Case(name=name, steps=steps, **{**LATENT, **settings}, graph=graph)
    outcome = run_case(replace(CANDIDATE, options={"num_kv_splits": splits}), case)
    assert outcome.status == "passed", outcome.message


def test_parts_of_the_kernel_s_own_choice_run_without_graphs() -> None:
    chosen = replace(CANDIDATE, options={"num_kv_splits": -1})
    case = Case(name="auto", steps=(decode(640, 3), decode(1)), **LATENT)
    assert run_case(chosen, case).status == "passed"
    outcome = run_case(chosen, replace(case, graph=True))
    assert isinstance(outcome.error, GraphUnsupported)
    assert "num_kv_splits" in outcome.message


CUTLASS = AdapterWorld(library=make, kernels=EMULATED, platform=BLACKWELL, settings=LATENT)


class TestCutlassMLAAdapter(AdapterTests):
    adapter = CUTLASS


def test_scratch_memory_is_made_once_a_step() -> None:
    kernels, calls = recorded(EMULATED)
    outputs(*CUTLASS.prepared(decode(40, 7), kernels=kernels))
    assert [call.name for call in calls] == [
        "cutlass_mla_get_workspace_size",
        "cutlass_mla_decode",
        "cutlass_mla_decode",
    ]
    assert calls[1].args[4].data_ptr() == calls[2].args[4].data_ptr()


def test_scratch_memory_is_for_the_room_in_the_table() -> None:
    """Not for the keys that there are: the kernel counts the table's columns."""
    kernels, calls = recorded(EMULATED)
    world = CUTLASS.world(decode(5, 6))
    backend = CUTLASS.backend(world.context, {"num_kv_splits": 3}, kernels)
    backend.init_forward_metadata(prepare_step(world, decode(5, 6)).batch)
    backend.init_forward_metadata(prepare_step(world, decode(5, 6), host_lens=True).batch)
    backend.init_cuda_graph_state(5, 5)
    assert [(*call.args, *call.kwargs.values()) for call in calls] == [
        (640, 2, 3),
        (128, 2, 3),
        (640, 5, 3),
    ]


def test_graphs_keep_their_scratch_memory() -> None:
    """A larger step outgrows the shared buffer, whose address the graph has."""
    world = CUTLASS.world(decode(5, 6), kv_in_pool=True)
    backend = CUTLASS.backend(world.context)
    backend.init_cuda_graph_state(2, 2)
    batch = prepare_step(world, decode(5, 6)).batch
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = backend._step.workspace
    world.context.workspace.get("cutlass_mla", 1 << 22)
    assert world.context.workspace.get("cutlass_mla", 1).data_ptr() != captured.data_ptr()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend._step.workspace is captured


def test_a_request_without_keys_is_told_to_have_one() -> None:
    kernels, calls = recorded(EMULATED)
    first, _ = outputs(*CUTLASS.prepared(decode(5, 0), kernels=kernels))
    assert calls[1].args[3].tolist() == [5, 1]
    assert first[0].any()
    assert not first[1].any()


@pytest.mark.parametrize(
    "step", [extend((0, 3)), verify(3, 5), extend((9, 2), mode=ForwardMode.DRAFT_EXTEND)]
)
def test_steps_that_are_refused(step) -> None:
    world = CUTLASS.world(step, spec_topk=1, kv_in_pool=True)
    backend, prepared = CUTLASS.backend(world.context), prepare_step(world, step)
    with pytest.raises(InvalidInput, match="forward_mode: expected DECODE"):
        backend.init_forward_metadata(prepared.batch)
    with pytest.raises(AttnmuxError, match="no step is prepared"):
        outputs(backend, prepared)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"page_size": 64}, "token_to_kv_pool"),
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e4m3"}, "token_to_kv_pool"),
        ({"dtype": "float32"}, "token_to_kv_pool"),
        ({"num_q_heads": 144}, "layer 1"),
        ({"kv_lora_rank": 256}, "layer 1"),
        ({"logit_cap": 2.0}, "layer 1"),
        ({"sinks": True}, "layer 1"),
        ({"kind": "mha", "kv_lora_rank": None, "qk_rope_head_dim": None}, "layers"),
    ],
)
def test_pools_and_layers_that_are_refused(settings, argument) -> None:
    world = CUTLASS.world(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        CUTLASS.backend(world.context)
    assert refusal.value.argument == argument


@pytest.mark.parametrize("splits", [0, -2, 257, "4"])
def test_options_that_are_refused(splits) -> None:
    with pytest.raises(InvalidInput, match=r"num_kv_splits: expected 1 to 256, or -1"):
        CUTLASS.backend(CUTLASS.world(decode(3)).context, {"num_kv_splits": splits})


def test_there_is_no_lse() -> None:
    backend, prepared = CUTLASS.prepared(decode(5))
    given = prepared.inputs[0]
    lse = torch.zeros(1, 16)
    with pytest.raises(InvalidInput, match="gives no LSE"):
        backend.forward(
            given.q, None, None, given.layer, prepared.batch, q_rope=given.q_rope, lse=lse
        )


def test_layers_of_the_expanded_prefill_are_left_to_others() -> None:
    step = decode(3, 70)
    world = CUTLASS.world(step, kv_in_pool=True)
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
    rehearse(CUTLASS.backend(context))
    backend, prepared = CUTLASS.backend(context), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    assert all(out.isfinite().all() for out in outputs(backend, prepared))
    with pytest.raises(InvalidInput, match=r"serves: \[1, 3\], got mha, id 100"):
        backend.forward(
            torch.zeros(2, 16, 192, dtype=torch.bfloat16), None, None, expanded, prepared.batch
        )
