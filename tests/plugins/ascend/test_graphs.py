"""Steps of the pages' adapter in graphs, whose lengths are renewed before each replay, emulated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from attnmux.ascend.ascend import make
from attnmux.ascend.cards.ascend import ASCEND
from attnmux.ascend.graph_tasks import NPUGraphTasks
from attnmux.ascend.npu_graphs import NPUGraphs
from attnmux.ascend.npu_kernels import NPUKernels, load_kernels
from attnmux.core import (
    DeviceGraphs,
    ForwardBatch,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    ModelInput,
    Platform,
)
from attnmux.core.plugin import GraphStep
from attnmux.emulators.ascend import KERNELS
from attnmux.emulators.ascend.torch_npu import torch_npu
from attnmux.testing import AttentionBackendTests, decode, verify
from attnmux.testing.adapters.tests import LATENT, AdapterWorld, assert_passes

WORLD = AdapterWorld(
    library=make,
    kernels=KERNELS,
    platform=Platform.parse("ascend:910b"),
    host_lens=True,
    settings={"page_size": 128, "max_context_len": 256},
)
CANDIDATE = WORLD.candidate(ASCEND)


def kernels_of(library: ModuleType) -> NPUKernels:
    """What the adapter loads of an emulated torch-npu, with its own way to capture calls."""
    with patch.dict(sys.modules, torch_npu=library):
        return load_kernels()


TORCH_NPU = torch_npu()
IN_NPU_GRAPHS = replace(
    CANDIDATE,
    factory=replace(WORLD, kernels=kernels_of(TORCH_NPU)).backend,
    graphs=partial(DeviceGraphs.of, device_type="npu"),
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-npu, emulated."""
    monkeypatch.setitem(sys.modules, "torch_npu", TORCH_NPU)


@pytest.mark.usefixtures("installed")
class TestNPUGraphsEmulated(AttentionBackendTests):
    """Graphs of the class that the plugin names, over an emulated torch-npu. Recordings, which see
    reads of the host's lengths too, are the other suite's."""

    backend = IN_NPU_GRAPHS
    page_sizes = (128,)
    executions = ("graph",)


def test_a_replay_without_renewal_would_wait_for_ever(installed) -> None:
    class Forgetful(NPUGraphTasks):
        def renew(self, task: Any, new_ends: list[int], key_lens: list[int]) -> None:
            pass

    kernels = replace(kernels_of(TORCH_NPU), graph_tasks=Forgetful())
    candidate = replace(IN_NPU_GRAPHS, factory=replace(WORLD, kernels=kernels).backend)
    settings = {"max_context_len": 256, "page_size": 128, "graph": True}
    with pytest.raises(AssertionError, match="tasks that nothing renewed"):
        assert_passes(candidate, decode(5, 140, 30), **settings)


def test_graphs_of_an_npu_are_the_plugin_s(installed) -> None:
    assert type(DeviceGraphs.of(torch.device("cpu"), "npu")) is NPUGraphs


def test_without_torch_npu_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(GraphUnsupported, match="attnmux-ascend's graphs of 'npu' devices: Module"):
        DeviceGraphs.of(torch.device("cpu"), "npu")


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


def test_a_runner_on_npu_graphs(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It captures one batch and replays another with other lengths."""
    given: list[dict[str, Any]] = []
    captured = TORCH_NPU.npu.graph

    def noted(graph: object, **more: Any) -> Any:
        given.append(more)
        return captured(graph, **more)

    pool = 3, 7
    monkeypatch.setattr(TORCH_NPU.npu, "graph_pool_handle", lambda: pool)
    monkeypatch.setattr(TORCH_NPU.npu, "graph", noted)
    setup = WORLD.world(decode(5, 140), decode(60, 9), kv_in_pool=True, num_q_heads=8)
    backend = WORLD.backend(setup.context, kernels=kernels_of(TORCH_NPU))
    first = WORLD.prepare(setup, setup.case.steps[0])
    layer = first.inputs[0].layer

    def forward(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return backend.forward(inputs["q"], None, None, layer, batch)

    runner = GraphRunner(
        backend,
        forward,
        GraphConfig(batch_sizes=(4,), host_lens=True),
        devices=DeviceGraphs.of(torch.device("cpu"), "npu"),
        inputs={"q": ModelInput(dtype=torch.bfloat16, trailing=tuple(first.inputs[0].q.shape[1:]))},
        progress=iter,
    )
    runner.capture()
    (how,) = given
    assert how["pool"] is pool
    assert how["capture_error_mode"] == "thread_local"
    for step in setup.case.steps:
        made = WORLD.prepare(setup, step)
        q = made.inputs[0].q
        out = runner.replay(made.batch, {"q": q}).clone()
        backend.init_forward_metadata(made.batch)
        torch.testing.assert_close(out, backend.forward(q, None, None, layer, made.batch))


def test_a_step_that_cannot_be_captured(installed) -> None:
    def fail() -> None:
        raise RuntimeError("no such thing")

    step = GraphStep(prepare=fail, forward=fail)
    with pytest.raises(GraphUnsupported, match="cannot be captured: no such thing"):
        NPUGraphs(torch.device("cpu")).capture(step)
