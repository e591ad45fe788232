"""Continuous batching: requests come and go while every step runs those that are there."""

from __future__ import annotations

from attnmux.transformers.draft.model import ModelProposer
from attnmux.transformers.draft.proposers import NgramProposer, Proposer
from attnmux.transformers.engine.engine import PREFILL_TOKENS, Engine
from attnmux.transformers.engine.execution import StepRunner
from attnmux.transformers.engine.prefix import MemoryUse
from attnmux.transformers.engine.request import FinishReason, GenerationResult, OnText, TokenOutput
from attnmux.transformers.run.stats import PARTS, DraftStats, EngineStats, StepStats

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
