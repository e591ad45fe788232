from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.core.rehearsal import rehearse
from attnmux.emulators.nvidia import cutlass_mla as emulator
from attnmux.nvidia.cards.cutlass_mla import CUTLASS_MLA
from attnmux.nvidia.cutlass_mla import CutlassMLABackend, CutlassMLAKernels, make
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


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.sizes: list[tuple[int, int, int]] = []

        def attend(*arguments: Any) -> torch.Tensor:
            self.calls.append(arguments)
            return emulator.cutlass_mla_decode(*arguments)

        def size(max_seq_len: int, num_batches: int, *, num_kv_splits: int) -> int:
            self.sizes.append((max_seq_len, num_batches, num_kv_splits))
            return emulator.cutlass_mla_get_workspace_size(
                max_seq_len, num_batches, num_kv_splits=num_kv_splits
            )

        self.kernels = CutlassMLAKernels(
            cutlass_mla_decode=attend, cutlass_mla_get_workspace_size=size
        )


def world_of(*steps: Step, **settings: Any) -> World:
    return make_world(Case(name="mine", steps=steps, **{**LATENT, **settings}), BLACKWELL, "cpu")


def made(step: Step, kernels: CutlassMLAKernels = EMULATED, **settings: Any):
    """A backend with the step prepared, and the step."""
    world = world_of(step, kv_in_pool=True, **settings)
    backend, prepared = CutlassMLABackend(world.context, {}, kernels), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    return backend, prepared


def outputs(backend: CutlassMLABackend, prepared: Any) -> list[torch.Tensor]:
    return [
        backend.forward(given.q, None, None, given.layer, prepared.batch, q_rope=given.q_rope)
        for given in prepared.inputs
    ]


def test_metadata_is_made_once_a_step() -> None:
    spy = Spy()
    backend, prepared = made(decode(40, 7), spy.kernels)
    before = outputs(backend, prepared)
    backend.context.req_to_token_pool.req_to_token.zero_()
    prepared.batch.seq_lens.zero_()
    torch.testing.assert_close(outputs(backend, prepared), before, rtol=0, atol=0)
    assert len(spy.sizes) == 1
    assert len({arguments[4].data_ptr() for arguments in spy.calls}) == 1


def test_scratch_memory_is_for_the_room_in_the_table() -> None:
    """Not for the keys that there are: the kernel counts the table's columns."""
    spy = Spy()
    world = world_of(decode(5, 6))
    backend = CutlassMLABackend(world.context, {"num_kv_splits": 3}, spy.kernels)
    backend.init_forward_metadata(prepare_step(world, decode(5, 6)).batch)
    backend.init_forward_metadata(prepare_step(world, decode(5, 6), host_lens=True).batch)
    backend.init_cuda_graph_state(5, 5)
    assert spy.sizes == [(640, 2, 3), (128, 2, 3), (640, 5, 3)]


def test_graphs_keep_their_scratch_memory() -> None:
    """A larger step outgrows the shared buffer, whose address the graph has."""
    world = world_of(decode(5, 6), kv_in_pool=True)
    backend = CutlassMLABackend(world.context, {}, EMULATED)
    backend.init_cuda_graph_state(2, 2)
    batch = prepare_step(world, decode(5, 6)).batch
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = backend._step.workspace
    world.context.workspace.get("cutlass_mla", 1 << 22)
    assert world.context.workspace.get("cutlass_mla", 1).data_ptr() != captured.data_ptr()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend._step.workspace is captured


def test_a_request_without_keys_is_told_to_have_one() -> None:
    spy = Spy()
    first, _ = outputs(*made(decode(5, 0), spy.kernels))
    assert spy.calls[0][3].tolist() == [5, 1]
    assert first[0].any()
    assert not first[1].any()


def test_rows_that_the_kernel_cannot_load_are_copied() -> None:
    backend, prepared = made(decode(5, 70), num_q_heads=128)
    given = prepared.inputs[0]
    rows = torch.empty(2, 128 * 512 + 3, dtype=given.q.dtype)
    odd = rows[:, 1 : 128 * 512 + 1].view(given.q.shape).copy_(given.q)
    expected, _ = outputs(backend, prepared)
    out = backend.forward(odd, None, None, given.layer, prepared.batch, q_rope=given.q_rope)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_capture_without_room_is_refused(max_batch_size) -> None:
    world = world_of(decode(5, 6))
    backend = CutlassMLABackend(world.context, {}, EMULATED)
    if max_batch_size:
        backend.init_cuda_graph_state(max_batch_size, max_batch_size)
    batch = prepare_step(world, decode(5, 6)).batch
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


@pytest.mark.parametrize(
    "step", [extend((0, 3)), verify(3, 5), extend((9, 2), mode=ForwardMode.DRAFT_EXTEND)]
)
def test_steps_that_are_refused(step) -> None:
    world = world_of(step, spec_topk=1, kv_in_pool=True)
    backend, prepared = CutlassMLABackend(world.context, {}, EMULATED), prepare_step(world, step)
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
    world = world_of(decode(3), **settings)
    with pytest.raises(InvalidInput) as refusal:
        CutlassMLABackend(world.context, {}, EMULATED)
    assert refusal.value.argument == argument


@pytest.mark.parametrize("splits", [0, -2, 257, "4"])
def test_options_that_are_refused(splits) -> None:
    with pytest.raises(InvalidInput, match=r"num_kv_splits: expected 1 to 256, or -1"):
        CutlassMLABackend(world_of(decode(3)).context, {"num_kv_splits": splits}, EMULATED)


def test_there_is_no_lse() -> None:
    backend, prepared = made(decode(5))
    given = prepared.inputs[0]
    lse = torch.zeros(1, 16)
    with pytest.raises(InvalidInput, match="gives no LSE"):
        backend.forward(
            given.q, None, None, given.layer, prepared.batch, q_rope=given.q_rope, lse=lse
        )


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
    rehearse(CutlassMLABackend(context, {}, EMULATED))
    backend, prepared = CutlassMLABackend(context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(prepared.batch)
    assert all(out.isfinite().all() for out in outputs(backend, prepared))
    with pytest.raises(InvalidInput, match=r"serves: \[1, 3\], got mha, id 100"):
        backend.forward(
            torch.zeros(2, 16, 192, dtype=torch.bfloat16), None, None, expanded, prepared.batch
        )


def test_forward_needs_a_prepared_step() -> None:
    step = decode(3)
    world = world_of(step, kv_in_pool=True)
    backend = CutlassMLABackend(world.context, {}, EMULATED)
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        outputs(backend, prepare_step(world, step))


def test_a_step_of_nobody() -> None:
    backend, prepared = made(decode())
    assert [out.shape for out in outputs(backend, prepared)] == [(0, 16, 512)] * 2


def failing(*arguments: object, **named: object) -> torch.Tensor:
    raise RuntimeError("cutlass_mla_decode is only supported on compute capability 10.0\nmore")


@pytest.mark.parametrize("runs", [True, False])
def test_the_factory_tries_the_kernel(runs, monkeypatch) -> None:
    context = world_of(decode(3)).context
    library = SimpleNamespace(
        cutlass_mla_decode=emulator.cutlass_mla_decode if runs else failing,
        cutlass_mla_get_workspace_size=emulator.cutlass_mla_get_workspace_size,
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", library)
    if runs:
        assert isinstance(make(context, {}), CutlassMLABackend)
        return
    with pytest.raises(BackendFailed, match=r"compute capability 10\.0$"):
        make(context, {})
