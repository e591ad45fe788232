"""Whatever requests come and go, every slot is free or held by one request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from attnmux.core import InvalidInput, PoolExhausted
from attnmux.transformers.requests.slots import PagedAllocator

NUM_PAGES = 12


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decoded(allocator: PagedAllocator, lens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Slots of one new token a request, which the lengths count."""
    return allocator.alloc_extend(lens - 1, lens, last, len(lens))


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.start(page_size=1)

    @initialize(page_size=st.sampled_from([1, 2, 3, 8]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PagedAllocator(NUM_PAGES * page_size, page_size, "cpu")
        self.requests: list[list[int]] = []
        self.freed: list[int] = []

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        """Some requests grow and new ones come, in one call."""
        old = [slots for slots in self.requests if data.draw(st.booleans())]
        batch = old + [[] for _ in range(data.draw(st.integers(0, 2)))]
        growth = [data.draw(st.integers(0, 2 * self.page_size + 1)) for _ in batch]
        needed = sum(
            self.pages(len(slots) + more) - self.pages(len(slots))
            for slots, more in zip(batch, growth, strict=True)
        )
        available = self.allocator.available_size()
        prefixes = [len(slots) for slots in batch]
        ends = [prefix + more for prefix, more in zip(prefixes, growth, strict=True)]
        last = [slots[-1] if slots else 0 for slots in batch]
        arguments = (ints(prefixes), ints(ends), ints(last), sum(growth))
        if needed * self.page_size > available:
            with pytest.raises(PoolExhausted):
                self.allocator.alloc_extend(*arguments)
            assert self.allocator.available_size() == available
            return
        slots = self.allocator.alloc_extend(*arguments).tolist()
        self.check_fresh(slots)
        for request, more in zip(batch, growth, strict=True):
            request += slots[:more]
            del slots[:more]
        self.requests += [request for request in batch[len(old) :] if request]

    @precondition(lambda self: self.requests)
    @rule()
    def decode(self) -> None:
        lens = ints([len(slots) + 1 for slots in self.requests])
        last = ints([slots[-1] for slots in self.requests])
        needed = sum(len(slots) % self.page_size == 0 for slots in self.requests)
        available = self.allocator.available_size()
        if needed * self.page_size > available:
            with pytest.raises(PoolExhausted):
                decoded(self.allocator, lens, last)
            assert self.allocator.available_size() == available
            return
        slots = decoded(self.allocator, lens, last).tolist()
        self.check_fresh(slots)
        for request, slot in zip(self.requests, slots, strict=True):
            request.append(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slots = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.allocator.free(torch.tensor(data.draw(st.permutations(slots))))
        self.freed = slots

    @rule(data=st.data())
    def free_what_is_not_held(self, data: st.DataObject) -> None:
        pages = {slot // self.page_size for slots in self.requests for slot in slots}
        strays = [slot for slot in self.freed if slot // self.page_size not in pages]
        strays += [0, -1, (NUM_PAGES + 1) * self.page_size]
        stray = data.draw(st.sampled_from(strays))
        available = self.allocator.available_size()
        with pytest.raises(InvalidInput):
            self.allocator.free(torch.tensor([*next(iter(self.requests), []), stray]))
        assert self.allocator.available_size() == available

    @invariant()
    def conserved(self) -> None:
        held = [slot for request in self.requests for slot in request]
        assert len(set(held)) == len(held)
        pages = sum(self.pages(len(request)) for request in self.requests)
        free = self.allocator.available_size() // self.page_size
        assert pages + free == NUM_PAGES

    @invariant()
    def contiguous_in_pages(self) -> None:
        for request in self.requests:
            for place, slot in enumerate(request):
                assert slot % self.page_size == place % self.page_size
                assert slot // self.page_size == request[place - place % self.page_size] // (
                    self.page_size
                )

    def teardown(self) -> None:
        for request in self.requests:
            self.allocator.free(torch.tensor(request))
        slots = self.allocator.alloc(NUM_PAGES * self.page_size).tolist()
        assert sorted(slots) == list(range(self.page_size, (NUM_PAGES + 1) * self.page_size))

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def check_fresh(self, slots: list[int]) -> None:
        held = {slot for request in self.requests for slot in request}
        assert held.isdisjoint(slots)
        assert all(self.page_size <= slot < (NUM_PAGES + 1) * self.page_size for slot in slots)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
