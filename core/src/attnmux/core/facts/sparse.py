"""Requirements and exclusions of requests for chosen pages or picked blocks."""

from __future__ import annotations

from typing import Any

from attnmux.core.facts.errors import InvalidInput

FEWEST_CHOSEN_PAGES = 4
"""Pages of a `sparse_budget`, at least: the first, the last two, and one that is chosen."""

EXCLUDED = (
    *("spec_topk", "sliding_window", "attention_chunk", "cross_attention", "alibi"),
    *("relative_bias", "custom_mask", "multi_item", "two_batches", "strided_kv"),
    "index_block_size",
)
"""Fields of a request that do not go with chosen pages."""


def check_sparse(asked: Any) -> None:  # noqa: ANN401  # a request, whose module imports this one
    """Raise InvalidInput for a request with chosen pages and a feature that excludes them."""
    if asked.sparse is None and asked.sparse_budget is None:
        return
    if asked.sparse is None or asked.sparse_budget is None:
        name = "sparse" if asked.sparse is None else "sparse_budget"
        raise InvalidInput(name, got=None, expected="sparse and sparse_budget together")
    exclusions = [name for name in EXCLUDED if getattr(asked, name)]
    exclusions += [f"kind={asked.kind}"] * (asked.kind != "mha")
    exclusions += [f"kv_dtype={asked.kv_dtype}"] * (asked.kv_dtype not in (None, asked.dtype))
    if exclusions:
        got = f"{asked.sparse} with {', '.join(exclusions)}"
        expected = "none of these: pages are chosen in plain causal layers without drafts"
        raise InvalidInput("sparse", got=got, expected=expected)


def check_picked_blocks(asked: Any) -> None:  # noqa: ANN401  # as above
    """Raise InvalidInput for a request with picked blocks and a feature that excludes them."""
    if asked.index_block_size is None:
        return
    excluded = {
        f"kind={asked.kind}": asked.kind != "mha",
        "no index_topk": asked.index_topk is None,
        "trees of drafts": asked.has_trees,
        "custom_mask": asked.custom_mask,
        "multi_item": asked.multi_item,
        f"kv_dtype={asked.kv_dtype}": asked.kv_dtype == "fp4_e2m1",
    }
    exclusions = [name for name, is_set in excluded.items() if is_set]
    if exclusions:
        got = f"{asked.index_block_size} with {', '.join(exclusions)}"
        expected = "index_topk blocks of kind mha in 8 bits or more, and drafts in chains"
        raise InvalidInput("index_block_size", got=got, expected=expected)


def check_decidable(asked: Any) -> None:  # noqa: ANN401  # as above
    """Raise InvalidInput for chosen pages if the page size or dtype is open, and for a budget that
    is not so many whole pages, or too few."""
    if asked.sparse is None:
        return
    page_size, budget = asked.page_size or 0, asked.sparse_budget
    if page_size < 2:
        expected = "pages of 2 tokens or more, which share their bounds"
        raise InvalidInput("page_size", got=page_size or None, expected=expected)
    least = FEWEST_CHOSEN_PAGES * page_size
    if budget % page_size or budget < least:
        expected = f"a multiple of {page_size}, the page size, from {least}"
        raise InvalidInput("sparse_budget", got=budget, expected=expected)
    if asked.dtype is None:
        expected = "the model's dtype: pages are chosen in a KV cache of the same"
        raise InvalidInput("dtype", got=None, expected=expected)
