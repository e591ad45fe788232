"""The refusal of requests that can never run."""

from __future__ import annotations

from collections.abc import Sequence

from attnmux.core.arguments import check_positive
from attnmux.core.errors import PoolExhausted
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.encoder_slots import check_encoder_len
from attnmux.transformers.prompts import check_prompt


def check_request(
    name: str,
    token_ids: Sequence[int],
    max_new_tokens: int,
    *,
    encoder_len: int,
    vocabulary_size: int,
    steps: StepBuilder,
) -> None:
    """Raise InvalidInput for a prompt that the model cannot read, and PoolExhausted for a request
    that does not fit into the pool even when it is alone there."""
    check_positive("max_new_tokens", max_new_tokens)
    check_prompt(name, token_ids, vocabulary_size, steps.max_context_len)
    check_encoder_len(encoder_len, steps.max_encoder_len)
    # The last token is never run, so it needs no slot.
    longest = encoder_len + min(len(token_ids) + max_new_tokens - 1, steps.max_context_len)
    page_size, size = steps.allocator.page_size, steps.allocator.size
    wanted = -(-longest // page_size) * page_size
    if wanted > size:
        raise PoolExhausted(
            f"KV slots for {name}",
            wanted=wanted,
            available=size,
            hint="ask for fewer new tokens, shorten the prompt, or make the KV pool larger",
        )
