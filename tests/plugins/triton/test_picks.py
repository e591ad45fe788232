"""The device's lookup of picks is core's: by refusal, and by result."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from attnmux.core import InvalidInput, Platform
from attnmux.core.plugin import topk_slots
from attnmux.emulators.nvidia.flash_mla_sparse import FlashMLA
from attnmux.nvidia.cards.nsa import NSA
from attnmux.nvidia.latent.flashmla_kernels import sparse_from_flash_mla
from attnmux.nvidia.latent.nsa import NSABackend
from attnmux.testing import AttentionBackendTests, Candidate

pytest.importorskip("triton")

from attnmux.triton.functions.picks import TopkSlots  # where there is a Triton


def sparse(context, options) -> NSABackend:
    kernels = replace(sparse_from_flash_mla(FlashMLA), topk_slots=TopkSlots())
    return NSABackend(context, options, kernels)


class TestSparseAttention(AttentionBackendTests):
    """A backend that looks its keys up so, eagerly and captured."""

    backend = Candidate(
        card=replace(NSA, requires=()),
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device="cpu",
        factory=sparse,
    )
    page_sizes = (64,)


def test_signature():
    assert inspect.signature(TopkSlots()) == inspect.signature(topk_slots)


@pytest.mark.parametrize("is_apart", [False, True])
def test_results(is_apart):
    """Places in any order, -1 among them."""
    slots = TopkSlots()
    for tokens, width, topk in ((1, 40, 5), (3, 700, 700), (7, 64, 512), (4, 64, 513)):
        table = torch.randint(0, 10_000, (9, width), dtype=torch.int32)
        rows = torch.randint(0, 9, (tokens,))
        picks = torch.randint(-1, width, (tokens, 2 * topk), dtype=torch.int32)
        picks = picks[:, ::2] if is_apart else picks[:, :topk]
        expected = topk_slots(table, rows, picks)
        assert torch.equal(slots(table, rows, picks), expected)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0)])
def test_nothing_to_look_up(shape):
    table, rows = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(shape[0], dtype=torch.int64)
    assert TopkSlots()(table, rows, torch.zeros(shape, dtype=torch.int32)).shape == shape


@pytest.mark.parametrize("picks", [torch.zeros(1, 4), torch.zeros(2, 4, dtype=torch.int32)])
def test_picks_that_are_refused(picks):
    table, rows = torch.zeros(3, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InvalidInput, match="topk_indices"):
        TopkSlots()(table, rows, picks)
