from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput, Platform
from attnmux.emulators.candidates import CUTLASS as EMULATED
from attnmux.emulators.candidates import CUTLASS_OF_VLLM as OF_VLLM
from attnmux.nvidia.cards.cutlass_mla import CUTLASS_MLA
from attnmux.nvidia.latent.cutlass_mla import make
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    decode,
    extend,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.adapters.tests import (
    LATENT,
    AdapterWorld,
    LatentDecodeTests,
    assert_passes,
    outputs,
    recorded,
)

BLACKWELL = Platform.parse("nvidia:sm100,cuda=13.0")
SETTINGS: dict[str, Any] = {**LATENT, "page_size": 128, "max_context_len": 640}
CUTLASS = AdapterWorld(library=make, kernels=EMULATED, platform=BLACKWELL, settings=SETTINGS)
CUTLASS_OF_VLLM = replace(CUTLASS, kernels=OF_VLLM)
CANDIDATE = CUTLASS.candidate(CUTLASS_MLA)


class TestCutlassMLAEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (128,)


class TestCutlassMLAOfVllm(AttentionBackendTests):
    backend = CUTLASS_OF_VLLM.candidate(CUTLASS_MLA)
    page_sizes = (128,)


class TestCutlassMLAAdapterOfVllm(LatentDecodeTests):
    adapter = CUTLASS_OF_VLLM


class TestCutlassMLAAdapter(LatentDecodeTests):
    adapter = CUTLASS


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
@pytest.mark.turns(4)
def test_other_steps(name, splits, graph) -> None:
    steps, settings = CASES[name]
    candidate = replace(CANDIDATE, options={"num_kv_splits": splits})
    assert_passes(candidate, *steps, **{**SETTINGS, **settings}, graph=graph)


def test_splits_that_the_kernel_chooses_run_without_graphs() -> None:
    chosen = replace(CANDIDATE, options={"num_kv_splits": -1})
    case = Case(name="auto", steps=(decode(640, 3), decode(1)), **SETTINGS)
    assert run_case(chosen, case).status == "passed"
    outcome = run_case(chosen, replace(case, graph=True))
    assert isinstance(outcome.error, GraphUnsupported)
    assert "num_kv_splits" in outcome.message


def test_scratch_memory_is_made_once_a_step() -> None:
    calls = CUTLASS.calls(decode(40, 7))
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


def test_a_request_without_keys_is_given_one() -> None:
    kernels, calls = recorded(EMULATED)
    first, _ = outputs(*CUTLASS.prepared(decode(5, 0), kernels=kernels))
    assert calls[1].args[3].tolist() == [5, 1]
    assert first[0].any()
    assert not first[1].any()


@pytest.mark.parametrize("step", [verify(3, 5), extend((9, 2), mode=ForwardMode.DRAFT_EXTEND)])
def test_drafts_are_refused(step) -> None:
    CUTLASS.refuses("forward_mode: expected DECODE", step, batch={}, spec_topk=1)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"page_size": 64}, "token_to_kv_pool"),
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e4m3"}, "token_to_kv_pool"),
        ({"dtype": "float32"}, "token_to_kv_pool"),
        ({"num_q_heads": 144}, "layer 1"),
    ],
)
def test_pools_and_heads_that_are_refused(settings, argument) -> None:
    CUTLASS.refuses(f"^{argument}: ", decode(3), **settings)


@pytest.mark.parametrize("splits", [0, -2, 257, "4"])
def test_options_that_are_refused(splits) -> None:
    reason, options = "num_kv_splits: expected 1 to 256, or -1", {"num_kv_splits": splits}
    CUTLASS.refuses(reason, decode(3), options=options)


def test_there_is_no_lse() -> None:
    backend, prepared = CUTLASS.prepared(decode(5))
    given = prepared.inputs[0]
    lse = torch.zeros(1, 16)
    with pytest.raises(InvalidInput, match="gives no LSE"):
        backend.forward(
            given.q, None, None, given.layer, prepared.batch, q_rope=given.q_rope, lse=lse
        )
