"""Draft trees in one launch each: built and sampled as core's plain operations do."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import GraphStep
from attnmux.parts import AcceptedDrafts, AcceptThresholds, DraftTree, sample_tree_target_only
from attnmux.testing import RecordingGraphs

pytest.importorskip("triton")

from attnmux.triton.functions import trees  # where there is a Triton
from attnmux.triton.functions.trees import MOST_NODES, TritonTrees

WHOLE = 2**12
"""Probabilities are multiples of its inverse, whose sums float32 and float64 hold alike."""


def candidates(size: int, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, tokens and parents of candidates of any shape. Many scores are alike, and some
    candidates are impossible."""
    parents = torch.stack(
        [torch.randint(-1, max(i, 1), (size,)).clamp(max=i - 1) for i in range(num)], 1
    )
    steps = -torch.randint(0, 3, (size, num)).float()
    steps[torch.rand(size, num) < 0.05] = -torch.inf
    scores = torch.zeros(size, num)
    for one in range(num):
        above = scores.gather(1, parents[:, one : one + 1].clamp(min=0)).squeeze(1)
        scores[:, one] = steps[:, one] + torch.where(parents[:, one] < 0, 0.0, above)
    return scores, torch.randint(0, 4, (size, num)), parents


def a_tree(size: int, num: int) -> DraftTree:
    """Trees of any shape with few different tokens, so that siblings are often alike."""
    scores, tokens, parents = candidates(size, 2 * num)
    roots = torch.randint(0, 4, (size,))
    return DraftTree.best_of(roots, scores, tokens, parents, num, topk=3)


def distributions(rows: int, vocabulary: int) -> torch.Tensor:
    """[rows, vocabulary] float32, of which the first tokens have the most. Some are no numbers."""
    counts = torch.randint(0, WHOLE // 16, (rows, vocabulary))
    counts[:, 8:] = torch.randint(0, 2, (rows, max(vocabulary - 8, 0)))
    counts[:, -1] += WHOLE - counts.sum(1)
    counts = torch.where(counts[:, -1:] < 0, counts.clamp(min=0), counts)
    probs = counts.float() / WHOLE
    probs[torch.rand(rows) < 0.1] = torch.nan
    return probs


def check_built(found: DraftTree, expected: DraftTree) -> None:
    for name in ("draft_tokens", "links", "visible", "depths", "topk", "num_nodes"):
        ours, theirs = (torch.as_tensor(getattr(tree, name)) for tree in (found, expected))
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def check_accepted(found: AcceptedDrafts, expected: AcceptedDrafts) -> None:
    for name in ("accept_index", "predict", "accept_token_num"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def check_building(kernels: TritonTrees, size: int, num: int, nodes: int) -> None:
    given = (torch.randint(0, 9, (size,)), *candidates(size, num), nodes)
    check_built(kernels.build(*given, topk=3), DraftTree.best_of(*given, topk=3))


def check_sampling(kernels: TritonTrees, size: int, nodes: int, vocabulary: int) -> None:
    tree = a_tree(size, nodes)
    probs = distributions(size * nodes, vocabulary)
    coins = torch.rand(size, nodes, dtype=torch.float64)
    for limits in (None, AcceptThresholds(single=0.25), AcceptThresholds(acc=0.5)):
        given = (tree, probs, coins, limits)
        check_accepted(kernels.sample(*given), sample_tree_target_only(*given))


@pytest.mark.parametrize(
    ("size", "num", "nodes"), [(1, 1, 1), (2, 5, 6), (3, 80, 20), (2, 150, 65)]
)
def test_trees_of_any_shape_are_built(size: int, num: int, nodes: int) -> None:
    check_building(TritonTrees(), size, num, nodes)


@pytest.mark.parametrize(
    ("size", "nodes", "vocabulary"), [(1, 1, 4), (30, 3, 4), (8, 9, 40), (2, 6, 9000)]
)
def test_samples(size: int, nodes: int, vocabulary: int) -> None:
    check_sampling(TritonTrees(), size, nodes, vocabulary)


@pytest.mark.parametrize("padding", [0, 3])
def test_chains_and_padding(padding: int) -> None:
    kernels = TritonTrees()
    for tree in (DraftTree.chains(torch.randint(0, 2, (20, 4))), a_tree(20, 4)):
        padded = tree.padded(4 + padding)
        shape = padded.draft_tokens.shape
        given = (padded, distributions(shape.numel(), 4), torch.rand(shape).double())
        check_accepted(kernels.sample(*given), sample_tree_target_only(*given))


def test_tokens_outside_of_the_vocabulary_are_never_accepted() -> None:
    tree = DraftTree.of(torch.tensor([[0, -1, 9, 1]]), torch.tensor([[-1, 0, 0, 0]]), topk=3)
    given = (tree, torch.full((4, 2), 0.5), torch.tensor([[0.4, 0, 0, 0]]).double())
    found = TritonTrees().sample(*given)
    assert found.accept_index.tolist() == [[0, 3, -1, -1]]
    check_accepted(found, sample_tree_target_only(*given))


def test_a_graph_holds_both() -> None:
    """One launch each, which repeats with other values in the same memory."""
    kernels, size, nodes = TritonTrees(), 3, 6
    drafted, roots = candidates(size, 20), torch.randint(0, 4, (size,))
    probs = distributions(size * nodes, 4)
    coins = torch.rand(size, nodes, dtype=torch.float64)

    def run() -> list[torch.Tensor]:
        tree = kernels.build(roots, *drafted, nodes, topk=3)
        return [tree.parents, kernels.sample(tree, probs, coins).accept_index]

    step = GraphStep(prepare=lambda: None, forward=run, host_tensors=())
    graph = RecordingGraphs().capture(step)
    for old, new in zip(drafted, candidates(size, 20), strict=True):
        old.copy_(new)
    coins.uniform_()
    graph.replay()
    tree = DraftTree.best_of(roots, *drafted, nodes, topk=3)
    expected = [tree.parents, sample_tree_target_only(tree, probs, coins).accept_index]
    assert all(map(torch.equal, graph.outputs, expected))


@pytest.mark.parametrize("size", [0, 2])
def test_plain_operations_take_the_rest(size: int) -> None:
    """Batches without requests, and trees that are larger than a program."""
    nodes = MOST_NODES + 1 if size else 3
    check_building(TritonTrees(), size, nodes, nodes)
    check_sampling(TritonTrees(), size, nodes, 4)


def test_refusals_are_those_of_core() -> None:
    kernels, ids = TritonTrees(), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(InvalidInput, match="draft_token_num"):
        kernels.build(ids[:, 0], ids.float(), ids, ids - 1, 4, topk=2)
    tree = DraftTree.chains(ids)
    with pytest.raises(InvalidInput, match="coins"):
        kernels.sample(tree, torch.ones(2, 3), torch.zeros(1, 2))
    with pytest.raises(InvalidInput, match="probs"):
        kernels.sample(tree, torch.ones(1, 3), torch.zeros(1, 2).double())


def test_signatures() -> None:
    pairs = {"build": DraftTree.best_of, "sample": sample_tree_target_only}
    for name, plain in pairs.items():
        assert inspect.signature(getattr(TritonTrees(), name)) == inspect.signature(plain)


def building(kernels: TritonTrees) -> None:
    check_building(kernels, 4, 20, 9)


def sampling(kernels: TritonTrees) -> None:
    check_sampling(kernels, 60, 9, 4)


MUTANTS: dict[str, tuple[Callable[[TritonTrees], None], str, str]] = {
    "unmasked branch": (building, "seen = seen | is_at", "seen = node[:, None] >= node[None, :]"),
    "ties": (building, "(other[None, :] < one[:, None])", "(other[None, :] > one[:, None])"),
    "depth": (building, "depth += (at >= 0)", "depth += (at > 0)"),
    "grandparent": (sampling, "return tl.max(tl.where(sees", "return tl.min(tl.where(sees"),
    "twins": (sampling, "(tl.sum(twins.to(tl.int32), 1) == 0)", "True"),
    "no acc": (sampling, "tl.cumsum(chance, 0) / acc", "tl.cumsum(chance, 0)"),
    "no single": (sampling, "| (chance >= single)", ""),
    "no sum": (sampling, "tl.cumsum(chance, 0)", "chance"),
    "the same number": (sampling, "(number - low) / (1.0 - low)", "number"),
    "rejected": (sampling, "weight = tl.where(column == hidden, 0.0, weight)", "weight += 0"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.turns(9)
def test_a_wrong_kernel_is_found(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, right, wrong = MUTANTS[mutant]
    source = Path(trees.kernels.__file__).read_text()
    assert right in source
    file = tmp_path / f"mutant_{mutant.replace(' ', '_')}.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    check(TritonTrees())
    monkeypatch.setattr(trees, "kernels", module)
    with pytest.raises(AssertionError):
        repeated(check)


def repeated(check: Callable[[TritonTrees], None]) -> None:
    """A random batch may miss what is rare."""
    for _ in range(5):
        check(TritonTrees())
