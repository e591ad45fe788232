"""One step of a model: its batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from attnmux.core.contract.mode import ForwardMode
from attnmux.core.facts.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from attnmux.core.contract.spec import SpecInput
    from attnmux.core.facts.values import TreeMask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MultiItem:
    """Many items scored against one shared prefix in a single sequence.

    Key j is visible to token i when j <= i and either j lies in the prefix or j lies in
    i's own item.
    """

    prefix_lens: torch.Tensor
    """[B] int32: tokens of the shared prefix, from the start of the sequence."""
    token_pos_in_items: torch.Tensor
    """[T] int32: place of each new token in its item, 0 for the delimiter that opens it.
    The value of a token inside the prefix is not read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardBatch:
    """The inputs of attention in a step: B requests with T new tokens.

    Tensors lie on the device of the KV pool unless their name ends in `_cpu`. Host mirrors
    are optional; a backend that needs one says so on its card. In a captured graph every
    tensor is a slice of the runner's fixed buffers and B is the padded batch size; a padding
    row has request row 0 and writes to slot 0.
    """

    forward_mode: ForwardMode
    batch_size: int
    """B, padding rows included."""
    req_pool_indices: torch.Tensor
    """[B] int64: rows of the request table."""
    seq_lens: torch.Tensor
    """[B] int32: tokens in the cache after this step; in TARGET_VERIFY the prefix alone."""
    out_cache_loc: torch.Tensor
    """[T] int64: slots that the new tokens are written to."""
    positions: torch.Tensor
    """[T] int64: place of each new token in its sequence."""
    seq_lens_cpu: torch.Tensor | None = None
    """[B] int32 on the host."""
    seq_lens_sum: int | None = None
    """Sum of `seq_lens`, if the scheduler knows it."""
    extend_seq_lens: torch.Tensor | None = None
    """[B] int32: new tokens a request. Set in every extend mode, verify included."""
    extend_seq_lens_cpu: torch.Tensor | None = None
    """[B] int32 on the host."""
    extend_prefix_lens: torch.Tensor | None = None
    """[B] int32: cached tokens before the new ones. Set in every extend mode."""
    extend_prefix_lens_cpu: torch.Tensor | None = None
    """[B] int32 on the host."""
    extend_num_tokens: int | None = None
    """T in every extend mode."""
    encoder_lens: torch.Tensor | None = None
    """[B] int32: encoder tokens of each request, for encoder-decoder models. They occupy the
    first slots of the request's row, and decoder tokens follow them."""
    encoder_out_cache_loc: torch.Tensor | None = None
    """[encoder tokens of this step] int64: slots that cross attention writes K and V to."""
    topk_indices: torch.Tensor | None = None
    """[T, topk] int32, for a request of kind "nsa": places, in its own request's sequence, of the
    keys that each new token sees, in any order and each once; -1 is no key. Layers of kind "mla"
    see only these keys, and the indexer keeps them causal. The model's indexer writes them in place
    before each layer's call, so they are undefined while the step is prepared. A graph runner has
    a buffer of its own for them.
    For layers with `LayerSpec.index_block_size`: [T, Hp, topk] int32, blocks of so many keys. Hp is
    a multiple of the KV heads and divides the query heads. Each of Hp parts of the query heads, in
    order, has blocks of its own."""
    spec_info: SpecInput | None = None
    multi_item: MultiItem | None = None
    actual_forward_mode: ForwardMode | None = None
    """The mode before a composite or a graph runner substituted `forward_mode`."""
    tbo_children: tuple[ForwardBatch, ...] = ()
    """The two halves of a step, whose communication and compute overlap; see `with_halves`."""

    @property
    def num_tokens(self) -> int:
        """T: rows of Q in this step."""
        if self.extend_num_tokens is not None and self.forward_mode.is_extend():
            return self.extend_num_tokens
        return self.out_cache_loc.shape[0]

    def extend_lens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`extend_seq_lens` and `extend_prefix_lens`. Raises InvalidInput for a step without."""
        new, cached = self.extend_seq_lens, self.extend_prefix_lens
        if new is None or cached is None:
            expected = "new and cached lengths in an extend step"
            raise InvalidInput("extend_seq_lens", got=None, expected=expected)
        return new, cached

    def drafts(self) -> SpecInput:
        """`spec_info`. Raises InvalidInput for a step without."""
        if self.spec_info is None:
            raise InvalidInput("spec_info", got=None, expected="the drafts of a verify step")
        return self.spec_info

    @property
    def tree_mask(self) -> TreeMask | None:
        """The form of the step's mask; None without one."""
        return None if self.spec_info is None else self.spec_info.tree_mask

    @property
    def masks_drafts(self) -> bool:
        """Whether the step's mask is between its drafts alone."""
        return self.tree_mask in ("qlen_only", "qlen_only_bitpacking")

    def visible_drafts(self) -> torch.Tensor:
        """`SpecInput.visible` of a TARGET_VERIFY step, whatever form its mask has; causal for
        chains. Raises InvalidInput for a step without drafts."""
        return self.drafts().visible_drafts(self.seq_lens)

    def check_unmasked(self) -> None:
        """Raises InvalidInput for a step with a mask, or with many items."""
        if self.spec_info is not None and self.spec_info.mask_field is not None:
            name = f"spec_info.{self.spec_info.mask_field}"
            raise InvalidInput(name, got="a mask", expected="None: drafts in chains")
        self.check_no_items()

    def check_no_items(self) -> None:
        """Raises InvalidInput for a step with many items."""
        if self.multi_item is not None:
            raise InvalidInput("multi_item", got="many items", expected="None")

    def queries_each(self) -> int | None:
        """New tokens of each request, if its mode gives all requests equally many: 1 in DECODE,
        the drafts in TARGET_VERIFY; None in other steps.

        Raises InvalidInput for a step of another number of tokens, and for one without the lengths
        or the drafts of its mode.
        """
        if self.forward_mode.is_decode():
            each, expected = 1, "one token a request in decode"
        else:
            self.extend_lens()
            if not self.forward_mode.is_target_verify():
                return None
            each = self.drafts().draft_token_num
            expected = f"{each} draft tokens a request"
        if self.num_tokens != self.batch_size * each:
            got = f"{self.num_tokens} tokens of {self.batch_size} requests"
            raise InvalidInput("out_cache_loc", got=got, expected=expected)
        return each

    def slice(self, first: int, last: int, *, first_token: int, last_token: int) -> ForwardBatch:
        """The step of requests [first, last), whose new tokens are [first_token, last_token).

        Its tensors are views. `spec_info`, `multi_item` and `encoder_out_cache_loc` describe the
        whole step and stay as they are; `seq_lens_sum` needs the host mirror of the lengths.
        Without requests it is IDLE, and `actual_forward_mode` has the step's mode.
        """
        modes: dict[str, ForwardMode] = {}
        if first == last:
            actual = self.actual_forward_mode or self.forward_mode
            modes = {"forward_mode": ForwardMode.IDLE, "actual_forward_mode": actual}

        def of_requests(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[first:last]

        def of_tokens(values: torch.Tensor) -> torch.Tensor:
            return values[first_token:last_token]

        lens_cpu = of_requests(self.seq_lens_cpu)
        return replace(
            self,
            batch_size=last - first,
            req_pool_indices=self.req_pool_indices[first:last],
            seq_lens=self.seq_lens[first:last],
            out_cache_loc=of_tokens(self.out_cache_loc),
            positions=of_tokens(self.positions),
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            extend_seq_lens=of_requests(self.extend_seq_lens),
            extend_seq_lens_cpu=of_requests(self.extend_seq_lens_cpu),
            extend_prefix_lens=of_requests(self.extend_prefix_lens),
            extend_prefix_lens_cpu=of_requests(self.extend_prefix_lens_cpu),
            extend_num_tokens=None if self.extend_num_tokens is None else last_token - first_token,
            encoder_lens=of_requests(self.encoder_lens),
            topk_indices=None if self.topk_indices is None else of_tokens(self.topk_indices),
            tbo_children=(),
            **modes,  # type: ignore[arg-type]  # fields by name
        )

    def part(self, first: int, last: int, *, first_token: int, last_token: int) -> ForwardBatch:
        """`slice` with the requests' own masks and items.

        The sizes of whole masks follow from the lengths, which are read from the device without a
        host mirror.
        """
        part = self.slice(first, last, first_token=first_token, last_token=last_token)
        spec, items = self.spec_info, self.multi_item
        if spec is not None:
            sizes = None if spec.custom_mask is None else self._mask_sizes()
            part = replace(part, spec_info=spec.of_requests(first, last, sizes))
        if items is not None:
            own = MultiItem(
                prefix_lens=items.prefix_lens[first:last],
                token_pos_in_items=items.token_pos_in_items[first_token:last_token],
            )
            part = replace(part, multi_item=own)
        return part

    def with_halves(self) -> ForwardBatch:
        """The step with its halves as `tbo_children`.

        Steps with as many new tokens for each request (DECODE, TARGET_VERIFY) are cut after B // 2
        requests, others at the request that leaves the new tokens most even. No request is cut, so
        a half may be empty. Lengths without a host mirror are read from the device.
        Raises InvalidInput for new encoder tokens, whose requests no batch names.
        """
        if self.encoder_out_cache_loc is not None and self.encoder_out_cache_loc.numel():
            raise InvalidInput(
                "encoder_out_cache_loc",
                got=f"slots of {self.encoder_out_cache_loc.numel()} encoder tokens",
                expected="none in a step of two batches: run it whole",
            )
        ends = [0, *accumulate(self._new_tokens())]
        size, last_token = self.batch_size, self.num_tokens
        middle = size // 2
        if self.forward_mode.is_extend() and not self.forward_mode.is_target_verify():
            middle = min(range(size + 1), key=lambda request: abs(2 * ends[request] - ends[-1]))
        # Rows after the last request's are padding, and stay with it
        cut = ends[middle] if middle < size else last_token
        halves = (
            self.part(0, middle, first_token=0, last_token=cut),
            self.part(middle, size, first_token=cut, last_token=last_token),
        )
        return replace(self, tbo_children=halves)

    def _mask_sizes(self) -> list[int]:
        """Values of each request in a whole mask."""
        lens = (self.seq_lens if self.seq_lens_cpu is None else self.seq_lens_cpu).tolist()
        verifies = self.forward_mode.is_target_verify()
        pairs = zip(self._new_tokens(), lens, strict=True)
        return [new * (length + new * verifies) for new, length in pairs]

    def _new_tokens(self) -> list[int]:
        """New tokens of each request."""
        if not self.forward_mode.is_extend():
            return [1] * self.batch_size
        (new, _), mirror = self.extend_lens(), self.extend_seq_lens_cpu
        found: list[int] = (new if mirror is None else mirror).tolist()
        return found
