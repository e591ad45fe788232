from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute
from attnmux.nvidia.cards.fa4 import FA4
from attnmux.nvidia.fa4 import FA4Backend, Kernels
from attnmux.nvidia.fa4.compiling import compile_kernels
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


def emulated(arch: int) -> Kernels:
    return Kernels(flash_attn_varlen_func=FlashAttnCute(arch=arch).flash_attn_varlen_func)


def candidate(arch: int) -> Candidate:
    return Candidate(
        card=replace(FA4, status="available", requires=()),
        platform=Platform.parse(f"nvidia:sm{arch},cuda=13.0"),
        device="cpu",
        factory=lambda context, options: FA4Backend(context, options, emulated(arch)),
    )


SM90, SM100 = candidate(90), candidate(100)
EMULATED = emulated(100)
PAGES: dict[str, Any] = {"page_size": 128, "max_context_len": 256}
LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_context_len": 256,
}


class TestFA4EmulatedOnSM90(AttentionBackendTests):
    backend = SM90
    page_sizes = (128,)


class TestFA4EmulatedOnSM100(AttentionBackendTests):
    backend = SM100
    page_sizes = (16, 128)


class Spy:
    """Kernels that note what they are called with."""

    def __init__(self, function: Callable[..., Any] = EMULATED.flash_attn_varlen_func) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answers: list[torch.Tensor] = []
        self._function = function
        self.kernels = Kernels(flash_attn_varlen_func=self._called)

    def _called(self, **given: Any) -> Any:
        self.calls.append(given)
        answer = self._function(**given)
        self.answers.append(answer[0])
        return answer


def world_of(*steps: Step, **settings: Any) -> World:
    case = Case(name="of-this-test", steps=steps, **{**PAGES, **settings})
    return make_world(case, SM100.platform, "cpu")


def run(
    world: World, backend: FA4Backend, step: Step, *, host_lens: bool = False, **more: Any
) -> list[torch.Tensor]:
    """The output of each layer."""
    made = prepare_step(world, step, host_lens=host_lens)
    backend.init_forward_metadata(made.batch)
    return [
        backend.forward(
            given.q,
            given.k,
            given.v,
            given.layer,
            made.batch,
            made.save_kv_cache,
            q_rope=given.q_rope,
            k_rope=given.k_rope,
            **more,
        )
        for given in made.inputs
    ]


@pytest.mark.parametrize("on", [SM90, SM100], ids=["sm90", "sm100"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(72, 72), (96, 96), (192, 128)])
@pytest.mark.parametrize("save_kv_cache", [True, False])
def test_other_head_dims(on, head_dim, v_head_dim, save_kv_cache) -> None:
    case = Case(
        name="dims",
        steps=(extend((140, 16), (0, 7)) if save_kv_cache else extend((0, 16), (0, 7)),),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        save_kv_cache=save_kv_cache,
        lse=True,
        **PAGES,
    )
    outcome = run_case(on, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("on", [SM90, SM100], ids=["sm90", "sm100"])
@pytest.mark.parametrize(("num_q_heads", "head_dim"), [(10, 128), (10, 72), (6, 104), (12, 64)])
def test_heads_that_fill_no_tile(on, num_q_heads, head_dim) -> None:
    shape = {"num_q_heads": num_q_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    case = Case(name="heads", steps=(extend((140, 16), (0, 7)),), lse=True, **shape, **PAGES)
    outcome = run_case(on, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("num_q_heads", [16, 24])
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_latent_heads_that_pack_and_that_do_not(num_q_heads, page_size) -> None:
    settings = {**LATENT, "num_q_heads": num_q_heads, "page_size": page_size, "lse": True}
    outcome = run_case(SM100, Case(name="heads", steps=(extend((30, 4), (0, 3)),), **settings))
    assert outcome.status == "passed", outcome.message


def test_layers_share_a_page_table_and_read_the_pool() -> None:
    step, spy = extend((140, 5), (0, 3)), Spy()
    world = world_of(step)
    run(world, FA4Backend(world.context, {}, spy.kernels), step)
    pool = world.context.token_to_kv_pool
    assert len({call["page_table"].data_ptr() for call in spy.calls}) == 1
    for call, layer in zip(spy.calls, world.context.layers, strict=True):
        assert call["k"].data_ptr() == pool.get_kv_buffer(layer.layer_id)[0].data_ptr()
        assert call["v"].shape[1:] == (128, 2, 128)
        assert "cu_seqlens_k" not in call


def test_latents_are_read_where_they_lie() -> None:
    step, spy = extend((30, 4)), Spy()
    world = world_of(step, **LATENT)
    run(world, FA4Backend(world.context, {}, spy.kernels), step)
    buffer = world.context.token_to_kv_pool.get_key_buffer(world.context.layers[0].layer_id)
    call = spy.calls[0]
    assert call["v"].data_ptr() == buffer.data_ptr()
    assert call["k"].data_ptr() == buffer[..., 512:].data_ptr()
    assert (call["q"].shape[-1], call["qv"].shape[-1]) == (64, 512)


def test_metadata_is_made_once_a_step() -> None:
    step = extend((140, 5), (0, 3))
    world = world_of(step, kv_in_pool=True)
    backend = FA4Backend(world.context, {}, EMULATED)
    made = prepare_step(world, step)
    backend.init_forward_metadata(made.batch)

    def outputs() -> list[torch.Tensor]:
        return [
            backend.forward(given.q, None, None, given.layer, made.batch) for given in made.inputs
        ]

    before = outputs()
    world.context.req_to_token_pool.req_to_token.zero_()
    torch.testing.assert_close(outputs(), before, rtol=0, atol=0)


@pytest.mark.parametrize("asked", [True, False])
def test_lse_is_asked_for_where_it_is_wanted(asked) -> None:
    step, spy = extend((9, 5)), Spy()
    world = world_of(step)
    lse = torch.full((5, 8), torch.nan) if asked else None
    run(world, FA4Backend(world.context, {}, spy.kernels), step, lse=lse)
    assert [call["return_lse"] for call in spy.calls] == [asked, asked]
    assert lse is None or bool(lse.isfinite().all())


def test_rows_of_no_request_are_zero() -> None:
    step = extend((4, 9), (0, 5), trailing=3)
    world = world_of(step)
    for out in run(world, FA4Backend(world.context, {}, EMULATED), step):
        assert out[:14].isfinite().all()
        assert not out[14:].any()


def test_nothing_is_looked_for_behind_the_requests_where_the_host_knows() -> None:
    step, spy = extend((4, 9), (0, 5)), Spy(_full_of_nan)
    world = world_of(step)
    outputs = run(world, FA4Backend(world.context, {}, spy.kernels), step, host_lens=True)
    for out, answer in zip(outputs, spy.answers, strict=True):
        assert out is answer
        assert out.isnan().all()


def _full_of_nan(**given: Any) -> tuple[torch.Tensor, None]:
    return given["q"].new_full(given["q"].shape, torch.nan), None


def test_a_given_output_is_written() -> None:
    step = extend((9, 5))
    world = world_of(step)
    out = torch.full((5, 8, 128), torch.nan, dtype=torch.bfloat16)
    outputs = run(world, FA4Backend(world.context, {}, EMULATED), step, out=out)
    assert all(each is out for each in outputs)
    assert out.isfinite().all()


def test_arguments_of_a_layer() -> None:
    step, spy = extend((9, 5)), Spy()
    world = world_of(step, scaling=0.3, logit_cap=2.0, sinks=True)
    run(world, FA4Backend(world.context, {}, spy.kernels), step)
    first, second = spy.calls
    assert (first["softcap"], second["softcap"]) == (2.0, 4.0)
    assert (first["softmax_scale"], second["softmax_scale"]) == (0.3, 0.6)
    assert first["learnable_sink"].dtype == torch.bfloat16
    assert (first["causal"], first["num_splits"]) == (True, 1)
    assert "window_size" not in first


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_longest_request_is_not_told_where_bits_must_not_depend_on_it(deterministic) -> None:
    step, spy = extend((9, 5), (0, 3)), Spy()
    world = world_of(step, deterministic=deterministic)
    run(world, FA4Backend(world.context, {}, spy.kernels), step, host_lens=True)
    assert spy.calls[0]["max_seqlen_q"] == (256 if deterministic else 5)


@pytest.mark.parametrize(
    "step",
    [decode(9, 3), verify(2, 9, 3), extend((9, 3), mode=ForwardMode.DRAFT_EXTEND)],
    ids=["decode", "verify", "draft"],
)
def test_steps_that_are_refused(step) -> None:
    world = world_of(step)
    backend, made = FA4Backend(world.context, {}, EMULATED), prepare_step(world, step)
    with pytest.raises(InvalidInput, match="EXTEND or MIXED") as refusal:
        backend.init_forward_metadata(made.batch)
    assert refusal.value.argument == "forward_mode"


def test_mixed_steps_are_served() -> None:
    step = extend((140, 1), (3, 6), mode=ForwardMode.MIXED)
    outcome = run_case(SM90, Case(name="mixed", steps=(step,), **PAGES))
    assert outcome.status == "passed", outcome.message


def test_decoding_without_a_step_is_refused_as_well() -> None:
    step = decode(9)
    world = world_of(step)
    backend, made = FA4Backend(world.context, {}, EMULATED), prepare_step(world, step)
    given = made.inputs[0]
    with pytest.raises(InvalidInput, match="EXTEND or MIXED"):
        backend.forward(given.q, given.k, given.v, given.layer, made.batch)


def test_forward_needs_a_prepared_step() -> None:
    step = extend((0, 3))
    world = world_of(step)
    backend, made = FA4Backend(world.context, {}, EMULATED), prepare_step(world, step)
    given = made.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, given.k, given.v, given.layer, made.batch)


def test_nothing_is_captured() -> None:
    world = world_of(extend((0, 3)))
    with pytest.raises(GraphUnsupported):
        FA4Backend(world.context, {}, EMULATED).init_cuda_graph_state(4, 4)


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"kv_dtype": "float16"}, "token_to_kv_pool"),
        ({"kv_dtype": "fp8_e4m3"}, "token_to_kv_pool"),
        ({"windows": (None, 8)}, "layer 3"),
        ({"attention_chunk": 16}, "layer 1"),
        ({"is_encoder": True}, "layer 1"),
        ({**LATENT, "kv_lora_rank": 64}, "layer 1"),
        ({**LATENT, "logit_cap": 30.0}, "layer 1"),
    ],
    ids=["fp16", "fp8", "window", "chunk", "encoder", "rank", "cap-over-latent"],
)
def test_pools_and_layers_that_are_refused(settings, argument) -> None:
    world = world_of(extend((0, 3)), **settings)
    with pytest.raises(InvalidInput) as refusal:
        FA4Backend(world.context, {}, EMULATED)
    assert refusal.value.argument == argument


def test_keys_of_another_dtype_are_refused() -> None:
    step = extend((0, 3))
    world = world_of(step, save_kv_cache=False)
    backend, made = FA4Backend(world.context, {}, EMULATED), prepare_step(world, step)
    backend.init_forward_metadata(made.batch)
    given = made.inputs[0]
    assert given.k is not None
    with pytest.raises(InvalidInput, match=r"k: expected torch\.bfloat16"):
        backend.forward(
            given.q, given.k.half(), given.v, given.layer, made.batch, save_kv_cache=False
        )


@pytest.mark.parametrize(
    ("settings", "calls"),
    [({}, 2), ({"lse": True}, 4), ({"logit_cap": 2.0}, 4), ({**LATENT, "lse": True}, 4)],
    ids=["plain", "lse", "caps", "latent"],
)
def test_kernels_are_compiled_before_the_first_step(settings, calls) -> None:
    """Of each kind of layers, for steps of one tile of queries and for longer ones."""
    spy, world = Spy(), world_of(extend((0, 3)), **settings)
    backend = FA4Backend(world.context, {}, spy.kernels)
    compile_kernels(backend.calls, spy.kernels, world.context)
    assert len(spy.calls) == calls
    assert {call["max_seqlen_q"] for call in spy.calls} == {1, 256}
    assert all("page_table" in call for call in spy.calls)


def test_a_layer_that_the_pool_does_not_store_is_compiled_for_keys_of_the_call() -> None:
    spy, world = Spy(), world_of(extend((0, 3)))
    calls = [replace(call, cache=None) for call in FA4Backend(world.context, {}, EMULATED).calls]
    compile_kernels(calls, spy.kernels, world.context)
    assert len(spy.calls) == 2
    assert all("cu_seqlens_k" in call and "page_table" not in call for call in spy.calls)
    with pytest.raises(AttnmuxError, match="save_kv_cache=False"):
        calls[0].required_cache()


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, TypeError])
def test_kernels_that_do_not_compile_here(error) -> None:
    def fails(**_: Any) -> None:
        raise error("Only SM 9.x is supported\nmore lines")

    world = world_of(extend((0, 3)))
    backend = FA4Backend(world.context, {}, EMULATED)
    with pytest.raises(BackendFailed, match=r"Only SM 9\.x is supported"):
        compile_kernels(backend.calls, Kernels(flash_attn_varlen_func=fails), world.context)
