"""The runner: what is captured in which order, what is replayed, what comes back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    CapturingRanks,
    DeviceGraphs,
    ForwardContext,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    InvalidInput,
    ModelInput,
)
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.core.graph.config import show_progress
from attnmux.core.graph.devices import CudaGraphs
from attnmux.core.plugin import CapturedGraph, GraphStep
from attnmux.testing import (
    Case,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
    verify,
)
from attnmux.testing.graphs.tape import GraphViolation

CASE = Case(
    name="runner", steps=(decode(40, 30, 14, 17, 9),), dtype="float32", page_size=4, windows=(None,)
)
INPUTS = {"input_ids": ModelInput(dtype=torch.int64)}


class Noted(RecordingGraphs):
    """Notes what it is asked for."""

    def __init__(self, notes: list[object]) -> None:
        self._notes = notes

    @contextmanager
    def session(self) -> Iterator[None]:
        self._notes.append("session")
        yield
        self._notes.append("end of session")

    def warm_up(self, step: GraphStep) -> None:
        self._notes.append("warm-up")
        super().warm_up(step)

    def capture(self, step: GraphStep) -> CapturedGraph:
        self._notes.append("capture")
        return super().capture(step)


class NotedRanks(CapturingRanks):
    """Notes when the ranks wait for each other."""

    rank = 0

    def __init__(self, notes: list[object], rank: int = 0) -> None:
        self._notes = notes
        self.rank = rank

    @contextmanager
    def session(self, config: GraphConfig) -> Iterator[None]:
        self._notes.append(("session of ranks", config.batch_sizes))
        yield
        self._notes.append("end of session of ranks")

    def meet(self) -> None:
        self._notes.append("meet")


@pytest.fixture
def setup():
    return make_setup(CASE, fake_platform(), "cpu")


def model(batch, inputs):
    """Attention of one layer, and what it was called with."""
    context = ForwardContext.current()
    assert context.batch is batch
    layer = context.backend.context.layers[0]
    ids = inputs["input_ids"]
    q = torch.arange(8 * 128).view(8, 128).sin() * ids[:, None, None]
    k, v = q[:, :2].cos(), q[:, 2:4].sin()
    out = context.backend.forward(q, k, v, layer, batch)
    return {"out": out, "nothing": None, "rows": (batch.positions + ids, ids * 1.0)}


def runner_of(setup, *, backend=None, forward=model, **settings) -> GraphRunner:
    given = {name: settings.pop(name) for name in ("collectives", "ranks") if name in settings}
    devices = settings.pop("devices", RecordingGraphs())
    progress = settings.pop("progress", iter)
    config = GraphConfig(**{"batch_sizes": (1, 2, 4, 8), **settings})
    return GraphRunner(
        backend or GraphFakeBackend(setup.context),
        forward,
        config,
        devices=devices,
        inputs=INPUTS,
        progress=progress,
        **given,
    )


def ids_of(batch) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(batch.num_tokens) + 1}


def test_captures_from_large_to_small_after_two_warm_ups(setup) -> None:
    notes: list[object] = []

    class Watched(GraphFakeBackend):
        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            notes.append(("state", max_bs, max_num_tokens))
            super().init_cuda_graph_state(max_bs, max_num_tokens)

        def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
            notes.append((batch.batch_size, in_capture))
            super().init_forward_metadata_out_graph(batch, in_capture)

    runner = runner_of(
        setup,
        backend=Watched(setup.context),
        devices=Noted(notes),
        batch_sizes=(1, 4, 8),
    )
    assert runner.batch_sizes == ()
    runner.capture()
    each = ["warm-up", "warm-up", "capture"]
    assert notes == [
        ("state", 8, 8),
        "session",
        *[(8, True), *each],
        *[(4, True), *each],
        *[(1, True), *each],
        "end of session",
    ]
    assert runner.batch_sizes == (1, 4, 8)
    assert list(runner.memory_bytes) == [1, 4, 8]
    assert 0 < runner.memory_bytes[1] < runner.memory_bytes[8]
    notes.clear()
    batch = prepare_step(setup, decode(3, 4)).batch
    runner.replay(batch, ids_of(batch))
    assert notes == [(4, False)]


def test_ranks_meet_before_each_warm_up_and_capture(setup) -> None:
    notes: list[object] = []
    runner = runner_of(setup, devices=Noted(notes), ranks=NotedRanks(notes), batch_sizes=(1, 4))
    runner.capture()
    each = ["meet", "warm-up", "meet", "warm-up", "meet", "capture"]
    assert notes == [
        ("session of ranks", (1, 4)),
        "session",
        *each,
        *each,
        "end of session",
        "end of session of ranks",
    ]


def idle_step(setup):
    return prepare_step(setup, extend(mode=ForwardMode.IDLE)).batch


@pytest.mark.parametrize("host_lens", [False, True])
def test_an_idle_step_replays_padding(setup, host_lens: bool) -> None:
    seen: list[object] = []

    class Watched(GraphFakeBackend):
        def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
            seen.append(
                (
                    batch.batch_size,
                    batch.actual_forward_mode,
                    batch.seq_lens_sum,
                    batch.req_pool_indices.tolist(),
                    batch.seq_lens.tolist(),
                    batch.out_cache_loc.tolist(),
                )
            )
            super().init_forward_metadata_out_graph(batch, in_capture)

    runner = runner_of(setup, backend=Watched(setup.context), host_lens=host_lens)
    runner.capture()
    idle = idle_step(setup)
    busy = prepare_step(setup, decode(9, 30, 2), host_lens=host_lens).batch
    expected = runner.replay(busy, ids_of(busy))["out"].clone()
    buffers = setup.context.token_to_kv_pool.get_kv_buffer(1)
    before = [buffer.clone() for buffer in buffers]
    seen.clear()
    assert runner.can_run(idle, size=4)
    outputs = runner.replay(idle, size=4)
    total = 4 if host_lens else None
    assert seen == [(4, ForwardMode.IDLE, total, [0] * 4, [1] * 4, [0] * 4)]
    assert [outputs["out"].shape[0], outputs["rows"][1].shape[0]] == [0, 0]
    for buffer, copy in zip(buffers, before, strict=True):
        assert torch.equal(buffer[1:].view(torch.int32), copy[1:].view(torch.int32))
    again = runner.replay(busy, ids_of(busy), size=8)["out"]
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("two_batches", [False, True])
def test_an_idle_step_of_drafts_replays_padding(two_batches: bool) -> None:
    case = replace(CASE, steps=(verify(3, 9, 17, 4),), spec_topk=2)
    setup = make_setup(case, fake_platform(), "cpu")
    masks: list[tuple[list[int], bool]] = []

    class Watched(GraphFakeBackend):
        def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
            for each in (batch, *batch.tbo_children):
                ends = each.spec_info.mask_indptr.tolist()
                masks.append((ends, bool(each.spec_info.custom_mask[: ends[-1]].all())))
            super().init_forward_metadata_out_graph(batch, in_capture)

    runner = GraphRunner(
        Watched(setup.context),
        lambda batch, inputs: batch.positions + 1,
        GraphConfig(
            batch_sizes=(2, 4),
            forward_mode=ForwardMode.TARGET_VERIFY,
            tokens_per_request=3,
            spec_topk=2,
            custom_mask=True,
            two_batches=two_batches,
        ),
        devices=RecordingGraphs(),
        progress=iter,
    )
    runner.capture()
    busy = prepare_step(setup, case.steps[0]).batch
    runner.replay(busy)
    assert not masks[-1][1]
    masks.clear()
    assert runner.replay(idle_step(setup), size=4).shape == (0,)
    width = 3 * (1 + 3)
    whole = [n * width for n in range(5)]
    each = [whole, whole[:3], whole[:3]] if two_batches else [whole]
    assert masks == [(ends, True) for ends in each]


def test_the_size_of_a_replay(setup) -> None:
    runner = runner_of(setup, batch_sizes=(2, 4, 8))
    runner.capture()
    idle, batch = idle_step(setup), prepare_step(setup, decode(5, 9, 3)).batch
    assert runner.size_for(batch) == 4
    assert runner.size_for(idle) is None
    expected = runner.replay(batch, ids_of(batch))["out"].clone()
    torch.testing.assert_close(runner.replay(batch, ids_of(batch), size=8)["out"], expected)
    for given, size, message in (
        (batch, 2, r"size: expected a captured size that holds 3 requests: \(2, 4, 8\), got 2"),
        (batch, 5, "size: expected a captured size"),
        (idle, None, "size: expected in an IDLE step, the size that the other ranks replay"),
        (idle, 3, "size: expected a captured size that holds 0 requests"),
        (replace(batch, forward_mode=ForwardMode.IDLE), 4, "batch_size: expected 0 in an IDLE"),
        (replace(idle, forward_mode=ForwardMode.DECODE), 4, "batch_size: expected a captured size"),
    ):
        assert not runner.can_run(given, size=size)
        with pytest.raises(InvalidInput, match=message):
            runner.replay(given, ids_of(given), size=size)


@pytest.mark.parametrize("num_requests", [1, 3, 4, 5])
def test_replays_what_an_eager_step_gives(setup, num_requests: int) -> None:
    runner = runner_of(setup)
    runner.capture()
    backend = FakeBackend(setup.context)
    buffers = setup.context.token_to_kv_pool.get_kv_buffer(1)
    for lens in ((9, 30, 2, 14, 7), (11, 1, 40, 3, 3)):
        batch = prepare_step(setup, decode(*lens[:num_requests])).batch
        before = [buffer.clone() for buffer in buffers]
        backend.init_forward_metadata(batch)
        expected = _in_context(backend, batch)
        written = [buffer.clone() for buffer in buffers]
        for buffer, copy in zip(buffers, before, strict=True):
            buffer.copy_(copy)
        outputs = runner.replay(batch, ids_of(batch))
        assert set(outputs) == {"out", "nothing", "rows"}
        assert outputs["nothing"] is None
        assert isinstance(outputs["rows"], tuple)
        torch.testing.assert_close(outputs["out"], expected["out"])
        for mine, theirs in zip(outputs["rows"], expected["rows"], strict=True):
            assert torch.equal(mine, theirs)
        for buffer, copy in zip(buffers, written, strict=True):
            assert torch.equal(buffer[1:].view(torch.int32), copy[1:].view(torch.int32))


def _in_context(backend, batch):
    with torch.no_grad(), ForwardContext.enter(backend, batch):
        return model(batch, ids_of(batch))


def test_the_graph_upgrades_raw_metadata(setup) -> None:
    """Rows are copied outside of the graph; the table of slots is built inside, at each replay."""
    calls = []

    class Watched(GraphFakeBackend):
        def init_forward_metadata_in_graph(self, batch) -> None:
            calls.append(batch.batch_size)
            super().init_forward_metadata_in_graph(batch)

    backend = Watched(setup.context)
    runner = runner_of(setup, backend=backend, batch_sizes=(4,))
    runner.capture()
    (state,) = backend.states
    calls.clear()
    for lens in ((9, 30, 2), (4, 1, 20)):
        batch = prepare_step(setup, decode(*lens)).batch
        runner.replay(batch, ids_of(batch))
        assert state.raw_rows.tolist() == [*batch.req_pool_indices.tolist(), 0]
        assert state.cached.tolist() == [*(length - 1 for length in lens), 0]
        table = setup.context.req_to_token_pool.req_to_token
        assert torch.equal(state.slots[:3], table[batch.req_pool_indices])
    assert calls == []
    assert backend.states == [state]


@pytest.mark.parametrize("captured_in", [True, False])
def test_capture_and_replay_may_differ_in_inference_mode(setup, captured_in: bool) -> None:
    runner = runner_of(setup, batch_sizes=(2,))
    with torch.inference_mode(captured_in):
        runner.capture()
    with torch.inference_mode(not captured_in):
        batch = prepare_step(setup, decode(5, 9)).batch
        assert runner.replay(batch, ids_of(batch))["out"].isfinite().all()


def test_capturing_leaves_the_cache_alone_but_for_slot_0(setup) -> None:
    prepare_step(setup, decode(5, 9))
    pool = setup.context.token_to_kv_pool
    before = [buffer.clone() for buffer in pool.get_kv_buffer(1)]
    runner_of(setup).capture()
    for buffer, copy in zip(pool.get_kv_buffer(1), before, strict=True):
        assert torch.equal(buffer[1:].view(torch.int32), copy[1:].view(torch.int32))


def test_serves_batches_like_those_of_the_capture(setup) -> None:
    runner = runner_of(setup, batch_sizes=(2, 4), host_lens=True)
    batch = prepare_step(setup, decode(5, 9, 3), host_lens=True).batch
    assert not runner.can_run(batch)
    with pytest.raises(InvalidInput, match=r"expected capture\(\) before"):
        runner.replay(batch, ids_of(batch))
    runner.capture()
    assert runner.can_run(batch)
    lens = torch.zeros(3, dtype=torch.int32)
    for other in (
        prepare_step(setup, decode(5, 9, 3, 17, 2), host_lens=True).batch,
        prepare_step(setup, extend((0, 2)), host_lens=True).batch,
        prepare_step(setup, extend(mode=ForwardMode.IDLE), host_lens=True).batch,
        prepare_step(setup, decode(5, 9, 3)).batch,
        replace(batch, encoder_lens=lens),
        replace(batch, encoder_out_cache_loc=lens.long()),
        replace(batch, out_cache_loc=batch.out_cache_loc[:2]),
    ):
        assert not runner.can_run(other)
        with pytest.raises(InvalidInput):
            runner.replay(other, ids_of(other))


def test_inputs_that_no_graph_reads_are_refused(setup) -> None:
    runner = runner_of(setup)
    runner.capture()
    batch = prepare_step(setup, decode(5, 9)).batch
    with pytest.raises(InvalidInput, match=r"expected .* \['input_ids'\], got 'lora_ids'"):
        runner.replay(batch, {**ids_of(batch), "lora_ids": batch.positions})


def test_progress_is_shown_on_rank_0(setup) -> None:
    shown: list[list[int]] = []

    def progress(sizes):
        shown.append(list(sizes))
        return sizes

    runner_of(setup, progress=progress, ranks=NotedRanks([], rank=1)).capture()
    assert shown == []
    runner_of(setup, progress=progress).capture()
    assert shown == [[8, 4, 2, 1]]


def test_the_bar_goes_through_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(show_progress((8, 4, 1))) == [8, 4, 1]
    assert capsys.readouterr() == ("", "")


def test_a_backend_without_graphs_says_so(setup) -> None:
    runner = runner_of(setup, backend=FakeBackend(setup.context))
    with pytest.raises(GraphUnsupported, match="FakeBackend cannot be captured in a device graph"):
        runner.capture()
    assert runner.batch_sizes == ()


def test_debug_checks_cannot_be_captured(setup) -> None:
    context = replace(setup.context, debug=True)
    with pytest.raises(GraphUnsupported, match=r"debug mode, .*: run eagerly, or .* debug=False"):
        runner_of(setup, backend=GraphFakeBackend(context))


def test_a_failed_capture_leaves_no_graph(setup) -> None:
    def forward(batch, inputs):
        if batch.batch_size == 2:
            batch.seq_lens.tolist()
        return inputs["input_ids"] + 1

    runner = runner_of(setup, forward=forward)
    with pytest.raises(GraphViolation, match=r"forward: Tensor\.tolist synchronises"):
        runner.capture()
    assert runner.batch_sizes == ()
    assert not runner.can_run(prepare_step(setup, decode(3)).batch)


def test_a_failed_capture_leaves_none_of_an_earlier_one(setup) -> None:
    """Whose buffers the backend may have made anew."""
    fails = False

    def forward(batch, inputs):
        if fails and batch.batch_size == 2:
            raise ValueError("in the middle")
        return inputs["input_ids"] + 1

    runner = runner_of(setup, forward=forward)
    runner.capture()
    fails = True
    with pytest.raises(ValueError, match="in the middle"):
        runner.capture()
    assert runner.batch_sizes == ()
    fails = False
    runner.capture()
    batch = prepare_step(setup, decode(3, 9)).batch
    assert runner.replay(batch, ids_of(batch)).tolist() == [2, 3]


@pytest.mark.parametrize("output", ["text", torch.zeros(3), torch.tensor(1.0)])
def test_outputs_have_a_row_for_each_token(setup, output: object) -> None:
    with pytest.raises(InvalidInput, match="forward: expected tensors of 8 rows"):
        runner_of(setup, forward=lambda *_: output).capture()


@pytest.mark.parametrize(
    ("of_two", "got"),
    [
        (lambda ids: ids * 1.0, r"torch.float32 of shape \(2,\) for 2 tokens"),
        (lambda ids: ids[:, None], r"torch.int64 of shape \(2, 1\) for 2 tokens"),
        (lambda ids: (ids,), r"torch.int64 of shape \(2,\) for 2 tokens"),
        (lambda ids: None, "None for 2 tokens"),
    ],
)
def test_outputs_of_all_sizes_are_alike(setup, of_two, got: str) -> None:
    def forward(batch, inputs):
        ids = inputs["input_ids"]
        return of_two(ids) if batch.batch_size == 2 else ids + 1

    with pytest.raises(InvalidInput, match=f"forward: expected rows of .*, got {got}"):
        runner_of(setup, forward=forward).capture()


def test_sizes_share_their_outputs(setup) -> None:
    """One tensor of the largest size holds them all; the model's own are free for others."""
    returned = []

    def forward(batch, inputs):
        logits = inputs["input_ids"][:, None] * torch.ones(97)
        returned.append(weakref.ref(logits))
        return logits

    class Forgets(RecordingGraphs):
        """Keeps of a graph what a device's keeps: its outputs."""

        def capture(self, step: GraphStep) -> CapturedGraph:
            return replace(super().capture(step), replay=lambda: None)

    forgets = runner_of(setup, forward=forward, devices=Forgets())
    forgets.capture()
    assert len(returned) == 4 * 3
    assert all(logits() is None for logits in returned)
    runner = runner_of(setup, forward=forward)
    runner.capture()
    outputs = []
    for lens in ((4, 9, 30, 2, 11), (7,), (3, 2)):
        batch = prepare_step(setup, decode(*lens)).batch
        outputs.append(runner.replay(batch, ids_of(batch)))
        assert outputs[-1][:, 96].tolist() == [*range(1, len(lens) + 1)]
    assert {output.data_ptr() for output in outputs} == {outputs[0].data_ptr()}


def test_an_interrupted_step_leaves_no_request_in_the_padding(setup, monkeypatch) -> None:
    """Whose slot a padding row would write to."""
    runner = runner_of(setup, forward=lambda batch, inputs: batch.out_cache_loc + 0)
    runner.capture()
    large, small = (prepare_step(setup, decode(*[9] * size)).batch for size in (8, 3))
    copy, calls = torch._foreach_copy_, []

    def interrupted(*args):
        copy(*args)
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.replay(large, ids_of(large))
    runner.replay(small, ids_of(small))
    buffers = runner._buffers.views(8)[0]
    for name, fill in (("seq_lens", 1), ("req_pool_indices", 0), ("out_cache_loc", 0)):
        assert getattr(buffers, name)[3:].tolist() == [fill] * 5


@pytest.mark.parametrize("first", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_backend_has_a_runner_for_each_mode(first: ForwardMode) -> None:
    """The second needs larger buffers, and what the first captured still reads its own."""
    steps = {
        ForwardMode.DECODE: decode(11, 30, 4, 17, 9),
        ForwardMode.TARGET_VERIFY: verify(3, 5, 9, 21, 2, 7),
    }
    case = replace(CASE, steps=tuple(steps.values()), spec_topk=1)
    setup = make_setup(case, fake_platform(), "cpu")
    backend, eager, devices = (
        GraphFakeBackend(setup.context),
        FakeBackend(setup.context),
        RecordingGraphs(),
    )
    second = next(mode for mode in steps if mode is not first)
    runners = {
        mode: runner_of(
            setup,
            backend=backend,
            devices=devices,
            batch_sizes=sizes,
            forward_mode=mode,
            tokens_per_request=3 if mode.is_target_verify() else 1,
        )
        for mode, sizes in ((first, (1, 5)), (second, (5, 8)))
    }
    for runner in runners.values():
        runner.capture()
    for mode in (first, second, first):
        batch = prepare_step(setup, steps[mode]).batch
        outputs = runners[mode].replay(batch, ids_of(batch))["out"]
        eager.init_forward_metadata(batch)
        torch.testing.assert_close(outputs, _in_context(eager, batch)["out"])
        assert not runners[second if mode is first else first].can_run(batch)


def test_a_hybrid_captures_decode_alone(setup) -> None:
    decode_side = GraphFakeBackend(setup.context)
    hybrid = HybridAttnBackend(prefill=FakeBackend(setup.context), decode=decode_side)
    runner = runner_of(setup, backend=hybrid, batch_sizes=(4,))
    runner.capture()
    batch = prepare_step(setup, decode(6, 2, 9)).batch
    expected = runner_of(setup, batch_sizes=(4,))
    expected.capture()
    actual = runner.replay(batch, ids_of(batch))["out"].clone()
    assert torch.equal(actual, expected.replay(batch, ids_of(batch))["out"])


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
def test_padding_is_filled_for_the_child_that_serves(speculative: str) -> None:
    class Zero(GraphFakeBackend):
        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return 0

    case = replace(CASE, steps=(decode(5), verify(3, 5)), spec_topk=1)
    setup = make_setup(case, fake_platform(), "cpu")
    request = setup.context.request.replace(speculative_attention_mode=speculative)
    context = replace(setup.context, request=request)
    hybrid = HybridAttnBackend(prefill=Zero(context), decode=GraphFakeBackend(context))
    fills = {}
    for mode, tokens in ((ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3)):
        runner = runner_of(
            setup,
            backend=hybrid,
            batch_sizes=(4,),
            forward_mode=mode,
            tokens_per_request=tokens,
            forward=lambda batch, inputs: batch.seq_lens.repeat_interleave(
                batch.num_tokens // 4, output_size=batch.num_tokens
            ),
        )
        runner.capture()
        padded, _ = runner._buffers.views(4)
        fills[mode] = padded.seq_lens.tolist()
    verifies = [0] * 4 if speculative == "prefill" else [1] * 4
    assert fills == {ForwardMode.DECODE: [1] * 4, ForwardMode.TARGET_VERIFY: verifies}
    assert [len(child.states) for child in (hybrid.prefill, hybrid.decode)] == [
        speculative == "prefill",
        1,
    ]


@pytest.mark.parametrize(("speculative", "captures"), [("prefill", True), ("decode", False)])
def test_a_hybrid_captures_prefill_where_it_verifies(speculative: str, captures: bool) -> None:
    case = replace(CASE, steps=(verify(3, 5, 9),), spec_topk=1)
    setup = make_setup(case, fake_platform(), "cpu")
    request = setup.context.request.replace(speculative_attention_mode=speculative)
    context = replace(setup.context, request=request)
    graphs, no_graphs = GraphFakeBackend(context), FakeBackend(context)
    hybrid = HybridAttnBackend(
        prefill=graphs if captures else no_graphs, decode=GraphFakeBackend(context)
    )
    settings = {"forward_mode": ForwardMode.TARGET_VERIFY, "tokens_per_request": 3}
    runner = runner_of(setup, backend=hybrid, batch_sizes=(2,), **settings)
    runner.capture()
    batch = prepare_step(setup, verify(3, 7, 2)).batch
    assert runner.replay(batch, ids_of(batch))["out"].shape[0] == 6
    without = HybridAttnBackend(prefill=no_graphs, decode=no_graphs)
    with pytest.raises(GraphUnsupported):
        runner_of(setup, backend=without, **settings).capture()


def test_devices_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphUnsupported, match="no graphs for 'cpu' devices, only for cuda and"):
        DeviceGraphs.of(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    assert isinstance(DeviceGraphs.of(torch.device("cuda")), CudaGraphs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_replay_and_report_their_memory() -> None:
    device = torch.device("cuda")
    setup = make_setup(CASE, fake_platform(), device)
    devices: DeviceGraphs = DeviceGraphs.of(device)
    runner = GraphRunner(
        GraphFakeBackend(setup.context),
        lambda batch, inputs: batch.seq_lens * inputs["input_ids"],
        GraphConfig(batch_sizes=GraphConfig.sizes(pool_size=8)),
        devices=devices,
        inputs=INPUTS,
        progress=iter,
    )
    runner.capture()
    batch = prepare_step(setup, decode(5, 9, 3)).batch
    ids = {"input_ids": torch.tensor([1, 2, 3], device=device)}
    assert runner.replay(batch, ids).tolist() == [5, 18, 9]
    assert set(runner.memory_bytes) == {1, 2, 4, 7, 8}

    def synchronises(batch, inputs):
        return batch.seq_lens * int(batch.seq_lens[0])

    failing = GraphRunner(
        GraphFakeBackend(setup.context),
        synchronises,
        GraphConfig(batch_sizes=(1,)),
        devices=DeviceGraphs.of(device),
        inputs=INPUTS,
        progress=iter,
    )
    with pytest.raises(GraphUnsupported, match="the step cannot be captured"):
        failing.capture()
    assert torch.rand(3, device=device).isfinite().all()
