"""Starts the ranks of a command on this machine, and joins them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from attnmux.core import InvalidInput
from attnmux.distributed import RankFailed, RankGroup

SECONDS = 600.0
"""How long a rank waits for another that still loads its weights."""


def is_rank() -> bool:
    """Whether a launcher such as torchrun started this process."""
    return bool(torch.distributed.is_torchelastic_launched())


def run_ranks(arguments: Sequence[str], size: int, stdout: TextIO) -> int:
    """Run `python ARGUMENTS` in `size` processes that print to `stdout`. Returns their exit status.

    When one fails, the others are ended. Raises RankFailed for one that a signal ended.
    """
    # Its own report of a failure repeats what the failed rank has printed
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        with _descriptor_1(stdout):
            elastic_launch(config, sys.executable)(*arguments)
    except SignalException as error:
        if error.sigval is not signal.SIGINT:
            raise
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise RankFailed(f"rank {rank}", reason=f"ended by {name}", seconds=0) from None
        return int(failure.exitcode)
    return 0


@contextmanager
def _descriptor_1(stdout: TextIO) -> Iterator[None]:
    """Let children, which inherit descriptor 1, write to `stdout`: the command keeps that
    descriptor from plugins."""
    stdout.flush()
    before = os.dup(1)
    try:
        os.dup2(stdout.fileno(), 1)
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def join(device_type: str, size: int | None, option: str) -> RankGroup:
    """The group of this process. Raises InvalidInput unless it has `size` ranks, if given by an
    option."""
    group = RankGroup.start(device_type, seconds=SECONDS)
    if size not in (None, group.size):
        expected = f"{group.size}, the processes that were started"
        raise InvalidInput(option, got=size, expected=expected)
    return group
