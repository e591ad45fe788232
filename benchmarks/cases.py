"""Rows of the benchmarks' tables: a workload with shapes, and the options that scripts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from attnmux.core import Platform, Request, torch_dtype
from attnmux.testing.bench import Step, Workload, make_step
from attnmux.testing.bench.shapes import value_bytes

DIM, RANK, ROPE = 128, 512, 64
"""Width of a dense head, of a latent, and of its rotary part."""
HOPPER = Platform.parse("nvidia:sm90,cuda=13.0")
COLD_BYTES = 256e6
"""K and V of all layers together: several times a GPU's cache."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload with the shapes of a model's attention, of Llama 8B unless given."""

    workload: Workload
    page_size: int = 16
    kind: str = "mha"
    """Or "mla", or "nsa": with DeepSeek's latent, one KV head and `q_heads` query heads."""
    q_heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    """As `dtype` unless given."""
    max_context_len: int | None = None
    """What the engine allows, as wide as page tables in graphs are; the longest request's keys
    unless given."""
    topk: int = 0
    """Keys that an indexer picks for each token of kind "nsa"."""
    is_apart: bool = False
    """Whether a latent's Q comes as two tensors instead of the parts of one row."""

    def __str__(self) -> str:
        work, room = self.workload, ""
        if self.max_context_len:
            room = f" of {self.max_context_len}"
        if work.phase == "decode":
            shortest = f"{min(work.lens)} to " if work.lens else ""
            size = f"decode bs {work.batch_size}, ctx {shortest}{work.keys}{room}"
        elif work.batch_size == 1 and not work.prefix:
            size = f"prefill of {work.new}{room}"
        else:
            size = f"extend {work.batch_size} x {work.new} on {work.prefix}{room}"
        parts = [size, f"page {self.page_size}"]
        if self.kind != "mha":
            parts.append(f"{self.kind} of {self.q_heads} heads")
        elif (self.q_heads, self.kv_heads) != (32, 8):
            parts.append(f"{self.q_heads}/{self.kv_heads} heads")
        parts += [f"top {self.topk}"] * bool(self.topk) + ["Q apart"] * self.is_apart
        return ", ".join(parts)

    @property
    def is_decode(self) -> bool:
        return self.workload.phase == "decode"

    @property
    def request(self) -> Request:
        shapes: dict[str, Any] = {"num_kv_heads": self.kv_heads, "head_dim": DIM}
        if self.kind != "mha":
            shapes = {"num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128}
            shapes |= {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
        return Request(
            kind=self.kind,
            num_q_heads=self.q_heads,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype or self.dtype,
            page_size=self.page_size,
            **shapes,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V in one layer that a step may read; in sparse decode, the picked ones."""
        itemsize = value_bytes(torch_dtype(self.kv_dtype or self.dtype))
        if self.topk and self.is_decode:
            return round(self.workload.batch_size * self.topk * (RANK + ROPE) * itemsize)
        return self.workload.stored_bytes(self.request, itemsize)

    def step(self, device: torch.device, num_layers: int | None = None) -> Step:
        """The case in pools of its own: 2 layers, on a GPU as many as keep its cache cold."""
        if num_layers is None:
            is_gpu = device.type == "cuda"
            num_layers = max(2, -(-int(COLD_BYTES) // self.kv_bytes)) if is_gpu else 2
        step = make_step(
            self.workload,
            self.request,
            device,
            num_layers=num_layers,
            max_context_len=self.max_context_len,
            topk=self.topk,
        )
        if not self.is_apart or step.q_rope is None:
            return step
        return replace(step, q=step.q.contiguous(), q_rope=step.q_rope.contiguous())


def decode(batch_size: int, ctx: int, **shapes: Any) -> Case:  # noqa: ANN401  # fields of Case by name
    """A decode step; `ctx` counts the new token."""
    work = Workload(phase="decode", batch_size=batch_size, prefix=ctx - 1)
    return Case(workload=work, **shapes)


def extend(batch_size: int, new: int, prefix: int = 0, **shapes: Any) -> Case:  # noqa: ANN401  # fields of Case by name
    work = Workload(phase="extend", batch_size=batch_size, new=new, prefix=prefix)
    return Case(workload=work, **shapes)


def rounds_option(default: int) -> Callable[[F], F]:
    return click.option(
        "--rounds", type=click.IntRange(1), default=default, show_default=True, help="Of each row."
    )


def json_option(command: F) -> F:
    kind = click.Path(path_type=Path)
    return click.option("--json", "path", type=kind, help="Write the figures to a file too.")(
        command
    )


def only_option(command: F) -> F:
    text = "Run only the workloads whose name contains this."
    return click.option("--only", default="", help=text)(command)


def threads_option(command: F) -> F:
    """Set torch's threads before the command runs."""

    def set_threads(_: click.Context, __: click.Parameter, value: int | None) -> None:
        if value is not None:
            torch.set_num_threads(value)

    return click.option(
        "--threads",
        type=click.IntRange(1),
        callback=set_threads,
        expose_value=False,
        help="Threads of torch. [default: torch's choice]",
    )(command)


def dry_run_option(text: str) -> Callable[[F], F]:
    return click.option("--dry-run", is_flag=True, help=f"{text}: figures mean nothing.")
