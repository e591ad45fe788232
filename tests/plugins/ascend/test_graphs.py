"""Steps of the pages' adapter in graphs, whose lengths are renewed before each replay, emulated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.ascend.ascend import make
from attnmux.ascend.cards.ascend import ASCEND
from attnmux.ascend.graph_tasks import NPUGraphTasks
from attnmux.ascend.npu_graphs import NPUGraphs
from attnmux.core import (
    ANY,
    ForwardBatch,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    ModelInput,
    Platform,
)
from attnmux.core.graph.devices import GraphStep
from attnmux.emulators.ascend import KERNELS
from attnmux.testing import AttentionBackendTests, decode, verify
from attnmux.testing.adapters import LATENT, AdapterWorld, assert_passes
from attnmux.testing.recorder import Recorder
from attnmux.testing.tape import Tape

WORLD = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=Platform.parse("ascend:910b"),
    host_lens=True,
    settings={"page_size": 128, "max_context_len": 256},
)
PAGED = tuple(
    replace(each, graph=ANY)
    for each in ASCEND.clauses
    if each.kind.admits("mha") and each.head_dim.admits(128)
)
CANDIDATE = WORLD.candidate(replace(ASCEND, clauses=PAGED))


class TestGraphsEmulated(AttentionBackendTests):
    """The suite's steps in graphs. The card offers none: no such graph ran on a device."""

    backend = CANDIDATE
    page_sizes = (128,)
    executions = ("graph",)


@pytest.mark.parametrize(
    "steps",
    [
        (decode(5, 140, 0, 30), decode(200), decode(0, 0, 9)),
        (verify(3, 90, 5), verify(3, 7)),
    ],
)
def test_replays_with_other_lengths(steps) -> None:
    settings = {"max_context_len": 256, "page_size": 128, "graph": True, "spec_topk": 1}
    assert_passes(CANDIDATE, *steps, lse=True, **settings)


def test_without_renewal_a_replay_has_the_lengths_of_the_capture() -> None:
    """The emulator's graphs would show it if an adapter did not renew them."""

    class Forgetful:
        def record(self, arguments: dict[str, Any]) -> Any:
            return KERNELS.graph_tasks.record(arguments)

        def renew(self, task: object, new_ends: list[int], key_lens: list[int]) -> None:
            pass

    world = replace(WORLD, kernels=replace(KERNELS, graph_tasks=Forgetful()))
    candidate = replace(CANDIDATE, factory=world.backend)
    settings = {"max_context_len": 256, "page_size": 128, "graph": True}
    with pytest.raises(AssertionError, match="values differ"):
        assert_passes(candidate, decode(5, 140, 30), **settings)


def test_only_steps_of_a_captured_batch_renew_its_calls() -> None:
    renewed: list[list[int]] = []

    class Noting:
        def record(self, arguments: dict[str, Any]) -> Any:
            return KERNELS.graph_tasks.record(arguments)

        def renew(self, task: object, new_ends: list[int], key_lens: list[int]) -> None:
            renewed.append(key_lens)

    world = replace(WORLD, kernels=replace(KERNELS, graph_tasks=Noting()))
    backend, made = world.prepared(decode(9, 4))
    backend.init_cuda_graph_state(2, 2)
    backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(made.batch)
    for given in made.inputs:
        backend.forward(given.q, None, None, given.layer, made.batch)
    other = replace(made.batch, seq_lens=made.batch.seq_lens.clone())
    backend.init_forward_metadata_out_graph(other)
    assert not renewed
    longer = replace(made.batch, seq_lens_cpu=made.batch.seq_lens_cpu + 2)
    backend.init_forward_metadata_out_graph(longer)
    assert renewed == [[11, 6]] * len(made.inputs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({**LATENT, "page_size": 16}, "_npu_paged_attention_mla"),
        ({"num_q_heads": 4, "num_kv_heads": 4, "head_dim": 192, "v_head_dim": 128}, "prompts"),
    ],
)
def test_operators_without_renewal_are_not_captured(settings, reason) -> None:
    backend = WORLD.backend(WORLD.world(decode(3), **settings).context)
    with pytest.raises(GraphUnsupported, match=reason):
        backend.init_cuda_graph_state(1, 1)


class Library:
    """torch-npu's names that `NPUGraphTasks` calls, in the order of its calls."""

    def __init__(self, *, is_capturing: bool) -> None:
        self.events: list[Any] = []
        note = self.events.append

        @contextmanager
        def on(stream: str) -> Iterator[None]:
            note(f"on {stream}")
            yield

        class Event:
            def wait(self, stream: str) -> None:
                note(f"wait on {stream}")

            def reset(self, stream: str) -> None:
                note(f"reset on {stream}")

            def record(self, stream: object) -> None:
                note("record")

        class Stream:
            __str__ = lambda self: "updates"  # noqa: E731  # one line

            def wait_stream(self, other: str) -> None:
                note(f"updates after {other}")

        class Operator:
            def __call__(self, **arguments: Any) -> tuple[str, str]:
                note("eager")
                return "out", "lse"

            def out(self, **arguments: Any) -> None:
                note({key: arguments[key] for key in ("actual_seq_kvlen", "out", "workspace")})

        self.npu = SimpleNamespace(
            is_current_stream_capturing=lambda: is_capturing,
            current_stream=lambda: "current",
            ExternalEvent=Event,
            Stream=Stream,
            stream=on,
            graph_task_group_begin=lambda stream: note("begin"),
            graph_task_group_end=lambda stream: note("end") or "handle",
            graph_task_update_begin=lambda stream, handle: note(f"update {handle}"),
            graph_task_update_end=lambda stream: note("updated"),
        )
        self.npu_fused_infer_attention_score_v2 = Operator()
        prefix = "_npu_fused_infer_attention_score_v2"
        setattr(self, f"{prefix}_infer_output", lambda q, v, **_: ("out", "lse"))
        setattr(self, f"{prefix}_get_max_workspace", lambda **_: "room")


ARGUMENTS = {"query": 1, "value": 2, "actual_seq_qlen": [1], "actual_seq_kvlen": [5]}


def test_the_calls_of_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(is_capturing=True)
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    tasks = NPUGraphTasks()
    results, task = tasks.record(ARGUMENTS)
    assert results == ("out", "lse")
    outputs = {"out": ["out", "lse"], "workspace": "room"}
    assert library.events == [
        *("wait on current", "reset on current", "begin"),
        {"actual_seq_kvlen": [5], **outputs},
        "end",
    ]
    library.events.clear()
    tasks.renew(task, [1], [9])
    assert library.events == [
        *("updates after current", "on updates", "update handle"),
        {"actual_seq_kvlen": [9], **outputs},
        *("updated", "record"),
    ]


def test_a_warm_up_is_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(is_capturing=False)
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    assert NPUGraphTasks().record(ARGUMENTS) == (("out", "lse"), None)
    assert library.events == ["eager"]


def test_results_are_those_of_the_operator() -> None:
    q = torch.randn(1, 2, 64).bfloat16()
    given = {
        "query": q,
        "key": q,
        "value": q,
        "actual_seq_qlen": [1],
        "actual_seq_kvlen": [1],
        "num_query_heads": 2,
        "input_layout": "TND",
    }
    (out, _), _ = KERNELS.graph_tasks.record(given)
    assert torch.equal(out, KERNELS.fused_infer_attention_score(**given)[0])


class Devices:
    """torch-npu's names that `NPUGraphs` calls. Graphs are recordings, as on a CPU."""

    def __init__(self) -> None:
        self.npu = self
        self.given: dict[str, Any] = {}

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def NPUGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.tape.run())

    def graph_pool_handle(self) -> str:
        return "pool"

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 9, 9

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        pass

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: object, **given: object) -> Iterator[None]:
        self.given, self.tape = given, Tape()
        with Recorder(self.tape, "forward", self.host_tensors):
            yield

    host_tensors: tuple[torch.Tensor, ...] = ()


def test_a_runner_on_npu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It captures one batch and replays another with other lengths."""
    library = Devices()
    monkeypatch.setitem(sys.modules, "torch_npu", library)
    setup = WORLD.world(decode(5, 140), decode(60, 9), kv_in_pool=True, num_q_heads=8)
    backend = WORLD.backend(setup.context)
    first = WORLD.prepare(setup, setup.case.steps[0])
    layer = first.inputs[0].layer

    def forward(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return backend.forward(inputs["q"], None, None, layer, batch)

    runner = GraphRunner(
        backend,
        forward,
        GraphConfig(batch_sizes=(4,), host_lens=True),
        devices=NPUGraphs(torch.device("cpu")),
        inputs={"q": ModelInput(dtype=torch.bfloat16, trailing=tuple(first.inputs[0].q.shape[1:]))},
        progress=iter,
    )
    library.host_tensors = runner._buffers.host_tensors
    runner.capture()
    assert library.given["pool"] == "pool"
    assert library.given["capture_error_mode"] == "thread_local"
    for step in setup.case.steps:
        made = WORLD.prepare(setup, step)
        q = made.inputs[0].q
        out = runner.replay(made.batch, {"q": q}).clone()
        backend.init_forward_metadata(made.batch)
        torch.testing.assert_close(out, backend.forward(q, None, None, layer, made.batch))


def test_a_step_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setitem(sys.modules, "torch_npu", Devices())
    step = GraphStep(prepare=fail, forward=fail)
    with pytest.raises(GraphUnsupported, match="cannot be captured: no such thing"):
        NPUGraphs(torch.device("cpu")).capture(step)
