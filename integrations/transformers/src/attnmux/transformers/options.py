"""A user's options for running a checkpoint."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    Decision,
    GraphConfig,
    InvalidInput,
    Measurement,
    Platform,
    Policy,
    TunedLaunch,
)
from attnmux.transformers.ranks import ONE_RANK, Ranks
from attnmux.transformers.requests.memory_budget import MemoryBudget
from attnmux.transformers.requests.pools import WINDOW_STEP_TOKENS

PIECE_SIZES = (
    *range(16, 65, 16),
    *range(80, 129, 16),
    *range(160, 257, 32),
    *range(320, 513, 64),
    *range(640, 1025, 128),
    *range(1280, 2049, 256),
)
"""Numbers of tokens for prompts in pieces, of which no step pads more than a quarter above 64."""


def usual_pieces(most: int) -> tuple[int, ...]:
    """The usual numbers of tokens for steps of at most so many."""
    fitting = bisect_left(PIECE_SIZES, most)
    return PIECE_SIZES[: fitting + 1]


LEAST: Mapping[int, Sequence[str]] = MappingProxyType(
    {
        0: ("spare_pages", "kept_states"),
        1: (
            *("max_batch_size", "max_context_len", "max_encoder_len", "max_total_tokens"),
            *("window_step_tokens", "page_size", "sparse_budget", "draft_topk"),
        ),
        2: ("draft_tokens",),
    }
)
"""The least value of each option that counts something, if it is not None."""

REQUIRED = frozenset({"max_batch_size", "max_context_len", "spare_pages", "draft_topk"})
"""Options in `LEAST` that are never None."""

NONE = type(None)
KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("dtype", "kv_dtype", "kv_dtype_skip", "device"), (str, NONE)),
        "memory": (MemoryBudget, NONE),
        "policy": (Policy,),
    }
)
"""The types of options that are often given as something else."""

EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("dtype", "kv_dtype"), '"bfloat16"'),
        "kv_dtype_skip": '"0-1,sliding_window"',
        "device": '"cuda:1"',
        "memory": 'MemoryBudget.parse("2GB")',
        "policy": 'Policy(backend="triton")',
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """How to run a checkpoint. None leaves a value to the checkpoint or to the solver."""

    max_batch_size: int
    """Requests at a time."""
    max_context_len: int
    """Tokens of one request, prompt and answer."""
    max_encoder_len: int | None = None
    """Encoder tokens of one request in an encoder-decoder model, in addition to its
    `max_context_len`; None takes the model's limit, or `max_context_len` if it has none."""
    max_total_tokens: int | None = None
    """Tokens of all requests together, their encoders' included, for which the KV pool has room."""
    spare_pages: int = 0
    """Pages of the KV pool in addition to those of `max_total_tokens`. The branches of a draft
    model take topk * (steps - 1) for each request, see `ModelProposer`."""
    kept_states: int | None = None
    """Prefixes whose linear layers' states are kept, so that later prompts can begin with them;
    None: as many as `max_batch_size`. Each takes the memory of a request's states, without those of
    drafts."""
    memory: MemoryBudget | None = None
    """Memory for the KV pool, with the bounds and copies of chosen pages. One of this and
    `max_total_tokens` is needed; if both are given, the smaller counts."""
    window_step_tokens: int | None = WINDOW_STEP_TOKENS
    """Layers with windows or chunks get a KV pool of their own if that saves memory, with room
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
    reads accepted tokens; None: that for prefill. Needs `draft_tokens`."""
    hidden_states: bool = False
    """Whether to keep the last hidden state of every cached token, which an EAGLE head reads."""
    hidden_layers: tuple[int, ...] = ()
    """Numbers of the layers whose outputs `hidden_states` keeps instead, one after another: those
    that `hidden_layers` finds for an EAGLE 3 head."""
    sparse: str | None = None
    """"quest": decode steps read the pages of each request whose keys may score highest; see
    `Request.sparse`. Pages have `SPARSE_PAGE_SIZE` tokens if `page_size` says nothing else."""
    sparse_budget: int | None = None
    """Tokens of each request that such a step reads, in whole pages."""
    deterministic: bool = False
    """Whether a request's tokens and their bits must not depend on the other requests of its steps.
    Backends are chosen for it, every layer runs on blocks of a fixed number of rows, prompts and
    decoding requests take turns, prefixes are not reused, and latent attention runs expanded."""
    graph: bool | None = None
    """Whether decode steps are replayed from device graphs; None: if device, backend and model
    can."""
    graph_sizes: tuple[int, ...] | None = None
    """Batch sizes of the decode steps that are captured, ascending; None: the usual ones."""
    graph_padding: bool = True
    """Whether a step of fewer requests is padded to a captured size. Without it, other sizes run
    eagerly."""
    piece_sizes: tuple[int, ...] | None = None
    """Numbers of tokens for which steps over prompts are captured in pieces between attention
    calls, ascending; None: the usual ones from 16 to 2,048, the largest at the start and each other
    one after sixteen steps that need it; (): none. `graph=False` switches pieces off too."""
    compile: bool = False
    """Whether the model's layers are compiled with torch.compile, which takes up to a minute at the
    first start. If they cannot be, they run as they are, with a warning."""
    dtype: str | None = None
    kv_dtype: str | None = None
    kv_dtype_skip: str | None = None
    """Layers that keep K and V in the model's dtype instead: numbers, ranges and kinds, such as
    "0-1,31,sliding_window". The kinds are sliding_window, attention_chunk and full_attention."""
    mla: Literal["absorbed", "expanded"] | None = None
    """How latent attention runs. Absorbed, the KV cache holds the latent; expanded, every head's
    K and V. None: absorbed if a backend serves it, unless only as a last resort (see
    `Prior.LAST_RESORT`) while expanded has a better one."""
    page_size: int | None = None
    device: str | None = None
    """torch's name, such as "cuda:1"; None takes the platform's current device."""
    policy: Policy = field(default_factory=Policy)
    measurements: tuple[Measurement, ...] = ()
    """Measurements of this machine; those that hold for the model move the ranks that backends are
    chosen by."""
    launches: tuple[TunedLaunch, ...] = ()
    """See `BackendContext.launches`: everything that was tuned on this machine."""
    ranks: Ranks = ONE_RANK
    """The ranks that run the model together."""
    debug: bool = False
    """Check every batch's values, at the cost of synchronising."""
    check: Callable[[Decision], None] | None = None
    """Called with each decision before its backend is made, such as `attnmux.testing.FirstUse`;
    BackendFailed takes the next candidate."""
    wrap: Callable[[AttentionBackend, Decision], AttentionBackend] | None = None
    """Called with the backend that was made; the runner uses what it returns, such as a canary."""

    @property
    def piece_tokens(self) -> int:
        """The most tokens of steps that may be captured in pieces; 0 for none."""
        if self.graph is False or self.ranks.size > 1:
            return 0
        usual = usual_pieces(self.max_batch_size * self.max_context_len)
        return max(usual if self.piece_sizes is None else self.piece_sizes, default=0)

    @property
    def columns(self) -> int:
        """Columns of the request table: those of the encoder's tokens come first."""
        return (self.max_encoder_len or 0) + self.max_context_len

    def pool_tokens(self, page_size: int) -> int | None:
        """Tokens of a rank's pool, in whole pages; None if memory alone limits them. They fit even
        if each request's last page is partly filled.

        Raises InvalidInput without `max_total_tokens` and `memory`.
        """
        building = self.ranks.building
        if self.max_total_tokens is None:
            if self.memory is None:
                raise InvalidInput("memory", got=None, expected="max_total_tokens, memory or both")
            return None
        # With tokens interleaved over ranks, each page of these may be filled in part
        may_fill_in_part = page_size > 1 or building.tokens_each(2) < 2
        part_filled = self.max_batch_size if may_fill_in_part else 0
        tokens = building.tokens_each(self.max_total_tokens)
        return (tokens // page_size + part_filled + self.spare_pages) * page_size

    def device_on(self, platform: Platform) -> torch.device:
        """The device to run on. Raises InvalidInput for one that torch cannot use here."""
        name = self.device or platform.device_type
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            got = f"{name} ({AttnmuxError.in_brief(error)})"
            expected = "a device that torch can use here"
            raise InvalidInput("device", got=got, expected=expected) from error
        return device

    def __post_init__(self) -> None:
        """Raises InvalidInput for values that no model runs with, or that need another option."""
        for least, names in LEAST.items():
            for name in names:
                if (value := getattr(self, name)) is not None or name in REQUIRED:
                    InvalidInput.check_at_least(least, name, value)
        for name, kinds in KINDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                kind = f"{kinds[0].__name__}, such as {EXAMPLES[name]}"
                raise InvalidInput(name, got=repr(value), expected=f"a {kind}")
        if self.mla not in (None, "absorbed", "expanded"):
            raise InvalidInput("mla", got=repr(self.mla), expected='"absorbed", "expanded" or None')
        self._check_graphs()
        self._check_deterministic()
        if self.draft_topk > 1 and self.draft_tokens is None:
            expected = "draft_tokens with it: there are no drafts"
            raise InvalidInput("draft_topk", got=self.draft_topk, expected=expected)
        if self.hidden_layers and not self.hidden_states:
            expected = "hidden_states=True with it: no states are kept"
            raise InvalidInput("hidden_layers", got=self.hidden_layers, expected=expected)

    def _check_graphs(self) -> None:
        """Raise InvalidInput for sizes that are not ascending from 1 up."""
        if self.graph_sizes is not None:
            GraphConfig(batch_sizes=self.graph_sizes)
        sizes = self.piece_sizes or (1,)
        if sizes[0] < 1 or [*sizes] != sorted(set(sizes)):
            expected = "ascending numbers of tokens from 1 up"
            raise InvalidInput("piece_sizes", got=sizes, expected=expected)

    def _check_deterministic(self) -> None:
        """Raise InvalidInput for options whose sums depend on the batch."""
        if not self.deterministic:
            return
        excluded = {
            "drafts": self.draft_tokens is not None,
            "compile": self.compile,
            "sparse": self.sparse is not None,
            'mla="absorbed"': self.mla == "absorbed",
            f"{self.ranks.size} ranks": self.ranks.size > 1,
        }
        if options := [name for name, is_set in excluded.items() if is_set]:
            expected = "none of these: their sums depend on the other requests"
            raise InvalidInput(
                "deterministic", got=f"{' and '.join(options)} too", expected=expected
            )
