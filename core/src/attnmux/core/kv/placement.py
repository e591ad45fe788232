"""Where new tokens go: the rest of a request's last page first, then fresh pages."""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput


def place_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    pages: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> torch.Tensor:
    """Slots [num_tokens] int64 of the tokens from prefix_lens [B] to seq_lens [B], in order.

    pages: int64, the fresh pages of all requests, in request order. last_loc: [B] int.
    """
    prefix_lens, seq_lens = prefix_lens.long(), seq_lens.long()
    pages_before = (prefix_lens + (page_size - 1)) // page_size
    new_pages = (seq_lens + (page_size - 1)) // page_size - pages_before
    extend_lens = seq_lens - prefix_lens
    places = torch.arange(num_tokens, device=pages.device)
    request = torch.arange(prefix_lens.shape[0], device=pages.device)
    request = request.repeat_interleave(extend_lens, output_size=num_tokens)

    positions = places + (prefix_lens - _starts(extend_lens))[request]
    page_ranks = positions // page_size + (_starts(new_pages) - pages_before)[request]
    # A token that continues a page has a rank of at least -1, which page 0 in front answers.
    fresh = torch.cat([pages.new_zeros(1), pages])[page_ranks + 1] * page_size
    fresh += positions % page_size
    continued = positions + (last_loc + 1 - prefix_lens)[request]
    return torch.where(positions < (pages_before * page_size)[request], continued, fresh)


def place_decode(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots [B] int64 of one new token a request; seq_lens [B] count it."""
    opens_page = (seq_lens - 1) % page_size == 0
    ranks = opens_page.cumsum(0)
    fresh = torch.cat([pages.new_zeros(1), pages])[ranks] * page_size
    return torch.where(opens_page, fresh, last_loc.long() + 1)


def check_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> None:
    """Raise InvalidInput where lengths contradict each other or last_loc. Synchronises."""
    if not prefix_lens.shape == seq_lens.shape == last_loc.shape:
        raise InvalidInput(
            "last_loc",
            came=f"{tuple(prefix_lens.shape)}, {tuple(seq_lens.shape)}, {tuple(last_loc.shape)}",
            expected="prefix_lens, seq_lens and last_loc of one shape [B]",
        )
    if bool(((prefix_lens < 0) | (seq_lens < prefix_lens)).any()):
        raise InvalidInput(
            "seq_lens",
            came=f"{seq_lens.tolist()} after {prefix_lens.tolist()}",
            expected="0 <= prefix <= length",
        )
    total = int((seq_lens - prefix_lens).sum())
    if total != num_tokens:
        raise InvalidInput(
            "extend_num_tokens", came=num_tokens, expected=f"{total}, as the lengths say"
        )
    behind = (prefix_lens > 0) & (last_loc % page_size != (prefix_lens - 1) % page_size)
    if bool(behind.any()):
        raise InvalidInput(
            "last_loc",
            came=f"{last_loc[behind][:8].tolist()} after {prefix_lens[behind][:8].tolist()} tokens",
            expected=f"the slot of the last token, at its place in a page of {page_size}",
        )


def _starts(lens: torch.Tensor) -> torch.Tensor:
    return lens.cumsum(0) - lens
