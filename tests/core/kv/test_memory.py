from __future__ import annotations

import mmap

import pytest
import torch

from attnmux.core import PoolExhausted
from attnmux.core.contract import memory

GIGABYTE = 2**30


def allocate(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return memory.allocate_zeroed(
        shapes, dtype=torch.float32, device=torch.device("cpu"), what="room", hint="ask for less"
    )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 8 GiB free and no control group."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(
        f"MemTotal:       33554432 kB\nMemAvailable:   {8 * 2**20} kB\nHugePages_Total: 0\n"
    )
    return tmp_path


def test_free_memory_of_the_machine(machine):
    assert memory.free_memory(torch.device("cpu")) == 8 * GIGABYTE


def test_a_control_group_may_have_less(machine):
    (machine / "memory.max").write_text(f"{4 * GIGABYTE}\n")
    (machine / "memory.current").write_text(f"{3 * GIGABYTE}\n")
    (machine / "memory.stat").write_text(f"anon 5\ninactive_file {GIGABYTE}\n")
    assert memory.free_memory(torch.device("cpu")) == 2 * GIGABYTE


def test_a_control_group_without_a_limit(machine):
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text(f"{3 * GIGABYTE}\n")
    assert memory.free_memory(torch.device("cpu")) == 8 * GIGABYTE


def test_where_nothing_tells(machine):
    (machine / "meminfo").unlink()
    assert memory.free_memory(torch.device("cpu")) is None
    assert [tensor.shape for tensor in allocate([(2, 3), (4,)])] == [(2, 3), (4,)]


def test_many_small_tensors_are_refused_as_one(machine):
    (machine / "meminfo").write_text("MemAvailable: 4 kB\n")
    with pytest.raises(PoolExhausted, match=r"room, in bytes: 8000 wanted, 4096 available.*less"):
        allocate([(500,)] * 4)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone is asked")
def test_large_tensors_of_a_cpu_begin_with_a_huge_page(machine):
    small, large, other = allocate([(5,), (3, 2**19), (2**19 + 1,)])
    assert small.shape == (5,)
    for tensor in (large, other):
        assert tensor.data_ptr() % memory.HUGE_PAGE == 0
        assert tensor.is_contiguous()
        assert not tensor.any()
    large.fill_(1)
    assert large.sum() == large.numel()
    assert not other.any()


def test_the_allocator_has_the_last_word(machine):
    (machine / "meminfo").unlink()
    with pytest.raises(PoolExhausted, match="ask for less") as caught:
        allocate([(2**45,)])
    assert caught.value.wanted == 2**47
    assert isinstance(caught.value.__cause__, RuntimeError | OSError)


def test_other_errors_of_torch_pass(monkeypatch):
    def broken(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError("device is gone")

    monkeypatch.setattr(torch, "zeros", broken)
    with pytest.raises(RuntimeError, match="device is gone"):
        allocate([(1,)])
