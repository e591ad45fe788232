"""Hugging Face models, unchanged, on any attention backend of attnmux.

The first use of a public name registers the attention implementation "attnmux" with transformers.
Importing this package alone imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.transformers.batching import StepBuilder as StepBuilder
    from attnmux.transformers.capacity import Capacity as Capacity
    from attnmux.transformers.checkpoint import Checkpoint as Checkpoint
    from attnmux.transformers.checkpoint import open_checkpoint as open_checkpoint
    from attnmux.transformers.eagle_files import hidden_layers as hidden_layers
    from attnmux.transformers.eagle_files import load_head as load_head
    from attnmux.transformers.engine import Engine as Engine
    from attnmux.transformers.engine import EngineStats as EngineStats
    from attnmux.transformers.engine import GenerationResult as GenerationResult
    from attnmux.transformers.engine import ModelProposer as ModelProposer
    from attnmux.transformers.engine import NgramProposer as NgramProposer
    from attnmux.transformers.engine import TokenOutput as TokenOutput
    from attnmux.transformers.generate import Generation as Generation
    from attnmux.transformers.generate import Prompt as Prompt
    from attnmux.transformers.generate import Timings as Timings
    from attnmux.transformers.generate import run_prompts as run_prompts
    from attnmux.transformers.implementation import IMPLEMENTATION as IMPLEMENTATION
    from attnmux.transformers.implementation import allow_generate_batch as allow_generate_batch
    from attnmux.transformers.layers import record_layers as record_layers
    from attnmux.transformers.load import load_head_runner as load_head_runner
    from attnmux.transformers.load import load_runner as load_runner
    from attnmux.transformers.memory_budget import MemoryBudget as MemoryBudget
    from attnmux.transformers.options import RunnerOptions as RunnerOptions
    from attnmux.transformers.requests import request_of as request_of
    from attnmux.transformers.runner import ModelRunner as ModelRunner
    from attnmux.transformers.sampling import Sampler as Sampler
    from attnmux.transformers.sampling_params import SamplingParams as SamplingParams
    from attnmux.transformers.sequence import SequenceState as SequenceState
    from attnmux.transformers.sequence import Step as Step
    from attnmux.transformers.served_model import ServedModel as ServedModel
    from attnmux.transformers.tokenization import encode_prompts as encode_prompts
    from attnmux.transformers.weights import load_model as load_model

_NAMES_BY_MODULE = {
    "implementation": ("IMPLEMENTATION", "allow_generate_batch"),
    "batching": ("StepBuilder",),
    "capacity": ("Capacity",),
    "checkpoint": ("Checkpoint", "open_checkpoint"),
    "weights": ("load_model",),
    "options": ("RunnerOptions",),
    "requests": ("request_of",),
    "eagle_files": ("hidden_layers", "load_head"),
    "engine": (
        "Engine",
        "EngineStats",
        "GenerationResult",
        "ModelProposer",
        "NgramProposer",
        "TokenOutput",
    ),
    "generate": ("Generation", "Prompt", "Timings", "run_prompts"),
    "layers": ("record_layers",),
    "load": ("load_head_runner", "load_runner"),
    "memory_budget": ("MemoryBudget",),
    "runner": ("ModelRunner",),
    "sampling": ("Sampler",),
    "served_model": ("ServedModel",),
    "sequence": ("SequenceState", "Step"),
    "tokenization": ("encode_prompts",),
    "sampling_params": ("SamplingParams",),
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    """Import the module of a public name on first use, and register the implementation."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.implementation")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
