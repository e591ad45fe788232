"""Builds steps of the model from requests: rows and slots for the new tokens, and the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import ForwardBatch, ForwardMode, InvalidInput, SpecInput
from attnmux.transformers.requests.decode_batch import DecodeBatch
from attnmux.transformers.requests.request_memory import RequestMemory
from attnmux.transformers.requests.sequence import SequenceState, Step, StepImages, split_encoder


class StepBuilder(RequestMemory):
    """Takes rows and slots for the new tokens of a step and writes the request table.

    If building a step raises, its rows and slots are free again.
    """

    def extend(
        self,
        states: Sequence[SequenceState],
        num_new: Sequence[int] | None = None,
        *,
        forward_mode: ForwardMode = ForwardMode.EXTEND,
    ) -> Step:
        """A step over the next `num_new` pending tokens of each request; None means all of them.

        A request's earlier tokens are its cached prefix, so that a prompt may run in chunks.
        Decoding requests may take part with their single pending token; the mode is then MIXED.
        Raises PoolExhausted when rows or slots do not suffice, and InvalidInput for counts that
        are not pending or do not fit into the context. An exception changes nothing.
        """
        counts = [state.num_pending for state in states] if num_new is None else list(num_new)
        self._check_new(states, counts)
        self.give_back(states)
        ends = [state.num_cached + count for state, count in zip(states, counts, strict=True)]
        with self.taking():
            rows = self.rows_of(states)
            step = self._make_extend(states, counts, rows, forward_mode)
        for state, row, end in zip(states, rows, ends, strict=True):
            state.row, state.num_cached = row, end
            state.encoder_cached = state.encoder_states is not None
        self.intact = True
        return step

    def _make_extend(
        self,
        states: Sequence[SequenceState],
        counts: Sequence[int],
        in_rows: Sequence[int],
        forward_mode: ForwardMode,
    ) -> Step:
        prefixes = [state.num_cached for state in states]
        ends = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
        starts = [state.num_columns for state in states]
        stops = [state.encoder_len + end for state, end in zip(states, ends, strict=True)]
        encoder = [state.encoder_len for state in states]
        host = torch.tensor([in_rows, prefixes, ends, starts, stops, encoder])
        rows, prefix_lens, seq_lens, *columns, encoder_lens = host.to(self.device).unbind()
        slots = self.extend_rows(rows, columns, host[3:5])
        extend_lens = seq_lens - prefix_lens
        input_ids, positions = self._tokens(states, prefixes, ends)
        slots, encoder_slots, encoder_states = split_encoder(slots, states, counts)
        batch = ForwardBatch(
            forward_mode=forward_mode,
            batch_size=len(states),
            req_pool_indices=rows,
            seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=slots,
            positions=positions,
            seq_lens_cpu=host[2].to(torch.int32),
            seq_lens_sum=sum(ends),
            extend_seq_lens=extend_lens.to(torch.int32),
            extend_seq_lens_cpu=(host[2] - host[1]).to(torch.int32),
            extend_prefix_lens=prefix_lens.to(torch.int32),
            extend_prefix_lens_cpu=host[1].to(torch.int32),
            extend_num_tokens=sum(counts),
            encoder_lens=encoder_lens.to(torch.int32) if self.max_encoder_len else None,
            encoder_out_cache_loc=encoder_slots,
            spec_info=mask_of(states, prefixes, ends, self.device),
        )
        position_ids = positions_of(states, prefixes, ends)
        return Step(
            batch=batch,
            input_ids=input_ids,
            last_indices=extend_lens.cumsum(0) - 1,
            encoder_states=encoder_states,
            images=images_of(states, prefixes, ends),
            position_ids=None if position_ids is None else position_ids.to(self.device),
        )

    def decode(self, states: Sequence[SequenceState]) -> Step:
        """A step over the one pending token of each request.

        Raises PoolExhausted, changing nothing, when slots do not suffice, and InvalidInput for
        requests that were not extended, that have more to run, or whose context is full.
        """
        return self.decode_batch(states).step()

    def decode_batch(self, states: Sequence[SequenceState]) -> DecodeBatch:
        """For many steps over the same requests; raises InvalidInput as `decode` does.

        The caller makes sure that the contexts have room for the steps after the first.
        """
        for state in states:
            if state.num_pending != 1 or state.row is None:
                raise InvalidInput(
                    "states",
                    got=f"a request with {state.num_pending} pending tokens",
                    expected="requests that were extended, each with one pending token",
                )
        self._check_new(states, [1] * len(states))
        self.give_back(states)
        return DecodeBatch(states, self)

    def _tokens(
        self, states: Sequence[SequenceState], starts: Sequence[int], ends: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions of each request's tokens from start to end, packed: [T] int64 each."""
        ids: list[int] = []
        positions: list[int] = []
        for state, start, end in zip(states, starts, ends, strict=True):
            ids += state.token_ids[start:end]
            positions += range(start, end)
        packed = torch.tensor([ids, positions]).to(self.device)
        return packed[0], packed[1]

    def _check_new(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        if len(set(states)) != len(states):
            raise InvalidInput("states", got="a request twice", expected="each request once")
        longest = self.max_context_len
        for state, count in zip(states, counts, strict=True):
            self.check_encoder_states(state.encoder_states)
            self.check_images(state.images)
            if not 1 <= count <= state.num_pending:
                raise InvalidInput(
                    "num_new", got=count, expected=f"1 to {state.num_pending} pending tokens"
                )
            if state.num_cached + count > longest:
                raise InvalidInput(
                    "token_ids",
                    got=f"{state.num_cached + count} tokens",
                    expected=f"at most the context of {longest} tokens",
                )


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
    end; None if they are the tokens' places."""
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

    It replaces causality: a token sees the tokens before it, itself and its span.
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
