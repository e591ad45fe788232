"""The recording graph: a replay repeats what was captured, and what no graph can hold fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnmux.core.plugin import CapturedGraph, GraphStep
from attnmux.testing import RecordingGraphs
from attnmux.testing.graphs.tape import GraphViolation

PREPARE, FORWARD = "init_forward_metadata_in_graph", "forward"


@pytest.fixture(params=[False, True], ids=["no_grad", "inference_mode"], autouse=True)
def _mode(request: pytest.FixtureRequest):
    """Composite operations come whole in inference mode, and in parts without."""
    with torch.inference_mode(request.param), torch.no_grad():
        yield


def capture(
    forward: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    host_tensors: tuple[torch.Tensor, ...] = (),
) -> CapturedGraph:
    step = GraphStep(prepare=prepare, forward=forward, host_tensors=host_tensors)
    return RecordingGraphs().capture(step)


def test_a_replay_computes_from_what_the_buffers_hold_now() -> None:
    lens, ends = torch.tensor([3, 1, 2]), torch.zeros(3, dtype=torch.int64)
    weight = torch.randn(3, 5)

    def forward() -> dict[str, torch.Tensor]:
        scratch = torch.zeros(3, 4)
        scratch[:, 1:3] += ends[:, None]
        scratch.t()[0].fill_(7)
        picked = torch.index_select(weight, 1, ends % 5)
        return {
            "sums": scratch.reshape(-1).view(4, 3).sum(0),
            "linear": torch.nn.functional.linear(picked, picked.softmax(-1)),
            "view": ends[1:],
        }

    graph = capture(forward, lambda: torch.cumsum(lens, 0, out=ends))
    outputs = graph.outputs
    addresses = {name: tensor.data_ptr() for name, tensor in outputs.items()}
    for values in ([5, 0, 4], [1, 1, 1]):
        lens.copy_(torch.tensor(values))
        graph.replay()
        replayed = {name: tensor.clone() for name, tensor in outputs.items()}
        torch.cumsum(lens, 0, out=ends)
        expected = forward()
        assert all(torch.equal(replayed[name], expected[name]) for name in expected)
    assert {name: tensor.data_ptr() for name, tensor in outputs.items()} == addresses
    assert graph.nbytes > 0


def test_numbers_of_the_host_stay_what_they_were() -> None:
    values, scale = torch.ones(2), [2.0]
    graph = capture(lambda: values * scale[0])
    scale[0] = 3.0
    values.fill_(10)
    graph.replay()
    assert graph.outputs.tolist() == [20, 20]


def test_what_is_computed_from_host_tensors_stays_what_it_was() -> None:
    values, mirror = torch.ones(2), torch.tensor([4, 6])
    graph = capture(lambda: values * mirror.max(), host_tensors=(mirror,))
    mirror.fill_(100)
    graph.replay()
    assert graph.outputs.tolist() == [6, 6]


def test_uninitialised_memory_is_nan_in_each_replay() -> None:
    values = torch.ones(2)

    def forward() -> torch.Tensor:
        scratch = torch.empty(2)
        result = scratch + values
        scratch.fill_(0)
        return result

    graph = capture(forward)
    graph.replay()
    assert bool(graph.outputs.isnan().all())


def test_random_numbers_are_drawn_anew() -> None:
    graph = capture(lambda: torch.rand(100))
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(graph.outputs, first)


def test_a_custom_operation_is_repeated_whole() -> None:
    calls = []

    @torch.library.custom_op("attnmux_tests::double", mutates_args=("out",))
    def double(values: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(values.tolist())
        out.copy_(values * 2)

    values, out = torch.ones(2), torch.zeros(2)
    graph = capture(lambda: double(values, out))
    values.fill_(5)
    graph.replay()
    assert calls == [[1, 1], [5, 5]]
    assert out.tolist() == [10, 10]


VALUES = torch.tensor([1.0, 0.0, 2.0])
MASK = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: VALUES.sum().item(), "Tensor.item synchronises"),
        (lambda: VALUES.cpu(), "Tensor.cpu synchronises"),
        (lambda: VALUES.tolist(), "Tensor.tolist synchronises"),
        (lambda: VALUES.numpy(), "Tensor.numpy synchronises"),
        (lambda: int(VALUES[0]), "Tensor.__int__ synchronises"),
        (lambda: range(5)[VALUES.long()[0]], "Tensor.__index__ synchronises"),
        (lambda: bool((VALUES > 0).all()), "Tensor.__bool__ synchronises"),
        (lambda: torch.equal(VALUES, VALUES), "aten.equal.default synchronises"),
        (lambda: VALUES.nonzero(), "aten.nonzero.default has a shape that depends on values"),
        (lambda: VALUES[MASK], "aten.index.Tensor has a shape that depends on values"),
        (lambda: torch.zeros(3).index_put_((MASK,), VALUES[:2]), "aten.index_put"),
        (lambda: VALUES.masked_select(MASK), "aten.masked_select.default has a shape"),
        (lambda: VALUES.long().unique(), "aten._unique2.default has a shape"),
        (lambda: VALUES.repeat_interleave(MASK.long()), "aten.repeat_interleave.Tensor has a"),
        (lambda: torch.tensor([1.0, 2.0]) + 1, "aten.lift_fresh.default copies from the host"),
    ],
)
def test_refuses_what_no_graph_can_hold(call: Callable[[], object], says: str) -> None:
    with pytest.raises(GraphViolation) as refused:
        capture(call)
    assert str(refused.value).startswith(f"{FORWARD}: {says}")
    with pytest.raises(GraphViolation) as refused:
        capture(lambda: VALUES + 1, call)
    assert str(refused.value).startswith(f"{PREPARE}: {says}")


def test_static_shapes_by_length_and_scalars_are_allowed() -> None:
    lens = torch.tensor([2, 1])
    graph = capture(lambda: VALUES[:2].repeat_interleave(lens, output_size=3) * torch.tensor(2.0))
    lens.copy_(torch.tensor([0, 3]))
    graph.replay()
    assert graph.outputs.tolist() == [0, 0, 0]


def test_refuses_a_host_tensor_on_the_device() -> None:
    mirror = torch.tensor([4, 6, 1])
    with pytest.raises(GraphViolation, match="reads a tensor of the host"):
        capture(lambda: VALUES + mirror, host_tensors=(mirror,))


def test_refuses_what_preparation_allocates_and_keeps() -> None:
    kept = []
    with pytest.raises(
        GraphViolation, match=rf"{PREPARE}: aten.add.Tensor allocates 12 bytes that are kept"
    ):
        capture(lambda: VALUES, lambda: kept.append((VALUES + 1)[:1]))


def test_temporaries_of_preparation_are_the_graphs() -> None:
    out, values = torch.zeros(3), torch.ones(3)
    graph = capture(lambda: out + 0, lambda: out.copy_(values * 2 + 1))
    values.fill_(4)
    graph.replay()
    assert graph.outputs.tolist() == [9, 9, 9]


@pytest.mark.parametrize("how", ["replaced", "resized", "replaced by way of data"])
def test_refuses_to_replay_from_memory_that_moved(how: str) -> None:
    held = [torch.ones(3)]
    graph = capture(lambda: held[0][:2] * 2)
    graph.replay()
    if how == "replaced":
        held[0] = torch.ones(3)
    elif how == "resized":
        held[0].resize_(5000)
    else:
        held[0].data = torch.ones(3)
    with pytest.raises(GraphViolation, match="memory has been freed or moved since"):
        graph.replay()


def test_refuses_an_output_that_no_operation_made() -> None:
    hidden = torch.frombuffer(bytearray(12), dtype=torch.float32)
    with pytest.raises(GraphViolation, match="made by no recorded torch operation"):
        capture(lambda: hidden)


def test_compiled_functions_run_eagerly_while_captured() -> None:
    compiled = torch.compile(lambda values: values * 2 + 1, backend="aot_eager")
    values = torch.ones(3)
    compiled(values)
    graph = capture(lambda: compiled(values))
    values.fill_(2)
    graph.replay()
    assert graph.outputs.tolist() == [5, 5, 5]
