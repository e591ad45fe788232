"""The drafts of `attnmux generate --draft`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attnmux.core import GraphUnsupported, InvalidInput, Policy
from attnmux.transformers.checkpoint import Checkpoint, open_checkpoint
from attnmux.transformers.decision import RunnerOptions
from attnmux.transformers.engine import ModelProposer, NgramProposer, Proposer
from attnmux.transformers.engine.draft_model import most_nodes
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.runner import ModelRunner

NGRAM = "ngram"

DRAFT_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """The options of the command.

    Raises InvalidInput for more tokens to verify than a draft model proposes.
    """

    draft: str | None
    """ngram, or a model's folder or hub id; None without drafts."""
    draft_tokens: int | None
    """Tokens that a step verifies; None: the usual number, or fewer where there are fewer."""
    topk: int
    steps: int | None

    def __post_init__(self) -> None:
        if self.draft in (None, NGRAM) or self.draft_tokens is None:
            return
        most = most_nodes(self._steps, self.topk)
        if self.draft_tokens > most:
            tokens = f"--steps {self._steps} with --topk {self.topk}"
            expected = f"at most {most}: the prompt's last token and the guesses of {tokens}"
            raise InvalidInput("--draft-tokens", got=self.draft_tokens, expected=expected)

    @property
    def draft_token_num(self) -> int | None:
        """Tokens that a step verifies for each prompt; None without drafts."""
        if self.draft is None:
            return None
        if self.draft == NGRAM or self.draft_tokens is not None:
            return self.draft_tokens or DRAFT_TOKENS
        return min(DRAFT_TOKENS, most_nodes(self._steps, self.topk))

    @property
    def _steps(self) -> int:
        """Tokens of a draft model's longest guess. No tree has room for longer ones."""
        num = self.draft_tokens or DRAFT_TOKENS
        usual = num - 1 if self.topk == 1 else num // 2
        return min(self.steps or usual, num - 1)

    def proposer(
        self,
        target: Checkpoint,
        options: RunnerOptions,
        load: Callable[[Checkpoint, RunnerOptions], ModelRunner],
        *,
        max_total_tokens: int,
        warn: Callable[[str], None],
    ) -> Proposer | None:
        """Loads the draft model, on a backend that is chosen for it, with a KV pool of its own.

        warn: called with a sentence about a draft model that runs without graphs.
        Raises InvalidInput unless its tokenizer has the target's vocabulary, and GraphUnsupported
        if graphs are required but unavailable.
        """
        num = self.draft_token_num
        if self.draft is None or num is None:
            return None
        if self.draft == NGRAM:
            return NgramProposer(draft_token_num=num, topk=self.topk, steps=self.steps)
        checkpoint = open_checkpoint(self.draft)
        ours = target.require_tokenizer().get_vocab()
        if checkpoint.require_tokenizer().get_vocab() != ours:
            expected = f"a model with the vocabulary of {target.source}"
            raise InvalidInput("--draft", got=self.draft, expected=expected)
        runner = load(checkpoint, self._options(options, checkpoint, max_total_tokens))
        proposer = ModelProposer(
            runner,
            vocabulary_size=target.vocabulary_size,
            steps=self._steps,
            topk=self.topk,
            draft_token_num=num,
        )
        if options.graph is not False:
            _capture(proposer, options, warn)
        return proposer

    def _options(
        self, options: RunnerOptions, checkpoint: Checkpoint, max_total_tokens: int
    ) -> RunnerOptions:
        """Those of the draft model's runner. Its graphs are the proposer's."""
        limit = checkpoint.max_context_len or options.max_context_len
        return replace(
            options,
            max_context_len=min(options.max_context_len, limit),
            max_total_tokens=max_total_tokens,
            spare_pages=options.max_batch_size * self.topk * (self._steps - 1),
            memory=None,
            window_step_tokens=None,
            draft_tokens=self._steps + 1,
            draft_topk=1,
            graph=False,
            mla=None,
            page_size=None,
            kv_dtype=None,
            policy=Policy(),
            wrap=None,
            ranks=ONE_RANK,
        )


def _capture(proposer: ModelProposer, options: RunnerOptions, warn: Callable[[str], None]) -> None:
    try:
        proposer.capture_graphs()
    except GraphUnsupported as error:
        if options.graph is True:
            raise
        if proposer.device.type != "cpu" and not options.debug:
            warn(f"the draft model runs without graphs: {error}")
