"""Groups of ranks: collectives, and ranks that fail."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attnmux.core import InvalidInput
from attnmux.distributed import RankFailed, RankGroup
from attnmux.emulators.ranks import die, end_ranks, run_ranks


def collectives(group: RankGroup) -> dict[str, object]:
    mine = torch.arange(3) + 10 * group.rank
    parts = torch.tensor([[100 * group.rank + n] for n in range(group.size)])
    started = [mine.clone() for _ in range(group.size)]
    uneven = [torch.full((n + 1,), group.rank) for n in range(group.size)]
    ranks = range(group.size)
    for pending in [group.start_broadcasts(each, ranks) for each in (started, uneven)]:
        pending.wait()
    group.start_broadcasts([], []).wait()
    return {
        "started": torch.stack(started).tolist(),
        "uneven": [each.tolist() for each in uneven],
        "texts": group.exchange(f"rank {group.rank}"),
        "told": group.tell(f"from {group.rank}", root=1),
        "gathered": group.all_gather(mine).tolist(),
        "parts": group.all_to_all(parts).tolist(),
        "numbers": group.exchange_numbers([group.rank, -(2**40)]),
        "sum of parts": group.reduce_scatter(torch.arange(group.size * 2).view(-1, 2)).tolist(),
        "sum": group.all_reduce(mine.clone()).tolist(),
        "heard": group.broadcast(mine.clone(), root=1).tolist(),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(tmp_path: Path, size: int) -> None:
    found = run_ranks(collectives, size, tmp_path)
    for rank, each in enumerate(found):
        assert each["texts"] == [f"rank {n}" for n in range(size)]
        assert each["told"] == "from 1"
        assert each["gathered"] == [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(size)]
        assert each["parts"] == [[100 * n + rank] for n in range(size)]
        assert each["numbers"] == [[n, -(2**40)] for n in range(size)]
        assert each["sum of parts"] == [2 * rank * size, (2 * rank + 1) * size]
        assert each["started"] == each["gathered"]
        assert each["uneven"] == [[n] * (n + 1) for n in range(size)]
        assert each["sum"] == [sum(10 * n + i for n in range(size)) for i in range(3)]
        assert each["heard"] == [10, 11, 12]


def die_after_meeting(group: RankGroup) -> None:
    """End rank 1 once rank 0 has its group, which may take it longer than rank 1."""
    group.exchange_numbers([0])
    if group.rank == 1:
        time.sleep(0.5)
        die()


def one_dies(group: RankGroup) -> tuple[str, float]:
    die_after_meeting(group)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="another rank ended or did not arrive within 5 s") as info:
        group.all_reduce(torch.ones(1))
    return str(info.value), time.monotonic() - began


def test_a_killed_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    first, second = end_ranks(one_dies, 2, tmp_path, seconds=5.0)
    assert second.exit_code == -9
    assert not first.error, first.error
    message, seconds = first.value
    assert message.startswith("reducing: ")
    assert seconds < 10


def one_dies_under_way(group: RankGroup) -> float:
    die_after_meeting(group)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="moving between ranks: another rank ended"):
        group.start_broadcasts([torch.ones(1)], [1]).wait()
    return time.monotonic() - began


def one_sends_nothing(group: RankGroup) -> float:
    began = time.monotonic()
    if group.rank == 0:
        with pytest.raises(RankFailed, match="did not arrive within 1 s"):
            group.start_broadcasts([torch.ones(1)], [1]).wait()
    else:
        time.sleep(2)
    return time.monotonic() - began


@pytest.mark.parametrize(("function", "seconds"), [(one_dies_under_way, 5), (one_sends_nothing, 1)])
def test_moves_that_do_not_come_are_an_error(tmp_path: Path, function, seconds) -> None:
    first, _ = end_ranks(function, 2, tmp_path, seconds=seconds)
    assert not first.error, first.error
    assert first.value < 10


def one_is_late(group: RankGroup, delay: float) -> list[int]:
    if group.rank == 1:
        time.sleep(delay)
    return group.all_reduce(torch.ones(2, dtype=torch.int64)).tolist()


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(one_is_late, 2, tmp_path, 2.0, seconds=8.0) == [[2, 2], [2, 2]]


def test_a_rank_that_is_too_late_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for result in end_ranks(one_is_late, 2, tmp_path, 4.0, seconds=1.0):
        assert "RankFailed: reducing: another rank ended or did not arrive within 1 s" in (
            result.error
        )


def test_one_process_is_no_group() -> None:
    with pytest.raises(InvalidInput, match="processes that torchrun started, got a single process"):
        RankGroup.start("cpu")


ENDS = """
import atexit, signal, sys, time
import torch, torch.distributed as dist

atexit.register(lambda: sys.stderr.write(f"destroyed {not dist.is_initialized()}\\n"))
from attnmux.distributed import RankGroup

group = RankGroup.start("cpu", seconds=20)
group.all_reduce(torch.ones(1))
end = sys.argv[1]
if end == "error" and group.rank == 1:
    raise SystemExit("it failed")
if end == "interrupt":
    signal.raise_signal(signal.SIGINT)
if end == "error":
    group.all_reduce(torch.ones(1))
"""


@pytest.mark.turns(3, suite="ranks")
@pytest.mark.parametrize(
    ("end", "code", "destroyed"), [("success", 0, 2), ("error", 1, 1), ("interrupt", 1, 2)]
)
def test_every_end_destroys_the_group(tmp_path: Path, end: str, code: int, destroyed: int) -> None:
    """A rank that fails leaves at once; torchrun ends the other, which may still wait for it."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    began = time.monotonic()
    done = subprocess.run([*command, str(script), end], capture_output=True, text=True, timeout=90)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("destroyed True") >= destroyed, done.stderr
    assert "destroyed False" not in done.stderr
    assert "has NOT been destroyed" not in done.stderr
    assert time.monotonic() - began < 60
