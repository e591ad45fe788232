"""The drafts of `attnmux generate --draft`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attnmux.core import InvalidInput, Policy
from attnmux.transformers.checkpoint import Checkpoint, open_checkpoint
from attnmux.transformers.decision import RunnerOptions
from attnmux.transformers.engine import ModelProposer, NgramProposer, Proposer
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.runner import ModelRunner

NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """The options of the command. Raises InvalidInput for trees by a draft model."""

    draft: str | None
    """ngram, or a model's folder or hub id; None without drafts."""
    draft_tokens: int
    topk: int
    steps: int | None

    def __post_init__(self) -> None:
        if self.draft not in (None, NGRAM) and self.topk > 1:
            expected = "1: a draft model makes chains"
            raise InvalidInput("--topk", got=self.topk, expected=expected)

    @property
    def draft_token_num(self) -> int | None:
        """Tokens that a step verifies for each prompt; None without drafts."""
        if self.draft is None:
            return None
        if self.draft == NGRAM or self.steps is None:
            return self.draft_tokens
        return min(self.draft_tokens, self.steps + 1)

    def proposer(
        self,
        target: Checkpoint,
        options: RunnerOptions,
        load: Callable[[Checkpoint, RunnerOptions], ModelRunner],
        *,
        max_total_tokens: int,
    ) -> Proposer | None:
        """Loads the draft model, on a backend that is chosen for it, with a KV pool of its own.

        Raises InvalidInput unless its tokenizer has the target's vocabulary.
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
        limit = checkpoint.max_context_len or options.max_context_len
        drafting = replace(
            options,
            max_context_len=min(options.max_context_len, limit),
            max_total_tokens=max_total_tokens + num * options.max_batch_size,
            memory=None,
            window_step_tokens=None,
            draft_tokens=None,
            draft_topk=1,
            mla=None,
            page_size=None,
            kv_dtype=None,
            policy=Policy(),
            wrap=None,
            ranks=ONE_RANK,
        )
        runner = load(checkpoint, drafting)
        vocabulary_size = target.vocabulary_size
        return ModelProposer(runner, vocabulary_size=vocabulary_size, steps=num - 1)
