"""What the graphs of a model's steps are captured for."""

from __future__ import annotations

from collections.abc import Sequence

from attnmux.core import ForwardMode, GraphConfig
from attnmux.transformers.model.sparse.index_shape import IndexShape


def decode_graphs(
    pool_size: int, chosen: Sequence[int] | None, *, encoder: bool, index: IndexShape
) -> GraphConfig:
    """Of decode steps. pool_size: rows of the request table. chosen: batch sizes; None takes the
    usual ones. index: what the model's indexers pick."""
    return GraphConfig(
        batch_sizes=GraphConfig.sizes(pool_size=pool_size, chosen=chosen),
        encoder=encoder,
        host_lens=True,
        index_topk=index.places,
        index_heads=index.heads,
    )


def verify_graphs(
    pool_size: int,
    chosen: Sequence[int] | None,
    *,
    draft_tokens: int,
    draft_topk: int,
    index: IndexShape,
) -> GraphConfig:
    """Of steps that verify drafts; arguments as in `decode_graphs` and `RunnerOptions`."""
    return GraphConfig(
        batch_sizes=GraphConfig.sizes(pool_size=pool_size, chosen=chosen, speculation=True),
        forward_mode=ForwardMode.TARGET_VERIFY,
        tokens_per_request=draft_tokens,
        spec_topk=draft_topk,
        visible=draft_topk > 1,
        host_lens=True,
        index_topk=index.places,
        index_heads=index.heads,
    )


def catch_up_graphs(num_tokens: int, batch_sizes: Sequence[int]) -> GraphConfig:
    """Of steps in which a draft model reads `num_tokens` accepted tokens of each request."""
    return GraphConfig(
        batch_sizes=tuple(batch_sizes),
        forward_mode=ForwardMode.DRAFT_EXTEND,
        tokens_per_request=num_tokens,
        host_lens=True,
    )
