"""How a checkpoint is to be run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.measured.launches import TunedLaunch
from attnmux.core.choosing.measured.measurement import Measurement
from attnmux.transformers.memory import MemoryBudget


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint. What is None is left to the checkpoint or to the solver."""

    max_batch_size: int
    """Requests at a time."""
    max_context_len: int
    """Tokens of one request, prompt and answer."""
    max_encoder_len: int | None = None
    """Encoder tokens of one request in an encoder-decoder model, beside its `max_context_len`; None
    takes the model's limit."""
    max_total_tokens: int | None = None
    """Tokens of all requests together, their encoders' included, for which the KV pool has room."""
    memory: MemoryBudget | None = None
    """What the KV pool may take. Of this and `max_total_tokens` one is needed; of both the smaller
    counts."""
    graph: bool | None = None
    """Whether decode steps are replayed from device graphs; None: where device, backend and model
    can."""
    dtype: str | None = None
    kv_dtype: str | None = None
    mla: Literal["absorbed", "expanded"] | None = None
    """How latent attention runs. Absorbed, the KV cache holds the latent; expanded, every head's
    K and V. None: absorbed where a backend serves it, unless only as a last resort (see
    `LAST_RESORT`) while expanded has a better one."""
    page_size: int | None = None
    device: str | None = None
    """torch's name, such as "cuda:1"; None takes the platform's current device."""
    policy: Policy = field(default_factory=Policy)
    measurements: tuple[Measurement, ...] = ()
    """Of this machine; those that hold for the model move the ranks that backends are chosen by."""
    launches: tuple[TunedLaunch, ...] = ()
    """As `BackendContext.launches`: everything that was tuned on this machine."""
    debug: bool = False
    """Check every batch's values, at the cost of synchronising."""
