"""Scratch memory that backends share."""

from __future__ import annotations

import itertools

import torch

from attnmux.core import Workspace


def test_a_buffer_is_kept_until_a_larger_one_is_asked_for() -> None:
    workspace = Workspace(torch.device("cpu"))
    first = workspace.get("splits", 100)
    assert first.dtype == torch.uint8
    assert workspace.get("splits", 60).data_ptr() == first.data_ptr()
    grown = workspace.get("splits", 300)
    assert grown.numel() >= 300
    assert workspace.get("splits", 100).data_ptr() == grown.data_ptr()


def test_names_are_apart() -> None:
    workspace = Workspace(torch.device("cpu"))
    workspace.get("a", 64).fill_(1)
    workspace.get("b", 32).fill_(2)
    assert bool((workspace.get("a", 64) == 1).all())
    assert workspace.nbytes == 96


def test_zeroed_memory_is_zero_when_made_and_when_grown() -> None:
    workspace = Workspace(torch.device("cpu"))
    workspace.get("locks", 16, zeroed=True).fill_(3)
    assert bool((workspace.get("locks", 16, zeroed=True) == 3).all())
    assert not workspace.get("locks", 4096, zeroed=True).any()


def test_tensors_of_a_name_share_its_memory() -> None:
    workspace = Workspace(torch.device("cpu"))
    floats = workspace.tensor("partial", (3, 5), torch.float32)
    assert floats.shape == (3, 5)
    floats.fill_(1.5)
    again = workspace.tensor("partial", (15,), torch.float32)
    assert bool((again == 1.5).all())
    assert workspace.tensor("partial", (0, 4), torch.bfloat16).shape == (0, 4)
    assert workspace.nbytes == 60


def test_a_tensor_of_an_earlier_shape_is_not_taken_for_the_next() -> None:
    workspace = Workspace(torch.device("cpu"))
    small = workspace.tensor("logits", (2, 3), torch.float32)
    assert workspace.tensor("logits", (2, 3), torch.float32).data_ptr() == small.data_ptr()
    assert workspace.tensor("logits", (3, 2), torch.float32).shape == (3, 2)
    assert workspace.tensor("logits", (2, 3), torch.int32).dtype == torch.int32
    workspace.get("logits", 4096)
    again = workspace.tensor("logits", (2, 3), torch.float32)
    assert again.data_ptr() == workspace.get("logits", 1).data_ptr() != small.data_ptr()


def test_a_context_that_grows_token_by_token_allocates_seldom() -> None:
    workspace = Workspace(torch.device("cpu"))
    addresses = [
        workspace.tensor("keys", (length, 1024), torch.float32).untyped_storage().data_ptr()
        for length in range(100, 400)
    ]
    assert sum(a != b for a, b in itertools.pairwise(addresses)) < 10
    assert workspace.nbytes <= 1.25 * 399 * 4096


def test_memory_of_inference_mode_may_be_written_outside_of_it() -> None:
    workspace = Workspace(torch.device("cpu"))
    with torch.inference_mode():
        workspace.tensor("out", (4,), torch.float32).fill_(1)
    workspace.tensor("out", (4,), torch.float32).fill_(2)
