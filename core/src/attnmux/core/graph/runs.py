"""Steps with a few new tokens a request, as steps with the same number for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.errors import InvalidInput
from attnmux.core.graph.config import ModelInput
from attnmux.core.spec import SpecInput


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UniformRuns:
    """A DRAFT_EXTEND step, whose requests have up to d new tokens, as one of d tokens each.

    The tokens after a request's own are padding, which is written to slot 0. A token sees those
    before it alone, so that padding changes no other token's result. As all requests have d new
    tokens, this is a TARGET_VERIFY step of chains, which backends hold in graphs.
    """

    batch: ForwardBatch
    own: torch.Tensor
    """[T] int64: the requests' own tokens among the B * d."""
    sources: torch.Tensor
    """[B * d] int64: the token of each place among the T; T for padding."""

    @classmethod
    def of(cls, batch: ForwardBatch, width: int) -> UniformRuns:
        """width: d. The batch is one that `refusal` does not refuse."""
        counts, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens
        prefixes_cpu = batch.extend_prefix_lens_cpu
        assert counts is not None
        assert prefixes is not None
        assert prefixes_cpu is not None
        is_own = (np.arange(width) < counts.numpy()[:, None]).ravel()
        own, num_tokens = is_own.nonzero()[0], batch.num_tokens
        sources = np.where(is_own, is_own.cumsum() - 1, num_tokens)
        device = batch.out_cache_loc.device
        moved = torch.from_numpy(np.concatenate([own, sources])).to(device, non_blocking=True)
        own_places, from_places = moved.split([len(own), len(sources)])
        order = torch.arange(width, device=device)
        lens_each = torch.full_like(counts, width)
        uniform = replace(
            batch,
            forward_mode=ForwardMode.TARGET_VERIFY,
            actual_forward_mode=ForwardMode.DRAFT_EXTEND,
            seq_lens=prefixes,
            out_cache_loc=_spread(batch.out_cache_loc, from_places, 0),
            positions=(prefixes.long().unsqueeze(1) + order).flatten(),
            seq_lens_cpu=prefixes_cpu,
            seq_lens_sum=int(prefixes_cpu.sum()),
            extend_seq_lens=lens_each.to(device),
            extend_seq_lens_cpu=lens_each,
            extend_num_tokens=len(sources),
            spec_info=SpecInput(draft_token_num=width),
        )
        return cls(batch=uniform, own=own_places, sources=from_places)

    def inputs(
        self, given: Mapping[str, torch.Tensor], kinds: Mapping[str, ModelInput]
    ) -> dict[str, torch.Tensor]:
        """The model's inputs of the B * d tokens, from those of the T; 0 for padding."""
        dims = {name: len(kinds[name].leading) if name in kinds else 0 for name in given}
        return {name: _spread(each, self.sources, dims[name]) for name, each in given.items()}


def _spread(values: torch.Tensor, sources: torch.Tensor, dim: int) -> torch.Tensor:
    """The values at `sources` along a dimension of size T; T is a value of 0."""
    shape = (*values.shape[:dim], 1, *values.shape[dim + 1 :])
    return torch.cat([values, values.new_zeros(shape)], dim).index_select(dim, sources)


def refusal(batch: ForwardBatch, width: int, max_context_len: int) -> InvalidInput | None:
    """Why a DRAFT_EXTEND step is no step of d tokens a request, if so."""
    counts, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    if counts is None or prefixes is None or batch.extend_prefix_lens is None:
        given = {
            "extend_seq_lens_cpu": counts,
            "extend_prefix_lens_cpu": prefixes,
            "extend_prefix_lens": batch.extend_prefix_lens,
        }
        missing = next(name for name, value in given.items() if value is None)
        return InvalidInput(missing, got=None, expected="lengths, by which runs are padded")
    if not counts.numel():
        return None
    if int(counts.max()) > width or int(counts.sum()) != batch.num_tokens:
        return InvalidInput(
            "extend_seq_lens",
            got=f"{counts.tolist()} for {batch.num_tokens} tokens",
            expected=f"at most {width} for each request, as at capture, and their sum",
        )
    if int(prefixes.max()) + width > max_context_len:
        return InvalidInput(
            "extend_prefix_lens",
            got=int(prefixes.max()),
            expected=f"room for {width} tokens in the context of {max_context_len}",
        )
    return None
