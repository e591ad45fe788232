"""Requests with their tokens and memory, and one pass of the model over some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput
from attnmux.transformers.requests.prompt_images import PromptImages


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class SequenceState:
    """The tokens of one request, and how many of them have K and V in the cache."""

    token_ids: list[int]
    """The prompt, then the generated tokens."""
    row: int | None = None
    """Row of the request table, from its first step to its release."""
    num_cached: int = 0
    """Leading tokens whose slots the row holds."""
    num_shared: int = 0
    """Leading tokens, in whole pages, whose slots belong to another owner such as a prefix tree.
    The request reads them and never frees them."""
    num_behind: int = 0
    """Leading tokens, in whole pages, whose window pages the request has freed, or does not own."""
    num_spare: int = 0
    """Columns after the last token's that hold slots too, for the drafts of later steps."""
    encoder_states: torch.Tensor | None = None
    """[E, width] in an encoder-decoder model: the input of cross-attention."""
    encoder_cached: bool = False
    """Whether the row begins with the encoder's slots."""
    images: PromptImages | None = None
    """Replaces the prompt's placeholders."""

    @property
    def keys(self) -> list[int]:
        """The tokens for a prefix tree, in which placeholders of other images differ."""
        if self.images is None:
            return self.token_ids
        return [*self.images.keys, *self.token_ids[len(self.images.keys) :]]

    @property
    def position_delta(self) -> int:
        """Added to the place of a generated token, it gives the token's position."""
        return 0 if self.images is None else self.images.delta

    @property
    def encoder_len(self) -> int:
        """E; 0 without an encoder."""
        return 0 if self.encoder_states is None else self.encoder_states.shape[0]

    @property
    def num_columns(self) -> int:
        """Leading columns of the row: the encoder's and the cached tokens'."""
        return self.num_cached + (self.encoder_len if self.encoder_cached else 0)

    @property
    def num_held(self) -> int:
        """Leading columns of the row that hold slots."""
        return self.num_columns + self.num_spare

    def columns_for(self, num_new: int) -> int:
        """New columns when `num_new` pending tokens run."""
        return self.encoder_len + self.num_cached + num_new - self.num_columns

    def forget(self) -> None:
        """Start over: none of its tokens has K and V in the cache."""
        self.row = None
        self.num_cached = self.num_shared = self.num_behind = self.num_spare = 0
        self.encoder_cached = False

    @property
    def num_pending(self) -> int:
        """Tokens that no step has run yet."""
        return len(self.token_ids) - self.num_cached


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepImages:
    """The placeholders of images among a step's T tokens."""

    indices: torch.Tensor
    """[n] int64, among the T."""
    embeds: torch.Tensor
    """[n, width]: their input embeddings."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One pass of the model over B requests with T new tokens, packed into one row."""

    batch: ForwardBatch
    input_ids: torch.Tensor
    """[T] int64"""
    last_indices: torch.Tensor
    """[B] int64: each request's last new token among the T."""
    encoder_states: torch.Tensor | None = None
    """[E, width]: those of the requests whose encoder is new in this step, one after another."""
    features: torch.Tensor | None = None
    """[T, width] for an EAGLE head: the target's hidden states that the tokens join."""
    images: StepImages | None = None
    """The placeholders among the T tokens; None without any."""
    position_ids: torch.Tensor | None = None
    """The positions that the model takes, [3, T] or [T] int64; None if they are the batch's
    `positions`, which are places."""

    @classmethod
    def padding(cls, seq_len: int, device: torch.device) -> Step:
        """One decode step of a row of padding, as graphs have them: its result is not used.

        seq_len: the backend's fill value, see `get_cuda_graph_seq_len_fill_value`.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        lens_cpu = torch.tensor([seq_len], dtype=torch.int32)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=1,
            req_pool_indices=zero,
            seq_lens=lens_cpu.to(device),
            out_cache_loc=zero,
            positions=zero,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=seq_len,
        )
        return cls(batch=batch, input_ids=zero, last_indices=zero)


def check_encoder_len(encoder_len: int, max_encoder_len: int) -> None:
    """Raise InvalidInput unless a request has encoder states exactly if the model has an encoder,
    and no more of them than there is room for."""
    if bool(encoder_len) != bool(max_encoder_len) or encoder_len > max_encoder_len:
        raise InvalidInput(
            "encoder_states",
            got=f"{encoder_len} of them",
            expected=f"1 to {max_encoder_len}" if max_encoder_len else "none without an encoder",
        )


def check_encoder_states(
    states: object, max_encoder_len: int, like: torch.Tensor | None = None
) -> None:
    """Raise InvalidInput for a request's encoder states that its steps could not read.

    like: an empty tensor of their width and dtype, on their device; None if any will do.
    Otherwise raises as `check_encoder_len` does.
    """
    if states is None:
        check_encoder_len(0, max_encoder_len)
        return
    fits, got = False, f"a {type(states).__name__}"
    if isinstance(states, torch.Tensor):
        got = f"{list(states.shape)} in {states.dtype} on {states.device}"
        fits = states.ndim == 2
        if like is not None:
            fits = fits and states.shape[1:] == like.shape[1:]
            fits = fits and (states.dtype, states.device) == (like.dtype, like.device)
    if not fits:
        expected = "a tensor [E, width]"
        if like is not None:
            expected = f"[E, {like.shape[1]}] in {like.dtype} on {like.device}"
        expected += ", as `ModelRunner.encode` returns it"
        raise InvalidInput("encoder_states", got=got, expected=expected)
    assert isinstance(states, torch.Tensor)
    check_encoder_len(states.shape[0], max_encoder_len)


def split_encoder(
    slots: torch.Tensor, states: Sequence[SequenceState], counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Split the slots of a step: (the tokens' slots, the new encoders' slots, the new encoders'
    states [E, width]), request by request; the last two are None if no encoder is new.

    Call it before the requests record the step. counts: new tokens of each request.
    """
    new = [
        state.encoder_states
        for state in states
        if state.encoder_states is not None and not state.encoder_cached
    ]
    if not new:
        return slots, None, None
    sizes: list[int] = []
    for state, count in zip(states, counts, strict=True):
        sizes += [state.columns_for(count) - count, count]
    parts = slots.tensor_split(torch.tensor(sizes).cumsum(0)[:-1].tolist())
    return torch.cat(parts[1::2]), torch.cat(parts[::2]), torch.cat(new)
