"""The public names of attnmux. Importing this module imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.core.backend import AttentionBackend
    from attnmux.core.batch import ForwardBatch, ForwardMode, MultiItem
    from attnmux.core.call import AttentionCall
    from attnmux.core.choosing.ask.policy import Policy
    from attnmux.core.choosing.ask.request import Request
    from attnmux.core.choosing.find.devices import detect, pick_platform
    from attnmux.core.choosing.find.plugins import hookimpl, load_plugins
    from attnmux.core.choosing.machine.platform import Platform
    from attnmux.core.choosing.offer.card import BackendCard, Clause, Option, Prior
    from attnmux.core.choosing.solver import solve
    from attnmux.core.choosing.tell.decision import Decision
    from attnmux.core.compose import BatchSizeAttnBackend, HybridAttnBackend
    from attnmux.core.compose.building import build
    from attnmux.core.compose.fallback import make_first
    from attnmux.core.context import BackendContext
    from attnmux.core.layer import LayerSpec
    from attnmux.core.op import forward_context
    from attnmux.core.radix_attention import RadixAttention
    from attnmux.core.spec import SpecInput
    from attnmux.core.workspace import Workspace

_MODULES = {
    "AttentionBackend": "backend",
    "AttentionCall": "call",
    "BackendCard": "choosing.offer.card",
    "BackendContext": "context",
    "BatchSizeAttnBackend": "compose",
    "Clause": "choosing.offer.card",
    "Decision": "choosing.tell.decision",
    "ForwardBatch": "batch",
    "ForwardMode": "batch",
    "HybridAttnBackend": "compose",
    "LayerSpec": "layer",
    "MultiItem": "batch",
    "Option": "choosing.offer.card",
    "Platform": "choosing.machine.platform",
    "Policy": "choosing.ask.policy",
    "Prior": "choosing.offer.card",
    "RadixAttention": "radix_attention",
    "Request": "choosing.ask.request",
    "SpecInput": "spec",
    "Workspace": "workspace",
    "build": "compose.building",
    "detect": "choosing.find.devices",
    "forward_context": "op",
    "hookimpl": "choosing.find.plugins",
    "load_plugins": "choosing.find.plugins",
    "make_first": "compose.fallback",
    "pick_platform": "choosing.find.devices",
    "solve": "choosing.solver",
}

__all__ = [
    "AttentionBackend",
    "AttentionCall",
    "BackendCard",
    "BackendContext",
    "BatchSizeAttnBackend",
    "Clause",
    "Decision",
    "ForwardBatch",
    "ForwardMode",
    "HybridAttnBackend",
    "LayerSpec",
    "MultiItem",
    "Option",
    "Platform",
    "Policy",
    "Prior",
    "RadixAttention",
    "Request",
    "SpecInput",
    "Workspace",
    "build",
    "detect",
    "forward_context",
    "hookimpl",
    "load_plugins",
    "make_first",
    "pick_platform",
    "solve",
]


def __getattr__(name: str) -> object:
    """Import the module of a public name when it is first asked for."""
    if name in _MODULES:
        module = importlib.import_module(f"attnmux.core.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
