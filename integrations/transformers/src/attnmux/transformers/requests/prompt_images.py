"""The images of one prompt, as its decoder takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from attnmux.core import InvalidInput

KEY_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptImages:
    """The decoder's inputs for a prompt's images, instead of the placeholders' embeddings."""

    token_ids: tuple[int, ...]
    """The prompt, placeholders included: P tokens."""
    places: torch.Tensor
    """[N] int64 on the host, ascending: the placeholders among the prompt's tokens."""
    embeds: torch.Tensor
    """[N, width], on the model's device: the input embeddings of the placeholders."""
    keys: tuple[int, ...]
    """The prompt for a prefix tree: each placeholder is a negative number that depends on its
    image, so that no other image matches it."""
    positions: torch.Tensor | None = None
    """[3, P] int64 on the host: multimodal rotary positions; None if they are the places."""
    delta: int = 0
    """Added to the place of a token after the prompt, it gives the token's position."""
    spans: tuple[tuple[int, int], ...] = ()
    """Begin and end of the parts whose tokens see each other, whatever their order; in order."""

    def chunk_end(self, start: int, end: int) -> int:
        """The last place up to `end` where a step of tokens from `start` may end: never inside a
        span. It is `start` if the span that begins there, or goes on there, is longer."""
        for begin, stop in self.spans:
            if begin < end < stop:
                return max(begin, start)
        return end

    @property
    def text_ids(self) -> list[int]:
        """The prompt with 0 in the places of the placeholders, which no table needs to hold."""
        ids = list(self.token_ids)
        for place in self.places.tolist():
            ids[place] = 0
        return ids

    @property
    def longest_span(self) -> int:
        return max((stop - begin for begin, stop in self.spans), default=0)


def runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end of each run of consecutive places. places: ascending."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs


def keys_of(
    token_ids: Sequence[int],
    places: Sequence[int],
    inputs: Mapping[str, torch.Tensor],
    *,
    positions: torch.Tensor | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> tuple[int, ...]:
    """`PromptImages.keys`. inputs: everything that the vision tower reads.

    Each run of placeholders depends on its own image, if the inputs show which that is; else on all
    images of the prompt. It also depends on its positions, and on which of its tokens see each
    other, since a model may take both from its caller's arguments.
    """
    runs, keys = runs_of(places), list(token_ids)
    parts = _by_image(inputs, len(runs))
    for (begin, end), part in zip(runs, parts, strict=True):
        inside = [span for span in spans if span[0] < end and span[1] > begin]
        tokens = [torch.tensor(inside)]
        if positions is not None:
            tokens.append(positions[:, begin:end])
        keys[begin:end] = [_digest([*part, *tokens])] * (end - begin)
    return tuple(keys)


def _by_image(inputs: Mapping[str, torch.Tensor], num_runs: int) -> list[list[torch.Tensor]]:
    """The inputs of each run's image."""
    whole = [inputs[name] for name in sorted(inputs)]
    grid, pixels = inputs.get("image_grid_thw"), inputs.get("pixel_values")
    if set(inputs) == {"pixel_values", "image_grid_thw"} and grid is not None:
        sizes = grid.prod(-1).tolist()
        if pixels is not None and len(sizes) == num_runs and sum(sizes) == pixels.shape[0]:
            return [list(pair) for pair in zip(torch.split(pixels, sizes), grid, strict=True)]
    elif all(tensor.shape[:1] == (num_runs,) for tensor in whole):
        return [[tensor[image] for tensor in whole] for image in range(num_runs)]
    return [whole] * num_runs


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    """A negative number that differs for tensors of other shapes or values."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return -1 - int.from_bytes(digest.digest(), "big")


def check_images(images: object, width: int) -> None:
    """Raise InvalidInput for images that a step of the model could not read.

    width: of its input embeddings; 0 for a runner that reads no images.
    """
    if images is None:
        return
    if not isinstance(images, PromptImages):
        got, expected = f"a {type(images).__name__}", "what `ModelRunner.read_images` returns"
    elif not width:
        got, expected = "some", "none: the runner was made without images=True"
    elif images.embeds.shape[1] != width:
        got, expected = f"embeddings of {images.embeds.shape[1]} dims", f"{width}, of this model"
    else:
        return
    raise InvalidInput("images", got=got, expected=expected)


def check_prompt_images(
    token_ids: Sequence[int], images: PromptImages, prefill_tokens: int
) -> None:
    """Raise InvalidInput for images of another prompt, and for an image whose tokens see each other
    and do not fit one step. prefill_tokens: prompt tokens of a step."""
    if tuple(token_ids) != images.token_ids:
        raise InvalidInput(
            "images", got="those of another prompt", expected="token_ids as in images.token_ids"
        )
    if images.longest_span > prefill_tokens:
        raise InvalidInput(
            "prefill_tokens",
            got=prefill_tokens,
            expected=f"at least {images.longest_span}: tokens of an image that see each other run "
            "in one step",
        )
