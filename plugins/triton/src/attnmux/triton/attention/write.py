"""Writes the new tokens' K and V to their slots, in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnmux.core import KVPool, torch_dtype
from attnmux.core.plugin import check_tensor
from attnmux.triton.kernels.write import write_kv
from attnmux.triton.kernels.write_four_bits import write_four_bits
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher, overlaps_launches
from attnmux.triton.launches.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import BackendContext, LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """An 8-bit float."""

    mantissa: int
    """Bits of it; 0 if values are stored unchanged."""
    bias: int
    """Bias of the exponent."""
    largest: int
    """The largest finite value, as bits."""
    nan: int = 0x7F
    """NaN, as bits. If it is 0x80, zero has no sign."""


UNCHANGED = Format(mantissa=0, bias=0, largest=0)
FORMATS = {
    torch.float8_e4m3fn: Format(mantissa=3, bias=7, largest=0x7E),
    torch.float8_e5m2: Format(mantissa=2, bias=15, largest=0x7B),
    torch.float8_e4m3fnuz: Format(mantissa=3, bias=8, largest=0x7F, nan=0x80),
}
MOST_COLUMNS = 1024
"""Columns of a tile."""
TILE = 2048
"""Values of a tile."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerWriter:
    """Writes a layer's rows to the pool's memory, in the two parts that a call has."""

    pool: KVPool
    names: tuple[str, str]
    """The parts' names in the pool's own methods."""
    first: torch.Tensor
    """[slots, H, D]: K's memory, or in MLA the latent's."""
    second: torch.Tensor
    """[slots, H, D]: V's memory, or in MLA the rotary key's."""
    format: Format
    """Format of the pool's dtype: memory of one of FORMATS is viewed as bytes."""
    slot_map: torch.Tensor | None
    """See `KVPool.slot_map`."""
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """Scales of the blocks of 4-bit floats, as bytes, [slots, H, n]; `first` and `second` are then
    bytes of two values."""
    launcher: Launcher = field(default_factory=Launcher)
    _bound: dict[tuple[float, float], BoundKernel] = field(default_factory=dict, init=False)
    """By scales."""

    @classmethod
    def of(
        cls,
        pool: KVPool,
        layer: LayerSpec,
        loc: torch.Tensor,
        k: torch.Tensor,
        *,
        is_latent: bool,
        launcher: Launcher | None = None,
    ) -> LayerWriter:
        """A writer for rows like k at slots like loc.

        Raises InvalidInput in the same cases as the pool: for a layer that it does not store, for K
        and V in a pool of latents or the reverse, for dtypes, devices and scales.
        """
        check_tensor("loc", loc, ("T",), None, torch.int64)
        first, second = pool.get_kv_buffer(layer.layer_id)
        if is_latent:
            row, rank = first, second.shape[-1]
            first, second = row[..., :rank], row[..., rank:]
        scales = pool.get_scale_buffers(layer.layer_id)
        # Writing no tokens runs the pool's checks.
        nowhere = loc.new_empty(0)
        none = [k.new_empty((0, *row_shape(buffer))) for buffer in (first, second)]
        if is_latent:
            pool.set_mla_kv_buffer(layer, nowhere, none[0], none[1], layer.k_scale)
        else:
            pool.set_kv_buffer(layer, nowhere, none[0], none[1], layer.k_scale, layer.v_scale)
        names = ("k_nope", "k_rope") if is_latent else ("k", "v")
        known = FORMATS.get(first.dtype)
        if known is not None or scales is not None:
            first, second = first.view(torch.uint8), second.view(torch.uint8)
        return cls(
            pool=pool,
            names=names,
            first=first,
            second=second,
            format=known or UNCHANGED,
            slot_map=pool.slot_map(layer.layer_id),
            scales=None
            if scales is None
            else (scales[0].view(torch.uint8), scales[1].view(torch.uint8)),
            launcher=launcher or Launcher(),
        )

    def write(
        self, layer: LayerSpec, loc: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> None:
        """Write rows [T, H, D] to slots loc [T] int64, bit for bit as the pool's own method does.

        Slots that the pool does not have are skipped. Does not synchronise.
        Raises InvalidInput, before anything is written, for shapes, dtypes, devices and scales
        that do not fit.
        """
        check_tensor("loc", loc, ("T",), None, torch.int64)
        num_tokens = len(loc)
        for name, rows, buffer in zip(
            self.names, (first, second), (self.first, self.second), strict=True
        ):
            shape = (num_tokens, *self._row_shape(buffer))
            check_tensor(name, rows, shape, loc.device, *KVPool.ACTIVATION_DTYPES)
        scales = self.pool.read_scales(layer.k_scale, layer.v_scale)
        slots = loc if self.slot_map is not None else self.pool.translate(loc, layer.layer_id)
        if not num_tokens:
            return
        bound = self._bound.get(scales)
        if bound is None:
            bound = self._bound[scales] = self._bind(scales)
        block_t, block_w, widest = self._blocks()
        bound(
            (-(-num_tokens // block_t), -(-widest // block_w), 1),
            (first, second, slots),
            (*first.stride(), *second.stride(), slots.stride(0)),
            (num_tokens,),
            (first.dtype, second.dtype),
        )

    def _row_shape(self, buffer: torch.Tensor) -> tuple[int, int]:
        """Heads and columns of the rows that a buffer holds."""
        _, heads, width = buffer.shape
        return heads, width if self.scales is None else 2 * width

    def _widths(self) -> tuple[int, int]:
        """Values of a slot in each part."""
        (heads, first), (_, second) = self._row_shape(self.first), self._row_shape(self.second)
        return heads * first, heads * second

    def _blocks(self) -> tuple[int, int, int]:
        """Tokens of a tile, columns of a tile, and columns of the wider part."""
        widest = max(self._widths())
        block_w = min(next_power_of_2(widest), MOST_COLUMNS)
        return TILE // block_w, block_w, widest

    def _bind(self, scales: tuple[float, float]) -> BoundKernel:
        block_t, block_w, _ = self._blocks()
        widths = self._widths()
        of_blocks: dict[str, object] = {}
        for name, each in zip(("first_scales", "second_scales"), self.scales or (), strict=False):
            strides = {f"{name}_stride": each.stride(0), f"{name}_head_stride": each.stride(1)}
            of_blocks |= {name: each, **strides}
        # Only `write_kv` waits for what the previous launch has written.
        overlaps = self.launcher.overlaps and self.first.is_cuda and self.scales is None
        return BoundKernel(
            self.launcher,
            write_kv if self.scales is None else write_four_bits,
            {
                **of_blocks,
                "first_buffer": self.first,
                "first_slot_stride": self.first.stride(0),
                "first_slot_head_stride": self.first.stride(1),
                "second_buffer": self.second,
                "second_slot_stride": self.second.stride(0),
                "second_slot_head_stride": self.second.stride(1),
                "slot_map": self.slot_map,
                "num_mapped": len(self.first if self.slot_map is None else self.slot_map),
                "num_slots": self.first.shape[0],
                "first_scale": scales[0],
                "second_scale": scales[1],
                "FIRST_D": self._row_shape(self.first)[1],
                "FIRST_WIDTH": widths[0],
                "SECOND_D": self._row_shape(self.second)[1],
                "SECOND_WIDTH": widths[1],
                "MANTISSA": self.format.mantissa,
                "BIAS": self.format.bias,
                "LARGEST": self.format.largest,
                "NAN": self.format.nan,
                "IS_SCALED": scales != (1.0, 1.0),
                "BLOCK_T": block_t,
                "BLOCK_W": block_w,
                "OVERLAPS": overlaps,
            },
            tensors=("first", "second", "loc"),
            numbers=(
                "first_stride",
                "first_head_stride",
                "first_column_stride",
                "second_stride",
                "second_head_stride",
                "second_column_stride",
                "loc_stride",
            ),
            counts=("num_tokens",),
            options={"num_warps": 4, "launch_pdl": True} if overlaps else {"num_warps": 4},
        )


def row_shape(buffer: torch.Tensor) -> tuple[int, int]:
    """Heads and columns of the rows that a pool's buffer [slots, H, n] holds."""
    _, heads, width = buffer.shape
    return heads, 2 * width if buffer.dtype == torch.float4_e2m1fn_x2 else width


class PoolWriter:
    """Writes to all layers of a pool: the `KVWriter` of a context. Each layer's writer is made when
    it is first needed."""

    def __init__(self, pool: KVPool, launcher: Launcher | None = None) -> None:
        self._pool = pool
        self._launcher = launcher or Launcher()
        self._writers: dict[tuple[int, bool], LayerWriter] = {}

    def write(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        is_latent: bool,
    ) -> None:
        """Like `KVWriter.write`, in one launch."""
        key = layer.layer_id, is_latent
        writer = self._writers.get(key)
        if writer is None:
            pool = self._pool.of_layers((layer.layer_id,))
            writer = self._writers[key] = LayerWriter.of(
                pool,
                layer,
                loc,
                first,
                is_latent=is_latent,
                launcher=self._launcher,
            )
        writer.write(layer, loc, first, second)

    def warm_up(self, layer: LayerSpec, dtype: torch.dtype) -> None:
        """Compile a layer's kernel for rows of a dtype by a launch that writes zeros to slot 0,
        which is padding's in every pool and for every layer."""
        first, second = self._pool.get_kv_buffer(layer.layer_id)
        is_latent = layer.kind == "mla"
        if is_latent:
            first, second = first[..., : second.shape[-1]], first[..., second.shape[-1] :]
        loc = torch.zeros(1, dtype=torch.int64, device=first.device)
        rows = [loc.new_zeros((1, *row_shape(part)), dtype=dtype) for part in (first, second)]
        self.write(layer, loc, *rows, is_latent=is_latent)


def make_writer(context: BackendContext) -> PoolWriter | None:
    """The writer of the context's pool; None if no layer is stored."""
    pool = context.token_to_kv_pool
    stored = [layer for layer in context.layers if layer.layer_id in pool.layer_ids]
    if not stored:
        return None
    writer = PoolWriter(pool, Launcher(overlaps=overlaps_launches(context.platform)))
    dtype = context.request.dtype
    writer.warm_up(stored[0], torch.bfloat16 if dtype is None else torch_dtype(dtype))
    return writer
