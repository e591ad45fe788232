"""Free pages, and which slots of them new tokens get."""

from __future__ import annotations

import torch

from attnmux.core import InvalidInput, PoolExhausted


class FreeList:
    """A stack of free units 1 … count on a device; the host knows its height.

    A unit is a slot or a page. Unit 0 is reserved and never free.

    Taking n units and giving n back costs O(n), whatever the size of the pool.
    """

    def __init__(self, count: int, device: torch.device, *, what: str, checked: bool) -> None:
        """All units are free. `what` names them in errors; `checked` finds double frees."""
        self.count = count
        self.device = device
        self.what = what
        self.checked = checked
        self.clear()

    def clear(self) -> None:
        """Make every unit free."""
        stack = torch.arange(self.count, 0, -1, device=self.device)
        # Unit 0 is never in use, so that giving it back is refused
        states = self.count + 1 if self.checked else 0
        self._in_use = torch.zeros(states, dtype=torch.bool, device=self.device)
        self._stack, self.available = stack, self.count

    def take(self, num_units: int) -> torch.Tensor:
        """Units [num_units] int64; the one given back last comes first.

        Raises PoolExhausted when fewer are free and InvalidInput below 0, changing nothing.
        """
        self.check_room(num_units)
        rest = self.available - num_units
        units = self._stack[rest : self.available].flip(0)
        self.available = rest
        if self.checked:
            self._in_use[units] = True
        return units

    def rewind(self, available: int) -> None:
        """Undo every `take` since that many units were free. Nothing was given back meanwhile."""
        if self.checked:
            self._in_use[self.taken_since(available)] = False
        self.available = available

    def taken_since(self, available: int) -> torch.Tensor:
        """Units [n] int64 that were taken since that many were free, if none was given back."""
        return self._stack[self.available : available]

    def check_room(self, num_units: int) -> None:
        """Raise as `take` would."""
        if num_units < 0:
            raise InvalidInput("num_units", got=num_units, expected="at least 0")
        if num_units > self.available:
            raise PoolExhausted(
                self.what,
                wanted=num_units,
                available=self.available,
                hint="free finished requests, evict cached prefixes, or make the pool larger",
            )

    def check_in_use(self, units: torch.Tensor) -> None:
        """Raise InvalidInput unless every unit is in use. Does nothing unless `checked`."""
        if not self.checked or not units.numel():
            return
        inside = (units > 0) & (units <= self.count)
        owned = inside & self._in_use[units * inside]
        if not bool(owned.all()):
            raise InvalidInput(
                "slots",
                got=f"{self.what} {units[~owned][:8].tolist()}, free already or never handed out",
                expected=f"{self.what} in use",
            )

    def give(self, units: torch.Tensor) -> None:
        """Take distinct units [n] int64 back, all of them in use (`check_in_use`)."""
        end = self.available + units.numel()
        self._stack[self.available : end] = units.flip(0)
        self.available = end
        if self.checked:
            self._in_use[units] = False


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
    # A token that continues a page has rank -1 or more: the zero in front stands for -1
    fresh = torch.cat([pages.new_zeros(1), pages])[page_ranks + 1] * page_size
    fresh += positions % page_size
    continued = positions + (last_loc + 1 - prefix_lens)[request]
    return torch.where(positions < (pages_before * page_size)[request], continued, fresh)


def check_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> None:
    """Raise InvalidInput for lengths that contradict each other or last_loc. Synchronises."""
    if not prefix_lens.shape == seq_lens.shape == last_loc.shape:
        raise InvalidInput(
            "last_loc",
            got=f"{tuple(prefix_lens.shape)}, {tuple(seq_lens.shape)}, {tuple(last_loc.shape)}",
            expected="prefix_lens, seq_lens and last_loc of one shape [B]",
        )
    if bool(((prefix_lens < 0) | (seq_lens < prefix_lens)).any()):
        got = f"{seq_lens.tolist()} after {prefix_lens.tolist()}"
        raise InvalidInput("seq_lens", got=got, expected="0 <= prefix <= length")
    total = int((seq_lens - prefix_lens).sum())
    if total != num_tokens:
        expected = f"{total}, the sum of the new lengths"
        raise InvalidInput("extend_num_tokens", got=num_tokens, expected=expected)
    misplaced = (prefix_lens > 0) & (last_loc % page_size != (prefix_lens - 1) % page_size)
    if bool(misplaced.any()):
        raise InvalidInput(
            "last_loc",
            got=f"{last_loc[misplaced][:8].tolist()} after {prefix_lens[misplaced][:8].tolist()} "
            "tokens",
            expected=f"the slot of the last token, at its place in a page of {page_size}",
        )


def _starts(lens: torch.Tensor) -> torch.Tensor:
    return lens.cumsum(0) - lens
