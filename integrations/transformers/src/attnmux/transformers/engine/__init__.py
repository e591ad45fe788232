"""Continuous batching: requests come and go while every step runs those that are there."""

from __future__ import annotations

from attnmux.transformers.engine.draft_model import ModelProposer
from attnmux.transformers.engine.engine import PREFILL_TOKENS, Engine
from attnmux.transformers.engine.execution import StepRunner
from attnmux.transformers.engine.prefix import MemoryUse
from attnmux.transformers.engine.proposers import NgramProposer, Proposer
from attnmux.transformers.engine.request import FinishReason, GenerationResult, OnText, TokenOutput
from attnmux.transformers.engine.stats import PARTS, DraftStats, EngineStats, StepStats

__all__ = [
    "PARTS",
    "PREFILL_TOKENS",
    "DraftStats",
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerationResult",
    "MemoryUse",
    "ModelProposer",
    "NgramProposer",
    "OnText",
    "Proposer",
    "StepRunner",
    "StepStats",
    "TokenOutput",
]
