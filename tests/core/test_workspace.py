"""Scratch memory that backends share."""

from __future__ import annotations

import torch

from attnmux.core.workspace import Workspace


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
