"""Graphs with collectives: what a recording repeats, and ranks that capture together or not at all.

The functions that `run_ranks` calls take their group and its device, so that they also run in
processes that torchrun started, over NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

from attnmux.core import (
    CapturingRanks,
    DeviceGraphs,
    GraphConfig,
    GraphRunner,
    GraphUnsupported,
    ModelInput,
)
from attnmux.core.plugin import GraphStep
from attnmux.distributed import RankGroup, RanksDiffer, capture_on_all_ranks, idle_batch
from attnmux.emulators.ranks import end_ranks, run_ranks
from attnmux.testing import (
    Case,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    fake_platform,
    make_setup,
    prepare_step,
)
from attnmux.testing.graphs.tape import GraphViolation

CASE = Case(name="ranks", steps=(decode(9, 4, 7),), dtype="float32", windows=(None,))
Forward = Callable[..., torch.Tensor]


def graphs_of(device: torch.device) -> DeviceGraphs:
    return RecordingGraphs() if device.type == "cpu" else DeviceGraphs.of(device)


def collectives(group: RankGroup, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """One of each; values: [size, 2]."""
    return {
        "sum": group.all_reduce(values + 0),
        "largest": group.all_reduce(values + 0, dist.ReduceOp.MAX),
        "heard": group.broadcast(values + 0, root=1),
        "gathered": group.all_gather(values) + 0,
        "parts": group.all_to_all(values) + 0,
        "sum of parts": group.reduce_scatter(values) + 0,
    }


def replays_collectives(group: RankGroup) -> None:
    values = torch.zeros((group.size, 2), device=group.device)
    graphs = graphs_of(group.device)
    step = GraphStep(prepare=lambda: None, forward=lambda: collectives(group, values))
    graphs.warm_up(step)
    with graphs.session():
        graph = graphs.capture(step)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(3):
        values.copy_(torch.randn((group.size, 2), generator=generator))
        graph.replay()
        expected = collectives(group, values)
        for name, result in graph.outputs.items():
            assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_are_replayed(tmp_path: Path, size: int) -> None:
    run_ranks(replays_collectives, size, tmp_path)


def captures_alone(group: RankGroup) -> None:
    """A capture runs no collective, so that it waits for no rank, and leaves finite numbers."""
    values, total = torch.ones((group.size, 3)), torch.zeros((group.size, 3))
    if group.rank == 0:
        step = GraphStep(
            prepare=lambda: None,
            forward=lambda: total.copy_(group.all_gather(values)[1] + group.all_reduce(values)),
        )
        graph = RecordingGraphs().capture(step)
        assert torch.equal(values, torch.ones_like(values))
        assert torch.equal(total, torch.ones_like(values))
        graph.replay()
    else:
        group.all_gather(5 * values)
        group.all_reduce(5 * values)
    if group.rank == 0:
        assert torch.equal(total, torch.full_like(values, 11))


def test_a_capture_waits_for_no_rank(tmp_path: Path) -> None:
    run_ranks(captures_alone, 2, tmp_path, seconds=20.0)


def refuses(group: RankGroup) -> None:
    def functional() -> torch.Tensor:
        return functional_all_reduce(torch.ones(2), "sum", group.devices)

    for forward, message in (
        (lambda: dist.barrier(group=group.devices), "c10d.barrier.default synchronises with the"),
        (functional, "_c10d_functional.all_reduce.default is an operation between ranks that no"),
        (lambda: group.exchange("text"), "forward: "),
    ):
        with pytest.raises(GraphViolation, match=message):
            RecordingGraphs().capture(GraphStep(prepare=lambda: None, forward=forward))


def test_a_recording_refuses_what_it_cannot_repeat(tmp_path: Path) -> None:
    run_ranks(refuses, 2, tmp_path)


class Broken(GraphFakeBackend):
    """Has no memory for its buffers."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise torch.OutOfMemoryError("no 2 GiB")


class Unplanned(GraphFakeBackend):
    """Cannot prepare a step of two requests."""

    def init_forward_metadata_out_graph(self, batch, in_capture: bool = False) -> None:
        if batch.batch_size == 2:
            raise RuntimeError("no plan\nfor two")
        super().init_forward_metadata_out_graph(batch, in_capture)


def maker(group: RankGroup, forward: Forward, *, backend=GraphFakeBackend, sizes=(1, 2, 4)):
    """How a rank makes its runner of `forward(group, batch, inputs)`."""
    setup = make_setup(CASE, fake_platform(), group.device)
    shown: list[list[int]] = []

    def make(ranks: CapturingRanks) -> GraphRunner:
        return GraphRunner(
            backend(setup.context),
            lambda batch, inputs: forward(group, batch, inputs),
            GraphConfig(batch_sizes=sizes),
            devices=graphs_of(group.device),
            inputs={"values": ModelInput(dtype=torch.float32)},
            progress=lambda sizes: (shown.append(list(sizes)), sizes)[1],
            ranks=ranks,
        )

    return make, shown, setup


def total(group: RankGroup, batch, inputs) -> torch.Tensor:
    return group.all_reduce(inputs["values"] * 2)


def synchronising(size: int) -> Forward:
    """A step that reads on the host between two collectives, in batches of `size` on rank 1."""

    def forward(group: RankGroup, batch, inputs) -> torch.Tensor:
        result = total(group, batch, inputs)
        if batch.batch_size == size and group.rank == 1:
            result.max().item()
        return group.all_reduce(result)

    return forward


def captures_together(group: RankGroup) -> None:
    make, shown, setup = maker(group, total)
    runner = capture_on_all_ranks(group, make)
    assert runner.batch_sizes == (1, 2, 4)
    assert shown == ([[4, 2, 1]] if group.rank == 0 else [])
    busy = prepare_step(setup, decode(9, 4, 7)).batch
    three = torch.tensor([1.0, 2.0, 3.0], device=group.device)
    for idle_rank in range(group.size):
        if group.rank == idle_rank:
            assert runner.replay(idle_batch(group.device), size=4).shape == (0,)
        else:  # the idle rank adds padding, which is 0
            out = runner.replay(busy, {"values": three}, size=4)
            assert out.tolist() == [2 * n * (group.size - 1) for n in (1, 2, 3)]
    out = runner.replay(busy, {"values": three}, size=4)
    assert out.tolist() == [2 * n * group.size for n in (1, 2, 3)]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_capture_together(tmp_path: Path, size: int) -> None:
    run_ranks(captures_together, size, tmp_path)


FAILURES = {
    "buffers": (Broken, total, "OutOfMemoryError: no 2 GiB"),
    "plan": (Unplanned, total, "RuntimeError: no plan"),
    "backend": (FakeBackend, total, "GraphUnsupported: FakeBackend cannot be captured"),
    "first": (GraphFakeBackend, synchronising(4), "GraphViolation: forward: Tensor.item"),
    "last": (GraphFakeBackend, synchronising(1), "GraphViolation: forward: Tensor.item"),
}


def one_fails(group: RankGroup) -> None:
    """Rank 1 fails in each place; every rank has the reason, and all can go on together."""
    for backend, forward, reason in FAILURES.values():
        make, _, _ = maker(group, forward, backend=backend if group.rank else GraphFakeBackend)
        with pytest.raises(GraphUnsupported) as info:
            capture_on_all_ranks(group, make)
        message = str(info.value)
        assert message.startswith("no graphs on any rank, since not all could capture them (rank 1")
        assert f"rank 1: {reason}" in message
        assert "rank 0" not in message
        cause = info.value.__cause__
        assert (cause is None) is (group.rank == 0)
        assert group.all_reduce(torch.ones(1, device=group.device)).item() == group.size

    def fails(ranks: CapturingRanks) -> GraphRunner:
        raise ValueError("no library")

    with pytest.raises(GraphUnsupported, match=r"\(rank 1: ValueError: no library\)"):
        capture_on_all_ranks(group, fails if group.rank == 1 else maker(group, total)[0])
    captures_together(group)


def test_a_rank_that_fails_leaves_no_graphs_on_any(tmp_path: Path) -> None:
    run_ranks(one_fails, 2, tmp_path)


def all_fail(group: RankGroup) -> None:
    make, _, _ = maker(group, total, backend=Broken if group.rank else Unplanned)
    reasons = "rank 1: OutOfMemoryError: no 2 GiB; rank 2: OutOfMemoryError: no 2 GiB"
    with pytest.raises(GraphUnsupported, match=reasons):
        capture_on_all_ranks(group, make)
    captures_together(group)


def test_several_ranks_fail(tmp_path: Path) -> None:
    run_ranks(all_fail, 3, tmp_path)


def differs(group: RankGroup) -> None:
    make, _, _ = maker(group, total, sizes=(1, 2) if group.rank else (1, 2, 4))
    with pytest.raises(RanksDiffer, match=r"(?s)graphs: expected .*rank 0: .*\(1, 2, 4\).*rank 1:"):
        capture_on_all_ranks(group, make)
    captures_together(group)


def test_ranks_that_capture_other_sizes_are_refused(tmp_path: Path) -> None:
    run_ranks(differs, 2, tmp_path)


def fails_in_a_warm_up(group: RankGroup) -> None:
    def forward(group: RankGroup, batch, inputs) -> torch.Tensor:
        if group.rank == 1:
            raise RuntimeError("no kernel")
        return total(group, batch, inputs)

    capture_on_all_ranks(group, maker(group, forward)[0])


def test_a_rank_that_fails_amid_a_warm_up_is_an_error_on_the_others(tmp_path: Path) -> None:
    """They wait for it in a collective, as in an eager step."""
    first, second = end_ranks(fails_in_a_warm_up, 2, tmp_path, seconds=2.0)
    assert "RankFailed: reducing: another rank ended or did not arrive within 2 s" in first.error
    assert "RuntimeError: no kernel" in second.error
