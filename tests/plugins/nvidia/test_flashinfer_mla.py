"""FlashInferMLABackend on the emulator of the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardBatch, ForwardMode, MultiItem
from attnmux.core.choosing.options import complete
from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.graph.config import GraphConfig
from attnmux.core.graph.runner import GraphRunner
from attnmux.emulators.nvidia import flashinfer as emulator
from attnmux.nvidia.cards.flashinfer_mla import FLASHINFER_MLA
from attnmux.nvidia.flashinfer.staging import Staging
from attnmux.nvidia.flashinfer_mla import planning
from attnmux.nvidia.flashinfer_mla import step as steps_module
from attnmux.nvidia.flashinfer_mla.backend import FlashInferMLABackend
from attnmux.nvidia.flashinfer_mla.kernels import Kernels
from attnmux.nvidia.flashinfer_mla.settings import LEAST_WORKSPACE_BYTES, MIB
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    reference,
    run_case,
)
from attnmux.testing.cases import Step, decode, extend, verify
from attnmux.testing.recording import RecordingGraphs

EMULATED = Kernels(paged=emulator.BatchMLAPagedAttentionWrapper)

CANDIDATE = Candidate(
    card=replace(FLASHINFER_MLA, status="available", requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FlashInferMLABackend(context, options, EMULATED),
)

LATENT: dict[str, Any] = {
    "kind": "mla",
    "num_q_heads": 16,
    "num_kv_heads": 1,
    "head_dim": 192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "page_size": 16,
}


class TestFlashInferMLAEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 64)


def case_of(*steps: Step, **settings: Any) -> Case:
    return Case(name="of-this-test", steps=steps, **{**LATENT, **settings})


def world_of(*steps: Step, **settings: Any) -> World:
    return make_world(case_of(*steps, **settings), CANDIDATE.platform, "cpu")


def backend_of(world: World, kernels: Kernels = EMULATED, **given: Any) -> FlashInferMLABackend:
    return FlashInferMLABackend(world.context, complete(FLASHINFER_MLA, given), kernels)


def assert_agrees(*steps: Step, **settings: Any) -> None:
    outcome = run_case(CANDIDATE, case_of(*steps, **settings))
    assert outcome.status == "passed", outcome.message


class Spy:
    """The emulator, with a list of what was made, planned and run."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def kernels(self) -> Kernels:
        calls = self.calls

        class Spied(EMULATED.paged):  # type: ignore[name-defined,misc]  # a class
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                calls.append(("make", kwargs))
                super().__init__(*args, **kwargs)

            def plan(self, *args: Any) -> None:
                names = (
                    "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads",
                    "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale",
                )  # fmt: skip
                calls.append(("plan", dict(zip(names, args, strict=False))))
                super().plan(*args)

            def run(self, q_nope: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                cache = tuple(args[1].shape)
                calls.append(("run", {"q_nope": q_nope, "ckv_cache": cache, **kwargs}))
                return super().run(q_nope, *args, **kwargs)

        return Kernels(paged=Spied)

    @property
    def counts(self) -> Counter[str]:
        return Counter(method for method, _ in self.calls)

    def arguments(self, method: str, name: str) -> list[Any]:
        return [given[name] for called, given in self.calls if called == method]

    def run_steps(self, *steps: Step, **settings: Any) -> None:
        """Run eagerly, as the suite would; only what the steps call is noted."""
        save = settings.get("save_kv_cache", True)
        world = world_of(*steps, **settings)
        backend = backend_of(world, self.kernels)
        self.calls.clear()
        for step in steps:
            prepared = prepare_step(world, step, host_lens=True)
            backend.init_forward_metadata(prepared.batch)
            for given in prepared.inputs:
                forward(backend, given, prepared.batch, save_kv_cache=save)


def forward(
    backend: FlashInferMLABackend, given: Any, batch: ForwardBatch, **others: Any
) -> torch.Tensor:
    ropes = {"q_rope": given.q_rope, "k_rope": given.k_rope}
    return backend.forward(given.q, given.k, given.v, given.layer, batch, **{**ropes, **others})


@pytest.fixture
def spy() -> Spy:
    return Spy()


def test_layers_share_a_plan_a_step(spy) -> None:
    spy.run_steps(decode(5, 30), decode(6, 31), windows=(None,) * 5)
    assert spy.counts == {"plan": 2, "run": 10}


def test_layers_of_another_scale_have_a_plan_of_their_own(spy) -> None:
    spy.run_steps(decode(5, 30), scaling=0.3)
    assert spy.arguments("plan", "sm_scale") == [0.3, 0.6]
    assert_agrees(decode(5, 30), extend((0, 9), (17, 4)), scaling=0.3)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_pools_pages_are_the_kernels(spy, page_size) -> None:
    spy.run_steps(decode(5, 30), page_size=page_size)
    assert spy.arguments("plan", "page_size") == [page_size]
    pages = [-(-length // page_size) for length in (5, 30)]
    (indices,) = spy.arguments("plan", "kv_indices")
    assert len(indices) == sum(pages)
    assert spy.arguments("plan", "kv_indptr")[0].tolist() == [0, pages[0], sum(pages)]


@pytest.mark.parametrize("page_size", [3, 48])
def test_pages_of_any_size(page_size) -> None:
    """No powers of two; requests end within a page, with one and behind one."""
    ends = (page_size - 1, page_size, page_size + 1, 100)
    steps = decode(*ends), extend(*((end, 5) for end in ends))
    assert_agrees(*steps, page_size=page_size, lse=True)


def test_only_steps_of_several_rows_are_causal(spy) -> None:
    spy.run_steps(decode(5), extend((9, 1), (4, 1)), extend((9, 1), (4, 2)), verify(3, 9),
                  spec_topk=1)  # fmt: skip
    assert spy.arguments("plan", "causal") == [False, False, True, True]


@pytest.mark.parametrize(("heads", "padded"), [(20, 32), (48, 64), (96, 128), (64, 64), (128, 128)])
def test_heads_are_padded_for_causal_kernels_alone(spy, heads, padded) -> None:
    spy.run_steps(decode(5), extend((3, 4)), num_q_heads=heads)
    assert spy.arguments("plan", "num_heads") == [heads, padded]
    assert {q.shape[1] for q in spy.arguments("run", "q_nope")} == {heads, padded}


@pytest.mark.parametrize("heads", [20, 96])
def test_tiles_that_end_within_a_token(monkeypatch, heads) -> None:
    """The kernels would leave out keys of tokens whose keys end on a multiple of 64."""
    step = extend(*((prefix, 10) for prefix in range(54, 66)))
    assert_agrees(step, num_q_heads=heads, lse=True)
    monkeypatch.setattr(planning, "padded_heads", lambda num_heads: num_heads)
    outcome = run_case(CANDIDATE, case_of(step, num_q_heads=heads))
    assert outcome.status == "failed"
    assert "values differ" in outcome.message


def test_requests_without_rows_are_left_out(spy) -> None:
    """They would make the tiles of 128 heads end within a token."""
    step = extend((5, 0), (64, 2), (7, 0), (30, 0), (17, 0), (0, 3), (9, 0), (3, 0))
    assert_agrees(step, num_q_heads=128)
    spy.run_steps(step, num_q_heads=128)
    assert spy.arguments("plan", "qo_indptr")[0].tolist() == [0, 2, 5]
    assert spy.arguments("plan", "kv_len_arr")[0].tolist() == [66, 3]
    assert len(spy.arguments("plan", "kv_indices")[0]) == 5 + 1


def test_nothing_is_planned_for_a_step_without_rows(spy) -> None:
    spy.run_steps(extend((17, 0), (3, 0)), extend(mode=ForwardMode.IDLE))
    assert not spy.calls


def test_keys_of_the_call_are_planned_when_they_come(spy) -> None:
    spy.run_steps(extend((0, 7), (0, 3)), save_kv_cache=False)
    assert spy.counts == {"make": 1, "plan": 2, "run": 2}
    assert spy.arguments("plan", "page_size") == [16, 1]
    assert spy.arguments("plan", "kv_indices")[1].tolist() == list(range(10))


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
def test_tiles_of_a_plan(spy, monkeypatch, num_tokens, parts) -> None:
    """128 heads of a token are one, and the library would write beyond its lists."""
    world = world_of(extend((1, 1)), num_q_heads=128, max_context_len=16640)
    backend = backend_of(world, spy.kernels)
    batch = prepare_step(world, extend((1, 1)), host_lens=True).batch
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
    spy.calls.clear()
    backend.init_forward_metadata(longer)
    planned = [int(bounds[-1]) for bounds in spy.arguments("plan", "qo_indptr")]
    assert len(planned) == parts
    assert sum(planned) == num_tokens
    assert [int(lens[-1]) for lens in spy.arguments("plan", "kv_len_arr")][-1] == num_tokens + 1
    if parts > 1:
        monkeypatch.setattr(steps_module, "PLAN_TILES", 1 << 20)
        with pytest.raises(RuntimeError, match="works"):
            backend.init_forward_metadata(longer)


def test_results_go_where_the_caller_wants(spy) -> None:
    step = extend((0, 7), (9, 3))
    world = world_of(step)
    backend = backend_of(world, spy.kernels)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    out, lse = torch.empty_like(given.q), torch.zeros(given.q.shape[:2])
    spy.calls.clear()
    assert forward(backend, given, prepared.batch, out=out, lse=lse) is out
    assert spy.arguments("run", "out") == [out]
    assert spy.arguments("run", "lse") == [lse]
    assert spy.arguments("run", "return_lse_base_on_e") == [True]


@pytest.mark.parametrize("save", [True, False])
def test_rows_that_the_kernels_cannot_load_are_copied(save) -> None:
    step = extend((0, 9), (0, 4))
    world = world_of(step)
    backend = backend_of(world)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]

    def odd(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(len(rows), rows[0].numel() + 3, dtype=rows.dtype)
        return wide[:, 1 : rows[0].numel() + 1].view(rows.shape).copy_(rows)

    lse = torch.zeros(given.q.shape[:2])
    expected = forward(backend, given, prepared.batch, save_kv_cache=save, lse=lse)
    moved = replace(
        given,
        q=odd(given.q),
        q_rope=odd(given.q_rope),
        k=odd(given.k),
        k_rope=odd(given.k_rope),
    )
    out, apart = odd(torch.full_like(given.q, 7)), torch.zeros_like(lse.t()).t()
    into = {"out": out, "lse": apart}
    assert forward(backend, moved, prepared.batch, save_kv_cache=save, **into) is out
    assert torch.equal(out, expected)
    assert torch.equal(apart, lse)


WIDENED: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "lse": True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [2**-8, 4.0])
def test_powers_of_2_are_no_loss(scale, dtype) -> None:
    steps = decode(5, 0, 40), extend((0, 9), (17, 4))
    assert_agrees(*steps, dtype=dtype, kv_scales=(scale, 2.0), **WIDENED)


@pytest.mark.parametrize("scale", [2 / 448, 0.37, 5.9])
def test_other_scales_round_queries_and_output_once_more(scale) -> None:
    step = extend((0, 9), (17, 4))
    world = world_of(step, kv_scales=(scale, 2.0), **WIDENED)
    backend = backend_of(world)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    for given in prepared.inputs:
        lse = torch.zeros(given.q.shape[:2])
        out = forward(backend, given, prepared.batch, lse=lse)
        expected = reference.attention(
            given.q,
            given.layer,
            prepared.batch,
            world.context.req_to_token_pool.req_to_token,
            world.context.token_to_kv_pool,
            q_rope=given.q_rope,
        )
        torch.testing.assert_close(out, expected[0].to(out.dtype), atol=1.6e-2, rtol=3.2e-2)
        torch.testing.assert_close(lse, expected[1].float(), atol=1.6e-2, rtol=4e-3)


def test_the_steps_rows_alone_are_widened(spy) -> None:
    spy.run_steps(decode(5, 30), extend((0, 9), (17, 4)), kv_dtype="fp8_e4m3")
    assert spy.counts == {"plan": 2, "run": 4}
    assert spy.arguments("run", "ckv_cache") == [(35, 1, 512)] * 2 + [(30, 1, 512)] * 2


def test_a_length_of_0_and_rows_behind_the_requests() -> None:
    assert_agrees(decode(0, 5, 1), decode(0, 0), lse=True)
    assert_agrees(extend((9, 3), (0, 5), padding=2, trailing=3), lse=True)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3)])
def test_graphs_of_two_modes_on_one_backend(sizes) -> None:
    """What the second runner allocates does not take the place of what the first one captured."""
    steps = (decode(5, 30), verify(4, 9, 20))
    world = world_of(*steps, spec_topk=1, page_size=1)
    backend = backend_of(world)

    def runner(step: Step, mode: ForwardMode, tokens: int, size: int) -> tuple[GraphRunner, Any]:
        prepared = prepare_step(world, step, host_lens=True)
        queries = [
            [torch.nn.functional.pad(q, (0, 0, 0, 0, 0, size * tokens)) for q in (x.q, x.q_rope)]
            for x in prepared.inputs
        ]

        def call(batch: Any, inputs: Any) -> list[torch.Tensor]:
            rows = slice(batch.num_tokens)
            return [
                backend.forward(q[rows], None, None, x.layer, batch, q_rope=q_rope[rows])
                for x, (q, q_rope) in zip(prepared.inputs, queries, strict=True)
            ]

        config = GraphConfig(
            batch_sizes=(2, size), forward_mode=mode, tokens_per_request=tokens, host_lens=True
        )
        made = GraphRunner(backend, call, config, devices=RecordingGraphs(), progress=iter)
        made.capture(prepared.batch)
        return made, prepared

    runners = [
        runner(steps[0], ForwardMode.DECODE, 1, sizes[0]),
        runner(steps[1], ForwardMode.TARGET_VERIFY, 4, sizes[1]),
    ]
    # The second step took the place of what the first one put into the pool.
    pool, table = world.context.token_to_kv_pool, world.context.req_to_token_pool.req_to_token
    for layer in world.context.layers:
        pool.get_key_buffer(layer.layer_id).normal_(generator=world.generator)
    table.random_(1, pool.num_slots, generator=world.generator)
    for made, prepared in (*runners, *runners):
        replayed = [out.clone() for out in made.replay(prepared.batch)]
        backend.init_forward_metadata(prepared.batch)
        for out, x in zip(replayed, prepared.inputs, strict=True):
            eager = backend.forward(x.q, None, None, x.layer, prepared.batch, q_rope=x.q_rope)
            torch.testing.assert_close(out, eager)


@pytest.mark.parametrize("room", [5, 1 << 14])
@pytest.mark.parametrize("heads", [16, 20])
def test_graphs_of_padded_heads_and_of_steps_that_are_cut(monkeypatch, heads, room) -> None:
    monkeypatch.setattr(steps_module, "PLAN_TILES", room)
    steps = verify(4, 9, 60), verify(4, 58, 3)
    assert_agrees(*steps, spec_topk=1, num_q_heads=heads, lse=True, graph=True)


def test_one_wrapper_serves_all_captured_sizes(spy) -> None:
    world = world_of(decode(5, 30))
    backend = backend_of(world, spy.kernels)
    backend.init_cuda_graph_state(8, 8)
    for lens in ((5,), (5, 30), (5, 30, 3)):
        batch = prepare_step(world, decode(*lens), host_lens=True).batch
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert spy.counts["make"] == 1
    indices = spy.arguments("plan", "kv_indices")[-3:]
    assert len({(each.data_ptr(), len(each)) for each in indices}) == 1


@pytest.mark.parametrize("mode", [ForwardMode.DRAFT_EXTEND, ForwardMode.EXTEND])
def test_steps_of_requests_of_many_lengths_are_in_no_graph(mode) -> None:
    step = extend((9, 3), (5, 1), mode=mode)
    world = world_of(step)
    backend = backend_of(world)
    backend.init_cuda_graph_state(2, 8)
    batch = prepare_step(world, step, host_lens=True).batch
    with pytest.raises(GraphUnsupported, match=f"{mode.name}.*eagerly"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_capture_without_room_is_refused(max_batch_size) -> None:
    world = world_of(decode(5, 6))
    backend = backend_of(world)
    if max_batch_size:
        backend.init_cuda_graph_state(max_batch_size, max_batch_size)
    batch = prepare_step(world, decode(5, 6), host_lens=True).batch
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_widened_keys_are_in_no_graph() -> None:
    backend = backend_of(world_of(decode(5), kv_dtype="fp8_e4m3"))
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
    step = verify(4, 5, 6)
    world = world_of(step, spec_topk=1)
    backend = backend_of(world)
    batch = refused_batches(prepare_step(world, step, host_lens=True).batch)[field]
    with pytest.raises(InvalidInput, match=field):
        backend.init_forward_metadata_out_graph(batch)


def test_decode_needs_lengths_on_the_host() -> None:
    world = world_of(decode(5))
    with pytest.raises(InvalidInput, match="seq_lens_cpu"):
        backend_of(world).init_forward_metadata(prepare_step(world, decode(5)).batch)


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
    context = world_of(decode(5)).context
    layers = (replace(context.layers[0], **changes),)
    world = World(
        case=case_of(decode(5)), context=replace(context, layers=layers),
        generator=torch.Generator(),
    )  # fmt: skip
    with pytest.raises(InvalidInput, match=says):
        backend_of(world)


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"kv_dtype": "fp8_e5m2"}])
def test_dtypes_that_are_refused(settings) -> None:
    with pytest.raises(InvalidInput, match=r"dtype|token_to_kv_pool"):
        backend_of(world_of(decode(5), **settings))


def test_keys_of_another_dtype_are_refused() -> None:
    step = extend((0, 5))
    world = world_of(step)
    backend = backend_of(world)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = replace(prepared.inputs[0], k=prepared.inputs[0].k.float())
    with pytest.raises(InvalidInput, match="float32"):
        forward(backend, given, prepared.batch, save_kv_cache=False)


def test_workspace_bytes() -> None:
    world = world_of(decode(5))
    backend_of(world, workspace_bytes=LEAST_WORKSPACE_BYTES)
    assert world.context.workspace.nbytes == LEAST_WORKSPACE_BYTES
    backend_of(world)
    assert world.context.workspace.nbytes == 256 * MIB
    with pytest.raises(InvalidInput, match="16 bytes more"):
        backend_of(world, workspace_bytes=LEAST_WORKSPACE_BYTES - 16)


def test_the_option_names_the_kernels(spy) -> None:
    for name in ("auto", "fa2", "fa3"):
        backend_of(world_of(decode(5)), spy.kernels, backend=name)
    assert spy.arguments("make", "backend") == ["auto", "fa2", "fa3"]


@pytest.mark.parametrize("fails", ["plan", "run"])
def test_a_kernel_that_does_not_run_fails_the_constructor(monkeypatch, fails) -> None:
    def failing(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(EMULATED.paged, fails, failing)
    with pytest.raises(BackendFailed, match="no kernel image") as failed:
        backend_of(world_of(decode(5)))
    assert failed.value.address == "nvidia/flashinfer_mla"
    assert "pip install 'attnmux-nvidia[flashinfer]'" in str(failed.value)
    assert "more" not in str(failed.value)


@pytest.mark.parametrize("step", [decode(5), extend((0, 5))])
def test_forward_needs_a_prepared_step(step) -> None:
    world = world_of(step)
    backend = backend_of(world)
    prepared = prepare_step(world, step, host_lens=True)
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        forward(backend, prepared.inputs[0], prepared.batch)


def test_plans_are_made_when_those_of_the_step_before_were_copied(spy, monkeypatch) -> None:
    def noted(name: str) -> Callable[[object], None]:
        return lambda staging: spy.calls.append((name, {}))

    for name in ("wait", "mark"):
        monkeypatch.setattr(Staging, name, noted(name))
    spy.run_steps(extend((0, 4)), save_kv_cache=False)
    order = [method for method, _ in spy.calls if method in ("wait", "plan", "mark")]
    assert order == ["wait", "plan", "mark", "plan", "mark"]
