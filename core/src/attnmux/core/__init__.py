"""The public names of attnmux. Importing this module imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.core.backend import AttentionBackend as AttentionBackend
    from attnmux.core.batch import ForwardBatch as ForwardBatch
    from attnmux.core.batch import ForwardMode as ForwardMode
    from attnmux.core.batch import MultiItem as MultiItem
    from attnmux.core.building import build as build
    from attnmux.core.building import make_first as make_first
    from attnmux.core.call import AttentionCall as AttentionCall
    from attnmux.core.choosing.ask.policy import Policy as Policy
    from attnmux.core.choosing.ask.request import Request as Request
    from attnmux.core.choosing.find.devices import detect as detect
    from attnmux.core.choosing.find.devices import pick_platform as pick_platform
    from attnmux.core.choosing.find.plugins import hookimpl as hookimpl
    from attnmux.core.choosing.find.plugins import load_plugins as load_plugins
    from attnmux.core.choosing.machine.platform import Platform as Platform
    from attnmux.core.choosing.offer.card import BackendCard as BackendCard
    from attnmux.core.choosing.offer.card import Clause as Clause
    from attnmux.core.choosing.offer.card import Option as Option
    from attnmux.core.choosing.offer.card import Prior as Prior
    from attnmux.core.choosing.solver import solve as solve
    from attnmux.core.choosing.tell.decision import Decision as Decision
    from attnmux.core.composites import BatchSizeAttnBackend as BatchSizeAttnBackend
    from attnmux.core.composites import HybridAttnBackend as HybridAttnBackend
    from attnmux.core.context import BackendContext as BackendContext
    from attnmux.core.layer import LayerSpec as LayerSpec
    from attnmux.core.op import forward_context as forward_context
    from attnmux.core.radix_attention import RadixAttention as RadixAttention
    from attnmux.core.spec import SpecInput as SpecInput
    from attnmux.core.workspace import Workspace as Workspace

_MODULES = {
    "AttentionBackend": "backend",
    "AttentionCall": "call",
    "BackendCard": "choosing.offer.card",
    "BackendContext": "context",
    "BatchSizeAttnBackend": "composites",
    "Clause": "choosing.offer.card",
    "Decision": "choosing.tell.decision",
    "ForwardBatch": "batch",
    "ForwardMode": "batch",
    "HybridAttnBackend": "composites",
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
    "build": "building",
    "detect": "choosing.find.devices",
    "forward_context": "op",
    "hookimpl": "choosing.find.plugins",
    "load_plugins": "choosing.find.plugins",
    "make_first": "building",
    "pick_platform": "choosing.find.devices",
    "solve": "choosing.solver",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import the module of a public name when it is first asked for."""
    if name in _MODULES:
        module = importlib.import_module(f"attnmux.core.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
