"""The drafts of `attnmux generate --draft`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from attnmux.core import GraphUnsupported, InvalidInput, Policy
from attnmux.transformers import recall
from attnmux.transformers.draft.model import ModelProposer, most_nodes
from attnmux.transformers.draft.proposers import NgramProposer, Proposer
from attnmux.transformers.load.checkpoint import Checkpoint, open_checkpoint
from attnmux.transformers.load.eagle_files import head_folder, hidden_layers, load_head
from attnmux.transformers.model.eagle_head import EagleHead
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.run.runner import ModelRunner

NGRAM = "ngram"
EAGLE = "eagle"
"""The head that ships with the recall checkpoint."""

DRAFT_TOKENS = 8
NAMES = ("prefill_backend", "decode_backend", "mm_backend", "linear_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """The options of the command.

    Raises InvalidInput for more tokens to verify than a draft model proposes, and for options of
    drafts if nothing drafts.
    """

    draft: str | None
    """ngram, eagle, or the folder or the hub id of a model or of an EAGLE head; None without
    drafts."""
    draft_tokens: int | None
    """Tokens that a step verifies; None: the usual number, or fewer if there are fewer."""
    topk: int
    steps: int | None
    always: bool = False
    """Whether steps draft also where it does not pay."""
    attention_mode: Literal["prefill", "decode"] | None = None
    """Which of the two backends verifies, and reads for a draft model; None: prefill's."""
    backend: str | None = None
    """Backend of the draft model or the head; None: chosen for it."""
    head: Path | None = field(init=False)
    """The folder of an EAGLE head; None for other drafts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", self._find_head())
        self._check_unused()
        if self.draft in (None, NGRAM) or self.draft_tokens is None:
            return
        most = most_nodes(self._steps, self.topk)
        if self.draft_tokens > most:
            tokens = f"--steps {self._steps} with --topk {self.topk}"
            expected = f"at most {most}: the prompt's last token and the guesses of {tokens}"
            raise InvalidInput("--draft-tokens", got=self.draft_tokens, expected=expected)

    def _check_unused(self) -> None:
        of_drafts = {
            "--speculative-attention-mode": self.attention_mode,
            "--draft-tokens": self.draft_tokens,
            "--topk": None if self.topk == 1 else self.topk,
            "--steps": self.steps,
            "--draft-always": self.always or None,
        }
        for name, value in of_drafts.items():
            if value is not None and self.draft is None:
                expected = "--draft with it: there is nothing to verify"
                raise InvalidInput(name, got=value, expected=expected)
        if self.backend is not None and self.draft in (None, NGRAM):
            expected = "--draft with a model or a head, which has a backend"
            raise InvalidInput("--draft-backend", got=self.backend, expected=expected)

    @property
    def draft_token_num(self) -> int | None:
        """Tokens that a step verifies for each prompt; None without drafts."""
        if self.draft is None:
            return None
        if self.draft == NGRAM or self.draft_tokens is not None:
            return self.draft_tokens or DRAFT_TOKENS
        return min(DRAFT_TOKENS, most_nodes(self._steps, self.topk))

    def _find_head(self) -> Path | None:
        if self.draft == EAGLE:
            return recall.EAGLE_PATH
        if self.draft is None or self.draft == NGRAM:
            return None
        return head_folder(self.draft, progress=sys.stderr.isatty())

    @property
    def _steps(self) -> int:
        """Tokens of a draft model's longest guess. No tree has room for longer ones."""
        num = self.draft_tokens or DRAFT_TOKENS
        usual = num - 1 if self.topk == 1 else num // 2
        return min(self.steps or usual, num - 1)

    def hidden_layers(self, target: Checkpoint) -> tuple[int, ...]:
        """`RunnerOptions.hidden_layers` of the target."""
        return () if self.head is None else hidden_layers(self.head, target.config)

    def drafter(
        self,
        target: Checkpoint,
        runner: ModelRunner,
        options: RunnerOptions,
        load: Callable[[Checkpoint | EagleHead, RunnerOptions], ModelRunner],
        *,
        max_total_tokens: int,
    ) -> ModelRunner | None:
        """Loads the draft model, on a backend of its own, with a KV pool of its own; None if no
        model drafts.

        target, runner: the target's checkpoint, and its runner. load: makes the runner of a model
        or of a head. Raises InvalidInput unless its tokenizer has the target's vocabulary, and what
        `load` raises.
        """
        if self.draft in (None, NGRAM):
            return None
        if self.head is not None:
            drafter: Checkpoint | EagleHead = load_head(self.head, runner.model)
        else:
            drafter = self._model(target)
        return load(drafter, self._options(options, drafter, max_total_tokens))

    def proposer(
        self,
        target: Checkpoint,
        runner: ModelRunner,
        drafter: ModelRunner | None,
        options: RunnerOptions,
        *,
        warn: Callable[[str], None],
    ) -> Proposer | None:
        """The proposer of drafts; None without drafts.

        drafter: from `drafter`. warn: called with a sentence about a draft model that runs without
        graphs. Raises GraphUnsupported if graphs are required but unavailable.
        """
        num = self.draft_token_num
        if num is None:
            return None
        if drafter is None:
            return NgramProposer(draft_token_num=num, topk=self.topk, steps=self.steps)
        proposer = ModelProposer(
            drafter,
            vocabulary_size=target.vocabulary_size,
            steps=self._steps,
            topk=self.topk,
            draft_token_num=num,
            target=None if self.head is None else runner.steps,
        )
        if options.graph is not False:
            _capture(proposer, options, warn)
        return proposer

    def _model(self, target: Checkpoint) -> Checkpoint:
        assert self.draft is not None
        try:
            checkpoint = open_checkpoint(self.draft)
        except InvalidInput as error:
            if error.argument != "model":
                raise
            raise InvalidInput("--draft", got=error.got, expected=error.expected) from error
        ours = target.require_tokenizer().get_vocab()
        if checkpoint.require_tokenizer().get_vocab() != ours:
            expected = f"a model with the vocabulary of {target.source}"
            raise InvalidInput("--draft", got=self.draft, expected=expected)
        return checkpoint

    def _options(
        self, options: RunnerOptions, drafter: Checkpoint | EagleHead, max_total_tokens: int
    ) -> RunnerOptions:
        """Options of the draft model's runner. Its graphs are the proposer's."""
        # A head's rotary embeddings have no table, so that its config limits nothing
        limit = drafter.max_context_len if isinstance(drafter, Checkpoint) else None
        limit = limit or options.max_context_len
        return replace(
            options,
            max_context_len=min(options.max_context_len, limit),
            max_total_tokens=max_total_tokens,
            spare_pages=options.max_batch_size * self.topk * (self._steps - 1),
            memory=None,
            window_step_tokens=None,
            draft_tokens=self._steps + 1,
            draft_topk=1,
            hidden_states=isinstance(drafter, EagleHead),
            hidden_layers=(),
            graph=False,
            mla=None,
            page_size=None,
            kv_dtype=None,
            kv_dtype_skip=None,
            policy=self._policy(options.policy),
            wrap=None,
            ranks=ONE_RANK,
        )

    def _policy(self, policy: Policy) -> Policy:
        """Names of backends are the target's; what may be chosen at all holds for both."""
        unnamed: dict[str, Any] = dict.fromkeys(NAMES)
        return replace(policy, **unnamed, backend=self.backend, origins={})


def _capture(proposer: ModelProposer, options: RunnerOptions, warn: Callable[[str], None]) -> None:
    try:
        proposer.capture_graphs()
    except GraphUnsupported as error:
        if options.graph is True:
            raise
        if proposer.device.type != "cpu" and not options.debug:
            warn(f"the draft model runs without graphs: {error}")
