"""Ranks that compute together: the collectives of a process group, with typed errors.

Every call is collective: each rank of the group makes the same calls in the same order.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.distributed.errors import RankFailed

SECONDS = 60.0
"""How long a rank waits for the others by default."""

LEAVING_SECONDS = 2.0
"""How long a rank that ends waits for the others to end."""

ENDING_SECONDS = 30.0
"""How long the groups may take to end. Then the process ends without them."""

POLL_SECONDS = 2e-5

T = TypeVar("T")

# Renamed in torch 2.13, which warns of the old name
gather_tensors: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _leave(hosts: dist.ProcessGroup | None = None) -> None:
    """Destroy all groups: at the interpreter's end, after an error too.

    A thread of gloo's that outlives the interpreter may abort the process. NCCL frees its
    communicators only then, and waits for the other ranks to do so. hosts: by which ranks that have
    ended find each other. A rank that is alone aborts what it has under way.
    """
    if not dist.is_initialized():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher repeats a user's Ctrl-C
    # NCCL waits for graphs that have captured its collectives, too, and would do so for ever
    faulthandler.dump_traceback_later(ENDING_SECONDS, exit=True, file=2)
    gc.unfreeze()
    gc.collect()
    try:
        together = hosts and dist.barrier(hosts, async_op=True)
        together and together.wait(timedelta(seconds=LEAVING_SECONDS))
    except RuntimeError:  # gloo raises a bare one
        together = None
    if together is None and dist.group.WORLD is not None:
        dist.group.WORLD.abort()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pending:
    """Moves that were started. Their tensors must not be touched until `wait` returns."""

    what: str
    works: tuple[dist.Work, ...]
    seconds: float

    def wait(self) -> None:
        """Wait until the values are there.

        On CUDA only the current stream waits; kernels that were queued before go on meanwhile.
        Raises RankFailed as a collective does.
        """

        def wait() -> None:
            for work in self.works:
                work.wait()

        _explained(self.what, self.seconds, wait)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankGroup:
    """Some ranks of `torch.distributed`, as one of them sees them.

    A rank that fails, or that does not arrive within `seconds`, raises RankFailed on the others.
    On CUDA, collectives are queued on the current stream as kernels are; there the host learns of a
    failure when it next waits, see `wait_for`.
    """

    devices: dist.ProcessGroup
    """Moves tensors on `device`: NCCL on CUDA, gloo on a CPU."""
    hosts: dist.ProcessGroup
    """Moves text between the hosts of the same ranks, by gloo."""
    device: torch.device
    seconds: float = SECONDS

    @classmethod
    def start(cls, device_type: str, *, seconds: float = SECONDS) -> RankGroup:
        """All ranks that a launcher such as torchrun started; rank n of a host gets device n.

        The group ends with the process. Raises InvalidInput in a process that no launcher started,
        and RankFailed if the others do not arrive in time.
        """
        starts = not dist.is_initialized()
        if starts:
            if not dist.is_torchelastic_launched():
                expected = "processes that torchrun started"
                raise InvalidInput("ranks", got="a single process", expected=expected)
            options: dict[str, Any] = {}
            if device_type != "cpu":
                index = dist.get_node_local_rank(fallback_rank=0)
                torch.accelerator.set_device_index(index)
                options["device_id"] = torch.device(device_type, index)
            _explained(
                "starting",
                seconds,
                lambda: dist.init_process_group(timeout=timedelta(seconds=seconds), **options),
            )
            atexit.register(_leave)
        device = torch.device(device_type)
        if device_type != "cpu":
            device = torch.device(device_type, torch.accelerator.current_device_index())
        group = cls.of(dist.group.WORLD, device, seconds=seconds)
        if starts:
            atexit.register(_leave, group.hosts)  # the other then has nothing to do
        return group

    @classmethod
    def of(
        cls, devices: dist.ProcessGroup | None, device: torch.device, *, seconds: float = SECONDS
    ) -> RankGroup:
        """An engine's own group. Every rank of the whole job calls it, since it makes another one.

        Raises InvalidInput without a group, and RankFailed as `start` does.
        """
        if devices is None:
            raise InvalidInput("devices", got=None, expected="a group that this rank belongs to")
        ranks = dist.get_process_group_ranks(devices)
        hosts = _explained(
            "making a group of hosts",
            seconds,
            lambda: dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=seconds)),
        )
        if not isinstance(hosts, dist.ProcessGroup):  # a number, on ranks outside the group
            raise InvalidInput("devices", got=ranks, expected="a group that this rank belongs to")
        return cls(devices=devices, hosts=hosts, device=device, seconds=seconds)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.devices.rank()

    @property
    def size(self) -> int:
        return self.devices.size()

    def exchange(self, said: T) -> list[T]:
        """The values of all ranks, in their order: text, or another value that can be pickled.

        It waits for all of them, on the host.
        """
        values: list[Any] = [None] * self.size

        def gather() -> None:
            dist.all_gather_object(values, said, group=self.hosts)

        self._run("exchanging text", gather)
        return values

    def exchange_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, as many on each and within int64, in the ranks' order.

        It waits for all of them, on the host, and is the cheapest exchange between hosts.
        """
        mine = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._run("exchanging numbers", lambda: dist.all_gather(found, mine, group=self.hosts))
        return [tensor.tolist() for tensor in found]

    def tell(self, text: str, *, root: int = 0) -> str:
        """The text of rank `root`, on every rank."""
        texts = [text]
        self._run(
            "hearing from one rank",
            lambda: dist.broadcast_object_list(texts, group=self.hosts, group_src=root),
        )
        return texts[0]

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """[size, *shape]: the values of every rank, all of the same shape."""
        out = values.new_empty((self.size, *values.shape))
        self._run(
            "gathering",
            lambda: gather_tensors(out.view(-1), values.contiguous().view(-1), group=self.devices),
        )
        return out

    def all_to_all(self, values: torch.Tensor) -> torch.Tensor:
        """[size, ...]: from every rank the part [n] of its values [size, ...] that is for rank n,
        this one."""
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        self._run(
            "exchanging parts",
            lambda: dist.all_to_all_single(out, values.contiguous(), group=self.devices),
        )
        return out

    def all_reduce(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce over the ranks, in place. Returns `values`."""
        self._run("reducing", lambda: dist.all_reduce(values, op=op, group=self.devices))
        return values

    def reduce_scatter(self, values: torch.Tensor) -> torch.Tensor:
        """[...]: the sum over the ranks of part [n] of their values [size, ...], n being this
        rank."""
        out = values.new_empty(values.shape[1:])
        self._run(
            "reducing parts",
            lambda: dist.reduce_scatter_tensor(
                out.view(-1), values.contiguous().view(-1), group=self.devices
            ),
        )
        return out

    def broadcast(self, values: torch.Tensor, *, root: int = 0) -> torch.Tensor:
        """The values of rank `root`, written over those of the others. Returns `values`."""
        self._run(
            "hearing from one rank",
            lambda: dist.broadcast(values, group=self.devices, group_src=root),
        )
        return values

    def wait_for(self, event: torch.Event) -> None:
        """Wait until the device has reached an event. Raises RankFailed after `seconds`, as when
        a collective before it waits for a rank that has ended."""
        end = time.monotonic() + self.seconds
        while not event.query():
            if time.monotonic() > end:
                reason = "the device still waits"
                raise RankFailed("waiting for the device", reason=reason, seconds=self.seconds)
            time.sleep(POLL_SECONDS)

    def start_broadcasts(self, values: Sequence[torch.Tensor], roots: Sequence[int]) -> Pending:
        """Start to write each value of the rank in `roots` over those of the others.

        values: contiguous, each of a size of its own, the same on all ranks. All of them move at
        once: on CUDA in one kernel, on a stream of NCCL's own, after the kernels that are queued on
        the current one. A second kernel would have to wait if attention fills the device.
        """
        moves = [
            dist.P2POp(
                dist.isend if root == self.rank else dist.irecv,
                value,
                group=self.devices,
                group_peer=peer,
            )
            for value, root in zip(values, roots, strict=True)
            for peer in (range(self.size) if root == self.rank else (root,))
            if peer != self.rank
        ]
        what = "moving between ranks"
        works = self._run(what, lambda: dist.batch_isend_irecv(moves)) if moves else []
        return Pending(what=what, works=tuple(works), seconds=self.seconds)

    def _run(self, what: str, call: Callable[[], T]) -> T:
        return _explained(what, self.seconds, call)


def _explained(what: str, seconds: float, call: Callable[[], T]) -> T:
    """Turn errors of torch.distributed into RankFailed."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, EOFError) as error:  # gloo raises a bare RuntimeError, pickle EOFError
        raise RankFailed(what, reason=AttnmuxError.in_brief(error), seconds=seconds) from error
