"""What a step takes from the images of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import SpecInput
from attnmux.transformers.requests.sequence import SequenceState, StepImages


def images_of(
    states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]
) -> StepImages | None:
    """The placeholders of each request's tokens from start to end; None without any."""
    indices, embeds, before = [], [], 0
    for state, start, end in zip(states, starts, ends, strict=True):
        if state.images is not None:
            bounds = torch.tensor([start, end])
            first, last = torch.searchsorted(state.images.places, bounds).tolist()
            indices.append(state.images.places[first:last] + (before - start))
            embeds.append(state.images.embeds[first:last])
        before += end - start
    if not any(map(len, indices)):
        return None
    rows = torch.cat(embeds)
    return StepImages(indices=torch.cat(indices).to(rows.device), embeds=rows)


def positions_of(
    states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]
) -> torch.Tensor | None:
    """[3, T] int64 on the host: multimodal rotary positions of each request's tokens from start to
    end; None where they are the tokens' places."""
    if all(state.images is None or state.images.positions is None for state in states):
        return None
    parts = []
    for state, start, end in zip(states, starts, ends, strict=True):
        places = torch.arange(start, end).expand(3, -1)
        images = state.images
        if images is None or images.positions is None:
            parts.append(places)
            continue
        prompt_len = images.positions.shape[1]
        parts.append(images.positions[:, start:end])
        parts.append(places[:, max(prompt_len - start, 0) :] + images.delta)
    return torch.cat(parts, dim=1)


def mask_of(
    states: Sequence[SequenceState],
    starts: Sequence[int],
    ends: Sequence[int],
    device: torch.device,
) -> SpecInput | None:
    """The custom mask of a step with spans whose tokens see each other; None without any.

    It replaces causality: a token sees what is before it, itself and its span.
    """
    reaches = [
        _reach(state, start, end) for state, start, end in zip(states, starts, ends, strict=True)
    ]
    if all(reach is None for reach in reaches):
        return None
    parts = []
    for reach, start, end in zip(reaches, starts, ends, strict=True):
        last = torch.arange(start, end) if reach is None else reach
        keys = torch.arange(end, device=device)
        parts.append((keys <= last.to(device).unsqueeze(1)).flatten())
    sizes = torch.tensor([0, *(part.shape[0] for part in parts)])
    return SpecInput(
        draft_token_num=max(end - start for start, end in zip(starts, ends, strict=True)),
        custom_mask=torch.cat(parts),
        mask_indptr=sizes.cumsum(0).to(torch.int32).to(device),
    )


def _reach(state: SequenceState, start: int, end: int) -> torch.Tensor | None:
    """[end - start] int64: the last key that each token sees; None if it is itself in all."""
    spans = () if state.images is None else state.images.spans
    inside = [(begin, stop) for begin, stop in spans if begin < end and stop > start]
    if not inside:
        return None
    last = torch.arange(start, end)
    for begin, stop in inside:
        last[max(begin - start, 0) : stop - start] = stop - 1
    return last
