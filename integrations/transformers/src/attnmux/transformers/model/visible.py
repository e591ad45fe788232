"""The keys that each token of a padded batch sees, read from transformers' mask function."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
)

from attnmux.core import InvalidInput
from attnmux.transformers.model.reach import LONGEST_READ, MaskFunction, Reach, read_reach

AND_MASKS, PACKED = (
    function.__code__
    for function in (and_masks(causal_mask_function), packed_sequence_mask_function(torch.empty(0)))
)
"""The code of transformers' mask functions that are made of others, and of those for sequences that
are packed into one row."""

REMAPPED: Any = None
"""The code of those that count a packed row's places from its sequence's first. Releases before
transformers 5.24 have none."""
if remapped := getattr(masking_utils, "remap_positions_for_packed_sequence", None):
    REMAPPED = remapped(causal_mask_function, torch.empty(0)).__code__


class Lens(NamedTuple):
    """Real tokens of each sequence of a call."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    """Cached and new. The new tokens are the last of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisibleKeys:
    """The keys that the tokens of a step see: the mask that eager attention would get, as lengths.

    Q is [B, Hq, T, D]. K is [B, Hkv, S, D]; `num_keys` of its keys exist, from `first_key` on: a
    static cache holds more.
    """

    mask_function: MaskFunction
    batch_size: int
    num_queries: int
    first_key: int
    num_keys: int
    forgotten: int
    """Tokens before those of K, which the layer's cache has dropped."""
    padding: torch.Tensor | None
    """[B, num_keys] bool, False for padding; None without any."""
    lens: Lens
    reaches: dict[Hashable, Reach] = field(repr=False)
    """Shared by all steps: a mask function is read once."""
    is_packed: bool = False
    """Whether a row holds several sequences, one after another, and no tokens were cached."""

    @classmethod
    def of(
        cls,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | torch.Tensor,
        kv_offset: int | torch.Tensor,
        mask_function: MaskFunction,
        attention_mask: torch.Tensor | None,
        reaches: dict[Hashable, Reach],
    ) -> VisibleKeys:
        """From the arguments that transformers passes to a mask function.

        attention_mask: [B, tokens seen so far], 0 for padding. Synchronises with the device if it
        is given, and if a row has several sequences. Raises InvalidInput for a mask of another
        shape.
        """
        mask_function, sequences = _packing(mask_function)
        first = int(kv_offset)
        end = int(q_offset) + q_length
        num_keys = min(end - first, kv_length)
        padding = None
        if attention_mask is not None:
            if attention_mask.ndim != 2 or attention_mask.shape[1] < first + num_keys:
                raise InvalidInput(
                    "attention_mask",
                    got=f"shape {tuple(attention_mask.shape)}",
                    expected=f"[{batch_size}, {end}], one value a token",
                )
            padding = attention_mask[:, first : first + num_keys].bool()
            if bool(padding.all()):
                padding = None
        if sequences is not None:
            lens = _lens_of(sequences)
        elif padding is None:
            lens = Lens((q_length,) * batch_size, (num_keys,) * batch_size)
        else:
            real = torch.stack([padding[:, -q_length:].sum(1), padding.sum(1)]).tolist()
            lens = Lens(tuple(real[0]), tuple(real[1]))
        return cls(
            mask_function=mask_function,
            batch_size=batch_size,
            num_queries=q_length,
            first_key=0,
            num_keys=num_keys,
            forgotten=first,
            padding=padding,
            lens=lens,
            reaches=reaches,
            is_packed=sequences is not None,
        )

    def packed(self, lens: Lens) -> VisibleKeys:
        """With the lengths of sequences that are packed into the one row of the batch.

        Raises InvalidInput for lengths that do not fit the row, or not its positions.
        """
        rows = Lens((self.num_queries,), (self.num_keys,))
        whole = Lens((sum(lens.queries),), (sum(lens.keys),))
        is_one = self.batch_size == 1 and self.padding is None and self.num_queries == self.num_keys
        if not is_one or whole != rows or lens.queries != lens.keys or min(lens.queries) < 1:
            got = f"queries of {lens.queries}, keys of {lens.keys} tokens in {self.batch_size} rows"
            expected = (
                f"the same for both, of {self.num_queries} tokens in one row, without a cache"
            )
            raise InvalidInput("cu_seq_lens", got=got, expected=expected)
        if self.is_packed and lens != self.lens:
            got = f"{lens.queries} tokens"
            expected = f"{self.lens.queries}, by the positions that begin anew in position_ids"
            raise InvalidInput("cu_seq_lens", got=got, expected=expected)
        return replace(self, lens=lens, is_packed=len(lens.queries) > 1)

    def reach(self, told: Reach) -> Reach:
        """The keys that a layer sees if its reach is `told`.

        Raises InvalidInput for a mask that is not causal with a window or chunks, for a window over
        sequences with padding between their tokens, and for chunks with any padding.
        """
        key = (_content(self.mask_function), told)
        reach = self.reaches.get(key)
        if reach is None:
            device = torch.device("cpu")
            reach = read_reach(
                self.mask_function, told, max_context_len=LONGEST_READ, device=device
            )
            self.reaches[key] = reach
        if reach.attention_chunk_size and (self.padding is not None or self.is_packed):
            got = "several sequences in a row" if self.is_packed else "padding"
            raise InvalidInput(
                "attention_mask", got=f"{got}, in a layer with chunks", expected="none"
            )
        if reach.sliding_window_size >= 0 and self.padding is not None:
            starts = self.padding[:, 1:] & ~self.padding[:, :-1]
            if bool((starts.sum(1) + self.padding[:, 0] > 1).any()):
                raise InvalidInput(
                    "attention_mask",
                    got="padding between tokens, in a layer with a window",
                    expected="padding before or after a sequence",
                )
        return reach

    def from_chunk(self, size: int) -> VisibleKeys:
        """Without the keys before the first chunk that K has whole: places are counted from the
        first key, and chunks from the first token. No query sees the keys that are left out."""
        spare = -self.forgotten % size if size else 0
        if not spare:
            return self
        assert self.padding is None  # `reach` refuses chunks with padding
        keys = self.num_keys - spare
        return replace(
            self,
            first_key=spare,
            num_keys=keys,
            forgotten=self.forgotten + spare,
            lens=Lens(self.lens.queries, (keys,) * self.batch_size),
        )

    def of_last(self, num_queries: int) -> VisibleKeys:
        """The part for the last so many new places, which are also the last keys."""
        if self.is_packed:
            got = f"the last {num_queries} tokens of a row of several sequences"
            raise InvalidInput("attention_mask", got=got, expected="all of them")
        real = (num_queries,) * self.batch_size
        if self.padding is not None:
            real = tuple(self.padding[:, self.padding.shape[1] - num_queries :].sum(1).tolist())
        return replace(self, num_queries=num_queries, lens=Lens(real, self.lens.keys))

    def pack_queries(self, rows: torch.Tensor) -> torch.Tensor:
        """[real new tokens, H, D] of rows [B, H, T, D]."""
        return _pack(rows, None if self.padding is None else self.padding[:, -self.num_queries :])

    def pack_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """[real tokens, H, D] of rows [B, H, S, D]."""
        end = self.first_key + self.num_keys
        return _pack(rows[:, :, self.first_key : end], self.padding)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] of rows [real new tokens, H, D], 0 in padding."""
        shape = (self.batch_size, self.num_queries, *rows.shape[1:])
        if self.padding is None:
            return rows.view(shape)
        result = rows.new_zeros(shape)
        result[self.padding[:, -self.num_queries :]] = rows
        return result


class MaskWithKeys(torch.Tensor):
    """The empty tensor [B, 1, T, 0] that transformers hands from the mask function to the layers,
    which know a mask by its four dims, and its `VisibleKeys`."""

    visible: VisibleKeys

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401  # as torch's
        """The last rows, as of a model that runs some layers for them alone, have their
        `VisibleKeys`. Other parts have none, and `visible_in` refuses them."""
        part = super().__getitem__(index)
        if not isinstance(index, tuple) or len(index) != self.ndim:
            return part
        *before, rows, keys = index
        if isinstance(rows, slice) and all(each == slice(None) for each in (*before, keys)):
            start, stop, step = rows.indices(self.shape[2])
            if isinstance(part, MaskWithKeys) and stop == self.shape[2] and step == 1:
                part.visible = visible_in(self).of_last(stop - start)
        return part

    @classmethod
    def of(cls, visible: VisibleKeys) -> MaskWithKeys:
        mask = torch.empty((visible.batch_size, 1, visible.num_queries, 0)).as_subclass(cls)
        mask.visible = visible
        return mask


def visible_in(mask: MaskWithKeys) -> VisibleKeys:
    """Raises InvalidInput for a mask that the model made of another one."""
    visible: VisibleKeys | None = getattr(mask, "visible", None)
    if visible is None:
        raise InvalidInput(
            "attention_mask",
            got="a mask that the model changed",
            expected="the mask of its mask function, or the last rows of it",
        )
    return visible


def _pack(rows: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    by_token = rows.transpose(1, 2)
    return by_token.flatten(0, 1).contiguous() if real is None else by_token[real]


def _packing(mask: MaskFunction) -> tuple[MaskFunction, torch.Tensor | None]:
    """The mask of one sequence, and the sequence of each token, [B, T], if a row has several."""
    if getattr(mask, "__code__", None) is not AND_MASKS:
        return mask, None
    (parts,) = (cell.cell_contents for cell in mask.__closure__ or ())
    packed = [part for part in parts if getattr(part, "__code__", None) is PACKED]
    if len(packed) != 1:
        return mask, None
    others = [_in_sequence(part) for part in parts if part is not packed[0]]
    (cell,) = packed[0].__closure__
    return others[0] if len(others) == 1 else and_masks(*others), cell.cell_contents


def _in_sequence(mask: MaskFunction) -> MaskFunction:
    """The mask of a sequence by its own places, which are those in the row less a constant."""
    code: Any = getattr(mask, "__code__", None)
    if code is None or code is not REMAPPED:
        return mask
    captured = dict(zip(code.co_freevars, mask.__closure__ or (), strict=True))
    inner: MaskFunction = captured["mask_function"].cell_contents
    return inner


def _lens_of(sequences: torch.Tensor) -> Lens:
    counts = [row.unique_consecutive(return_counts=True)[1].tolist() for row in sequences.cpu()]
    lens = tuple(count for row in counts for count in row)
    return Lens(lens, lens)


def _content(value: object) -> Hashable:
    """Equal for mask functions that show the same: their code and what they close over.

    Raises InvalidInput for tensors in them: such a mask depends on the batch.
    """
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return value.__code__, tuple(_content(cell.cell_contents) for cell in cells)
    if isinstance(value, tuple | list):
        return tuple(_content(item) for item in value)
    if isinstance(value, torch.Tensor):
        # The left padding of chunked attention
        if value.ndim == 1 and not value.any():
            return "zeros"
        raise InvalidInput(
            "mask_function",
            got=f"a mask that depends on a tensor of shape {tuple(value.shape)}",
            expected="causal attention, with a window or chunks at most",
        )
    return value
