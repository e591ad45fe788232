"""Hugging Face models, unchanged, on any attention backend of attnmux.

Importing this package registers the attention implementation "attnmux" with transformers.
"""

from attnmux.transformers.attention import IMPLEMENTATION
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.checkpoint import Checkpoint, load_model, open_checkpoint
from attnmux.transformers.decision import RunnerOptions, request_of
from attnmux.transformers.engine import Engine, EngineStats, GenerationResult, TokenOutput
from attnmux.transformers.generate import Generation, Prompt, Timings, run_prompts
from attnmux.transformers.layers import record_layers
from attnmux.transformers.load import load_runner
from attnmux.transformers.pools import MemoryBudget
from attnmux.transformers.runner import ModelRunner
from attnmux.transformers.sampling import Sampler, SamplingParams
from attnmux.transformers.sequence import SequenceState, Step
from attnmux.transformers.tokenization import encode_prompts

__all__ = [
    "IMPLEMENTATION",
    "Checkpoint",
    "Engine",
    "EngineStats",
    "Generation",
    "GenerationResult",
    "MemoryBudget",
    "ModelRunner",
    "Prompt",
    "RunnerOptions",
    "Sampler",
    "SamplingParams",
    "SequenceState",
    "Step",
    "StepBuilder",
    "Timings",
    "TokenOutput",
    "encode_prompts",
    "load_model",
    "load_runner",
    "open_checkpoint",
    "record_layers",
    "request_of",
    "run_prompts",
]
