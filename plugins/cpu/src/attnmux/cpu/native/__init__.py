"""Attention in C++ that is compiled on this machine for its CPU. The card's factory is here."""

from __future__ import annotations

from attnmux.cpu.native.backend import NativeBackend as NativeBackend

__all__ = ["NativeBackend"]
