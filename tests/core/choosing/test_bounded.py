"""Questions that answer, raise and hang."""

from __future__ import annotations

import threading

from attnmux.core.choosing.find.devices import ask_each


def test_each_is_answered_in_its_place() -> None:
    def exits() -> list[int]:
        raise SystemExit(3)

    (first, none), (nothing, error), (last, _) = ask_each([lambda: [1], exits, lambda: [2, 3]], 5)
    assert (first, none, nothing, last) == ([1], None, (), [2, 3])
    assert isinstance(error, SystemExit)
    assert ask_each([], 5) == []


def test_one_that_is_abandoned_asks_nobody_else_when_it_wakes() -> None:
    woken, asked = threading.Event(), []

    def hangs() -> list[threading.Thread]:
        woken.wait()
        return [threading.current_thread()]

    def counts() -> list[threading.Thread]:
        asked.append(threading.current_thread())
        return asked

    before = set(threading.enumerate())
    (nothing, error), (answered, _) = ask_each([hangs, counts], 0.05)
    assert (nothing, str(error)) == ((), "no answer in 0.05 s")
    assert len(answered) == 1
    woken.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
    assert len(asked) == 1
