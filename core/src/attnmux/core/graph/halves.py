"""The two halves of a batch, whose communication overlaps the other half's compute."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnmux.core.batch import ForwardBatch


def halves(batch: ForwardBatch, tokens_per_request: int) -> tuple[ForwardBatch, ForwardBatch]:
    """The first half of the rows and the others, as views. A half of a single row is empty."""
    middle = batch.batch_size // 2
    return (
        _part(batch, 0, middle, tokens_per_request),
        _part(batch, middle, batch.batch_size, tokens_per_request),
    )


def _part(batch: ForwardBatch, first: int, last: int, tokens_per_request: int) -> ForwardBatch:
    def of_requests(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[first:last]

    tokens = slice(first * tokens_per_request, last * tokens_per_request)
    lens_cpu = of_requests(batch.seq_lens_cpu)
    return replace(
        batch,
        batch_size=last - first,
        req_pool_indices=batch.req_pool_indices[first:last],
        seq_lens=batch.seq_lens[first:last],
        out_cache_loc=batch.out_cache_loc[tokens],
        positions=batch.positions[tokens],
        seq_lens_cpu=lens_cpu,
        seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
        extend_seq_lens=of_requests(batch.extend_seq_lens),
        extend_seq_lens_cpu=of_requests(batch.extend_seq_lens_cpu),
        extend_prefix_lens=of_requests(batch.extend_prefix_lens),
        extend_prefix_lens_cpu=of_requests(batch.extend_prefix_lens_cpu),
        extend_num_tokens=None if batch.extend_num_tokens is None else tokens.stop - tokens.start,
        encoder_lens=of_requests(batch.encoder_lens),
        topk_indices=None if batch.topk_indices is None else batch.topk_indices[tokens],
        tbo_children=(),
    )
