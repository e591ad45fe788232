"""How a checkpoint is run: what its user asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from attnmux.core import AttentionBackend, Decision, Measurement, Policy, TunedLaunch
from attnmux.transformers.memory_budget import MemoryBudget
from attnmux.transformers.pools import WINDOW_STEP_TOKENS
from attnmux.transformers.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint. What is None is left to the checkpoint or to the solver."""

    max_batch_size: int
    """Requests at a time."""
    max_context_len: int
    """Tokens of one request, prompt and answer."""
    max_encoder_len: int | None = None
    """Encoder tokens of one request in an encoder-decoder model, beside its `max_context_len`; None
    takes the model's limit, or `max_context_len` where it has none."""
    max_total_tokens: int | None = None
    """Tokens of all requests together, their encoders' included, for which the KV pool has room."""
    spare_pages: int = 0
    """Pages of the KV pool beside those of `max_total_tokens`. The branches of a draft model take
    topk * (steps - 1) for each request, see `ModelProposer`."""
    kept_states: int | None = None
    """Prefixes whose linear layers' states are kept, so that later prompts can begin with them;
    None: as many as `max_batch_size`. Each takes the memory of a request's states, without those of
    drafts."""
    memory: MemoryBudget | None = None
    """What the KV pool may take, with the bounds and copies of chosen pages. Of this and
    `max_total_tokens` one is needed; of both the smaller counts."""
    window_step_tokens: int | None = WINDOW_STEP_TOKENS
    """Layers with windows or chunks get a KV pool of their own where that saves memory, with room
    for a prompt's step of at least so many tokens. None for callers that do not use the engine,
    which frees the tokens that fell out of the windows."""
    images: bool = False
    """Whether prompts may hold images. The vision tower then runs on the backend of the phase
    "encoder"; without them a model that reads images runs text alone, and needs none."""
    draft_tokens: int | None = None
    """Nodes of a request's draft tree, the root included; None without speculative decoding. Linear
    layers keep a request's states after each of them, which takes so many times the memory of its
    own; their drafts are chains."""
    draft_topk: int = 1
    """Branches of a draft tree; 1 for chains."""
    speculative_attention_mode: Literal["prefill", "decode"] | None = None
    """Whether the backend for prefill or that for decode verifies drafts and, in a draft model,
    reads what was accepted; None: that for prefill. Needs `draft_tokens`."""
    hidden_states: bool = False
    """Whether to keep the last hidden state of every cached token, which an EAGLE head reads."""
    hidden_layers: tuple[int, ...] = ()
    """Numbers of the layers whose outputs `hidden_states` keeps instead, one after another: those
    that `hidden_layers` finds for an EAGLE 3 head."""
    sparse: str | None = None
    """"quest": decode steps read the pages of each request whose keys may score highest; see
    `Request.sparse`. Pages have `SPARSE_PAGE_SIZE` tokens where `page_size` says nothing else."""
    sparse_budget: int | None = None
    """Tokens of each request that such a step reads, in whole pages."""
    graph: bool | None = None
    """Whether decode steps are replayed from device graphs; None: where device, backend and model
    can."""
    compile: bool = False
    """Whether the model's layers are compiled with torch.compile, which takes up to a minute at the
    first start. Where they cannot be, they run as they are, with a warning."""
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
    ranks: Ranks = ONE_RANK
    """The ranks that run the model together."""
    debug: bool = False
    """Check every batch's values, at the cost of synchronising."""
    check: Callable[[Decision], None] | None = None
    """Called with each decision before its backend is made, such as `attnmux.testing.FirstUse`;
    BackendFailed takes the next candidate."""
    wrap: Callable[[AttentionBackend, Decision], AttentionBackend] | None = None
    """Called with the backend that was made; the runner uses what it returns, such as a canary."""
