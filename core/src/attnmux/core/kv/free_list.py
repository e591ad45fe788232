"""Which of the units 1 … count are free. A unit is a slot or a page; unit 0 never is."""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput, PoolExhausted


class FreeList:
    """A stack of free units on a device, its height known to the host.

    Taking n units and giving n back costs O(n), whatever the size of the pool.
    """

    def __init__(self, count: int, device: torch.device, *, what: str, checked: bool) -> None:
        """Units 1 … count, all free. `what` names them in errors; `checked` finds double frees."""
        self.count = count
        self.device = device
        self.what = what
        self.checked = checked
        self.clear()

    def clear(self) -> None:
        """Make every unit free."""
        self._stack = torch.arange(self.count, 0, -1, device=self.device)
        self.available = self.count
        # Unit 0 never comes into use, so giving it back is refused like any free unit.
        states = self.count + 1 if self.checked else 0
        self._in_use = torch.zeros(states, dtype=torch.bool, device=self.device)

    def take(self, num_units: int) -> torch.Tensor:
        """Units [num_units] int64, the one given back last first.

        Raises PoolExhausted when fewer are free and InvalidInput below 0, changing nothing.
        """
        self.check_room(num_units)
        rest = self.available - num_units
        units = self._stack[rest : self.available].flip(0)
        self.available = rest
        if self.checked:
            self._in_use[units] = True
        return units

    def check_room(self, num_units: int) -> None:
        """Raise as `take` would."""
        if num_units < 0:
            raise InvalidInput("num_units", came=num_units, expected="at least 0")
        if num_units > self.available:
            raise PoolExhausted(
                self.what,
                wanted=num_units,
                available=self.available,
                hint="free finished requests, evict cached prefixes, or make the pool larger",
            )

    def check_in_use(self, units: torch.Tensor) -> None:
        """Raise InvalidInput unless every unit is in use. Does nothing when not checked."""
        if not self.checked or not units.numel():
            return
        inside = (units > 0) & (units <= self.count)
        owned = inside & self._in_use[units * inside]
        if not bool(owned.all()):
            raise InvalidInput(
                "slots",
                came=f"{self.what} {units[~owned][:8].tolist()}, free already or never handed out",
                expected=f"{self.what} in use",
            )

    def give(self, units: torch.Tensor) -> None:
        """Take distinct units [n] int64 back, all of them in use (`check_in_use`)."""
        end = self.available + units.numel()
        self._stack[self.available : end] = units.flip(0)
        self.available = end
        if self.checked:
            self._in_use[units] = False
