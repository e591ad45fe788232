"""The compiled kernel: `flex_attention` for tiles of queries over blocks of keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    flex_attention,
)

from attnmux.core import AttnmuxError, BackendFailed

MOST_REACH = 2**31 - 1
"""Elements of K or V, from the first to the last, on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSpec:
    """The shapes and features that a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    num_tiles: int
    tile_size: int
    """Queries of a tile."""
    group: int
    """Query heads per KV head. Each is a row of the tile."""
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    latent: bool
    """Whether V is the first `v_head_dim` columns of K."""
    block: int
    listed: int
    """The most blocks in the list of a tile."""
    capacity: int
    """The most blocks in `columns`."""
    has_items: bool
    """Whether `KernelInput.hidden` is given."""
    mask_room: int
    """Elements of the padded custom mask; 0 without one."""
    split: bool
    """Whether blocks that need no mask are listed separately."""
    capped: bool
    biased: bool
    """Whether the layer has slopes of ALiBi."""
    relative: int
    """Columns of the layer's table of relative position biases; 0 without one."""
    has_place: bool
    """Whether `KernelInput.place` is given."""
    lse: bool

    @property
    def reach(self) -> int:
        """See `LayerSpec.relative_reach`."""
        return self.relative // 2 if self.has_place else max(self.relative - 1, 0)

    @property
    def num_biases(self) -> int:
        """How many of the layer's numbers are slopes or values of the table."""
        return self.num_kv_heads * self.group * (self.relative or int(self.biased))

    @property
    def rows(self) -> int:
        return self.group * self.tile_size

    @property
    def kernel_options(self) -> FlexKernelOptions:
        """The tile sizes of Triton's kernels: they divide a block and fit an SM's shared memory."""
        if self.device.type == "cpu":
            return {}
        row_bytes = 2 * max(self.qk_head_dim, self.v_head_dim) * self.dtype.itemsize
        keys = 64
        while keys > 16 and (self.block % keys or keys * row_bytes > 2**15):
            keys //= 2
        return {"BLOCK_M": min(64, self.block_rows), "BLOCK_N": keys}

    @property
    def block_rows(self) -> int:
        """Rows of a block of queries: on a GPU a power of two from 16, for tensor cores."""
        if self.device.type == "cpu":
            return self.rows
        return max(16, 1 << (self.rows - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelInput:
    """The kernel's arguments that all layers of a plan share."""

    columns: torch.Tensor
    """[capacity] int32: the first column of each block."""
    first: torch.Tensor
    end: torch.Tensor
    """[N, tile_size] int32, both: the range of columns that each query sees, `end` excluded."""
    place: torch.Tensor | None
    """See `Ranges`."""
    num_partial: torch.Tensor
    """[N, 1, 1] int32: the used length of each list of partial blocks."""
    partial: torch.Tensor
    """[N, 1, 1, reach] int32: the blocks that need the mask, see `block_list`."""
    num_whole: torch.Tensor | None
    whole: torch.Tensor | None
    """Like the partial ones, for blocks that need no mask; None unless they are separate."""
    hidden: tuple[torch.Tensor, torch.Tensor] | None
    mask: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Both as on `Ranges`."""


def check_reach(device: torch.device, elements: int, what: str) -> None:
    """Refuse K or V if a GPU's kernel would read wrong elements of them.

    elements: from the first to the last. Inductor's templates (`load_checked_2d` in
    torch/_inductor/kernel/flex) multiply rows by strides in the index type of the tensors that the
    kernel is compiled with, which are small: int32. Raises BackendFailed for more than MOST_REACH.
    """
    if device.type != "cpu" and elements > MOST_REACH:
        raise BackendFailed(
            "cpu/flex_attention",
            f"{what} has {elements:,} elements from its first to its last, and torch's kernel "
            f"counts at most {MOST_REACH:,} on a GPU",
            hint="make the KV pool smaller, or choose another backend",
        )


def heads_first(cache: torch.Tensor) -> torch.Tensor:
    """[S, Hkv, D] as [1, Hkv, S, D], a view."""
    return cache.transpose(0, 1).unsqueeze(0)


def list_room(device: torch.device, num_tiles: int, listed: int, capacity: int) -> int:
    """The number of elements that the lists of all tiles take."""
    return (num_tiles - 1) * listed + _reach(device, listed, capacity)


def block_list(memory: torch.Tensor, num_tiles: int, listed: int, capacity: int) -> torch.Tensor:
    """A view [N, 1, 1, reach] of `list_room` elements. A tile owns `listed` of its row."""
    reach = _reach(memory.device, listed, capacity)
    return memory.as_strided((num_tiles, 1, 1, reach), (listed, listed, listed, 1))


def _reach(device: torch.device, listed: int, capacity: int) -> int:
    """The length of a list as the kernel sees it.

    The C++ kernel expects room for every block of the pool. The lists then overlap, in parts that
    it does not read.
    """
    return max(listed, capacity) if device.type == "cpu" else listed


Result = tuple[torch.Tensor, torch.Tensor | None]
"""Out [N, Hkv, rows, Dv], and LSE [N, Hkv, rows] float32 if `KernelSpec.lse`, else None."""


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, KernelInput], Result]
"""(q [N, Hkv, rows, D], k [1, Hkv, S, D], v [1, Hkv, S, Dv], the layer's numbers, the plan's).

The numbers are float32: scale, cap and, if `KernelSpec.biased`, the slope of each query head, or
the rows of a table of `KernelSpec.relative` columns."""


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Disable autograd and inference tensors, since a kernel is compiled for one kind of tensor."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@functools.cache
def kernel(spec: KernelSpec) -> Kernel:
    """The compiled kernel. All backends of the process share it.

    Raises BackendFailed if it does not compile.
    """
    compiled = torch.compile(_function(spec), dynamic=False, fullgraph=True)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        numbers: torch.Tensor,
        given: KernelInput,
    ) -> Result:
        # At each call: after a reset of Dynamo it is this call that compiles.
        torch._dynamo.mark_dynamic(k, 2)
        torch._dynamo.mark_dynamic(v, 2)
        result: Result = compiled(
            q,
            k,
            v,
            numbers,
            given.columns,
            given.first,
            given.end,
            given.place,
            given.num_partial,
            given.partial,
            given.num_whole,
            given.whole,
            given.hidden,
            given.mask,
        )
        return result

    try:
        with plain_tensors():
            run(*_tiny(spec))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Dynamo, Inductor, Triton and a compiler each raise their own
        raise BackendFailed(
            "cpu/flex_attention",
            f"torch.compile(flex_attention) failed: {AttnmuxError.in_brief(error, lines=2)}",
            hint="a CPU needs AVX2 and a C++ compiler, a GPU Triton; or choose another backend",
        ) from error
    return run


def _function(spec: KernelSpec) -> Callable[..., Result]:
    block, tile_size, room = spec.block, spec.tile_size, spec.mask_room

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        numbers: torch.Tensor,
        columns: torch.Tensor,
        first: torch.Tensor,
        end: torch.Tensor,
        place: torch.Tensor | None,
        num_partial: torch.Tensor,
        partial: torch.Tensor,
        num_whole: torch.Tensor | None,
        whole: torch.Tensor | None,
        hidden: tuple[torch.Tensor, torch.Tensor] | None,
        mask: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> Result:
        def sees(
            tile: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            query = row % tile_size
            column = columns[key // block] + key % block
            seen = (column >= first[tile, query]) & (column < end[tile, query])
            if hidden is not None:
                after_prefix = column >= hidden[0][tile, query]
                seen = seen & ~(after_prefix & (column < hidden[1][tile, query]))
            if mask is not None:
                bit = (mask[1][tile, query] + column).clamp(0, room - 1)
                seen = seen & (mask[0][bit] | (column < mask[2][tile, query]))
            return seen

        def logit(
            score: torch.Tensor,
            tile: torch.Tensor,
            head: torch.Tensor,
            row: torch.Tensor,
            key: torch.Tensor,
        ) -> torch.Tensor:
            scaled = score * numbers[0]
            if spec.capped:
                return torch.tanh(scaled / numbers[1]) * numbers[1]
            if not spec.num_biases:
                return scaled
            query, of_head = row % tile_size, head * spec.group + row // tile_size
            # Without a mask a query sees itself last.
            position = end[tile, query] - 1 if place is None else place[tile, query]
            distance = columns[key // block] + key % block - position
            if spec.biased:
                return scaled + numbers[2 + of_head] * distance
            column = distance.clamp(-spec.reach, spec.relative - 1 - spec.reach) + spec.reach
            return scaled + numbers[2 + of_head * spec.relative + column]

        block_mask = BlockMask.from_kv_blocks(
            num_partial,
            partial,
            num_whole,
            whole,
            BLOCK_SIZE=(spec.block_rows, block),
            mask_mod=sees,
            seq_lengths=(q.shape[2], k.shape[2]),
            compute_q_blocks=False,
        )
        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod=logit,
            block_mask=block_mask,
            scale=1.0,
            kernel_options=spec.kernel_options,
            return_aux=AuxRequest(lse=spec.lse),
        )
        return out, aux.lse

    # Dynamo limits how often it compiles one code object, so each spec gets its own.
    attend.__code__ = attend.__code__.replace()
    return attend


def _tiny(
    spec: KernelSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, KernelInput]:
    """The smallest arguments of the spec's shapes: two blocks of keys, and tiles that read none."""
    zeros = functools.partial(torch.zeros, device=spec.device)
    shape = (spec.num_tiles, spec.num_kv_heads, spec.rows, spec.qk_head_dim)
    q = zeros(shape, dtype=spec.dtype)
    k = zeros((2 * spec.block, spec.num_kv_heads, spec.qk_head_dim), dtype=spec.dtype)
    v = k[..., : spec.v_head_dim]
    if not spec.latent:
        v = zeros((2 * spec.block, spec.num_kv_heads, spec.v_head_dim), dtype=spec.dtype)
    of_queries = functools.partial(zeros, (spec.num_tiles, spec.tile_size))
    counts = zeros((spec.num_tiles, 1, 1), dtype=torch.int32)

    def lists() -> torch.Tensor:
        memory = zeros(
            list_room(spec.device, spec.num_tiles, spec.listed, spec.capacity), dtype=torch.int32
        )
        return block_list(memory, spec.num_tiles, spec.listed, spec.capacity)

    kernel_input = KernelInput(
        columns=zeros(spec.capacity, dtype=torch.int32),
        first=of_queries(dtype=torch.int32),
        end=of_queries(dtype=torch.int32),
        place=of_queries(dtype=torch.int32) if spec.has_place else None,
        num_partial=counts,
        partial=lists(),
        num_whole=counts.clone() if spec.split else None,
        whole=lists() if spec.split else None,
        hidden=(of_queries(dtype=torch.int32), of_queries(dtype=torch.int32))
        if spec.has_items
        else None,
        mask=(
            zeros(spec.mask_room, dtype=torch.bool),
            of_queries(dtype=torch.int64),
            of_queries(dtype=torch.int32),
        )
        if spec.mask_room
        else None,
    )
    return q, heads_first(k), heads_first(v), zeros(2 + spec.num_biases) + 1, kernel_input
