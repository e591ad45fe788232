"""Recurrent and convolutional layers in plain torch operations."""

from __future__ import annotations

from attnmux.cpu.torch_linear.backend import TorchLinearBackend

__all__ = ["TorchLinearBackend"]
