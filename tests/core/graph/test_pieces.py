"""Steps over prompts in pieces: what is captured, what attention sees, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import (
    DeviceGraphs,
    ForwardBatch,
    ForwardContext,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
    PieceRunner,
)
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

CASE = Case(
    name="pieces", steps=(extend((30, 10), (20, 9)),), dtype="float32", page_size=4, windows=(None,)
)
Model = Callable[[ForwardBatch, Mapping[str, torch.Tensor], torch.Tensor], Any]


@pytest.fixture
def setup() -> Any:
    return make_setup(CASE, fake_platform(), "cpu")


def model(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor) -> Any:
    """Two layers, each with an attention call. Padded rows must not reach the others."""
    backend, ids = ForwardContext.current().backend, inputs["input_ids"]
    layer = backend.context.layers[0]
    rows = (ids.unsqueeze(1) * 64 + batch.positions.unsqueeze(1) + torch.arange(8 * 128)).sin()
    for _ in range(2):
        q = rows.view(-1, 8, 128)
        out = backend.forward(q, q[:, :2].cos(), q[:, 2:4].sin(), layer, batch)
        rows = (rows + out.flatten(1)).cos()
    return {"rows": rows[keep], "nothing": None}


def runner_of(setup: Any, *, forward: Model = model, **changes: Any) -> PieceRunner:
    settings = {"sizes": (4, 8, 16), "max_rows": 3, "devices": RecordingGraphs(), **changes}
    backend = settings.pop("backend", None) or FakeBackend(setup.context)
    return PieceRunner(backend, forward, **settings)


def step_of(setup: Any, *requests: tuple[int, int], **fields: Any) -> tuple[Any, ...]:
    """A prepared batch, its tokens, and the last one of each request."""
    batch = prepare_step(setup, extend(*requests, **fields)).batch
    ids = torch.arange(batch.num_tokens) % 7 + 1
    keep = torch.tensor([new for _, new in requests]).cumsum(0) - 1
    return batch, ids, keep


def test_results_are_those_of_eager_steps(setup: Any) -> None:
    """Steps of other sizes after each other: what is left of one must not reach the next."""
    backend = FakeBackend(setup.context)
    runner = runner_of(setup, backend=backend)
    runner.capture()
    assert [*runner.memory_bytes] == [4, 8, 16]
    for requests in (((0, 16),), ((5, 3),), ((9, 2), (0, 7), (3, 1)), ((1, 1),), ((0, 8),)):
        for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            batch, ids, keep = step_of(setup, *requests, mode=mode)
            backend.init_forward_metadata(batch)
            ours = runner.replay(batch, ids, keep)
            with ForwardContext.enter(backend, batch):
                theirs = model(batch, {"input_ids": ids}, keep)
            torch.testing.assert_close(ours["rows"], theirs["rows"])
            assert ours["nothing"] is None


def test_attention_gets_the_tokens_of_the_step_alone(setup: Any) -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(FakeBackend):
        def forward_extend(self, call: Any, batch: ForwardBatch) -> torch.Tensor:
            seen.append((call.q.shape[0], call.k.shape[0], call.out.shape[0], batch.num_tokens))
            return super().forward_extend(call, batch)

    backend = Watched(setup.context)
    runner = runner_of(setup, backend=backend)
    runner.capture()
    assert not seen
    batch, ids, keep = step_of(setup, (5, 3), (2, 2))
    backend.init_forward_metadata(batch)
    runner.replay(batch, ids, keep)
    assert seen == [(5, 5, 5, 5)] * 2


def test_the_largest_size_is_captured_first(setup: Any) -> None:
    counts: list[int] = []

    def noted(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor) -> Any:
        counts.append(batch.num_tokens)
        return model(batch, inputs, keep)

    runner = runner_of(setup, forward=noted)
    runner.capture(4)
    runner.capture(4)
    assert counts == [16] * 3 + [4] * 3
    assert [runner.is_captured(size) for size in runner.sizes] == [True, False, True]
    with pytest.raises(InvalidInput, match="size: expected one of"):
        runner.capture(5)


def test_steps_that_no_size_serves(setup: Any) -> None:
    runner = runner_of(setup)
    batch, ids, keep = step_of(setup, (5, 3), (2, 2))
    assert runner.size_for(batch, 2) == 8
    assert runner.size_for(batch, 4) is None  # of 3 requests at most
    with pytest.raises(InvalidInput, match="5 tokens"):  # nothing is captured
        runner.replay(batch, ids, keep)
    assert runner.size_for(step_of(setup, (0, 17))[0], 1) is None
    assert runner.size_for(replace(batch, encoder_lens=batch.seq_lens), 2) is None
    assert runner.size_for(prepare_step(setup, decode(5, 9)).batch, 2) is None
    assert runner.size_for(prepare_step(setup, verify(3, 9)).batch, 1) is None


def test_a_model_that_cannot_be_cut(setup: Any) -> None:
    def reads(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor) -> Any:
        result = model(batch, inputs, keep)
        return result["rows"] * int(inputs["input_ids"].sum())

    def joins(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor) -> Any:
        backend = ForwardContext.current().backend
        q = inputs["input_ids"].view(-1, 1, 1).expand(-1, 8, 128).float()
        lse = q.new_empty(q.shape[:2])
        layer = backend.context.layers[0]
        return backend.forward(q, q[:, :2], q[:, :2], layer, batch, lse=lse)

    for forward, reason in ((reads, "synchronises"), (joins, "depends on the LSE")):
        runner = runner_of(setup, forward=forward)
        with pytest.raises(GraphUnsupported, match=reason):
            runner.capture()
        assert not runner.memory_bytes


@pytest.mark.parametrize("sizes", [(), (0, 4), (8, 4), (4, 4)])
def test_sizes_ascend(setup: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="sizes: expected ascending"):
        runner_of(setup, sizes=sizes)


def test_a_context_in_debug_mode_is_refused(setup: Any) -> None:
    context = replace(setup.context, debug=True)
    with pytest.raises(GraphUnsupported, match="debug mode"):
        runner_of(setup, backend=GraphFakeBackend(context))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pieces_of_cuda_graphs() -> None:
    """Memory that pieces share holds what the next one reads, at every size."""
    device = torch.device("cuda")
    on_device = make_setup(CASE, fake_platform(), device)
    backend = FakeBackend(on_device.context)

    def on_cuda(batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor) -> Any:
        with torch.device(device):
            return model(batch, inputs, keep)

    runner = runner_of(on_device, backend=backend, forward=on_cuda, devices=DeviceGraphs.of(device))
    runner.capture()
    for requests in (((0, 16),), ((5, 3),), ((9, 2), (0, 7), (3, 1)), ((1, 1),), ((0, 8),)) * 2:
        batch, ids, keep = step_of(on_device, *requests)
        ids, keep = ids.to(device), keep.to(device)
        backend.init_forward_metadata(batch)
        ours = runner.replay(batch, ids, keep)["rows"].clone()
        with ForwardContext.enter(backend, batch):
            theirs = on_cuda(batch, {"input_ids": ids}, keep)["rows"]
        torch.testing.assert_close(ours, theirs)
    failing = runner_of(
        on_device,
        backend=backend,
        forward=lambda batch, inputs, keep: on_cuda(batch, inputs, keep)["rows"] * int(keep.sum()),
        devices=DeviceGraphs.of(device),
    )
    with pytest.raises(GraphUnsupported, match="the step cannot be captured"):
        failing.capture()
    assert torch.rand(3, device=device).isfinite().all()
