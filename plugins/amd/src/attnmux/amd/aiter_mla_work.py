"""Work of `mla_decode_fwd` that is planned on the device, which other numbers of heads need.

`get_mla_metadata_v1` shares the keys of all requests among the compute units, 16 heads at a time.
Its stub in Python names `work_indptr` before `work_info`; the function behind it takes them the
other way round, so that all arguments go by position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HEADS = tuple(range(32, 128, 16))
"""Heads that v1_2_device.cuh treats as requests of 16 heads; it does so for one query a request."""
KEYS = 16
"""A part's keys are a multiple of so many: the default of `get_mla_metadata_v1`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedWork:
    """The plan of one step. It holds addresses of its own tensors."""

    query_bounds: torch.Tensor
    """[B + 1] int32: 0, 1, 2, …"""
    metadata: torch.Tensor
    """[2] uint64: where `indptr` and `info` lie."""
    indptr: torch.Tensor
    """[compute units + 1] int32"""
    info: torch.Tensor
    """[most parts, 8] int32"""
    reduce_indptr: torch.Tensor
    reduce_final_map: torch.Tensor
    reduce_partial_map: torch.Tensor

    @classmethod
    def of(
        cls,
        shapes_of: Callable[..., Any],
        batch_size: int,
        heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PlannedWork:
        """Room for a plan. shapes_of: `get_mla_metadata_info_v1`."""
        shapes = shapes_of(batch_size, 1, heads, dtype, dtype, False, True)
        room = [torch.empty(shape, dtype=each, device=device) for shape, each in shapes]
        return cls(
            query_bounds=torch.arange(batch_size + 1, dtype=torch.int32, device=device),
            metadata=room[0],
            indptr=room[1],
            info=room[2],
            reduce_indptr=room[3],
            reduce_final_map=room[4],
            reduce_partial_map=room[5],
        )

    def fill(self, plan: Callable[..., Any], key_bounds: torch.Tensor, heads: int) -> None:
        """Plan by `get_mla_metadata_v1`, on the device. key_bounds: [B + 1] int32."""
        plan(
            self.query_bounds,
            key_bounds,
            heads,
            1,
            True,
            self.metadata,
            self.info,
            self.indptr,
            self.reduce_indptr,
            self.reduce_final_map,
            self.reduce_partial_map,
            KEYS,
            1,
            1,
            True,
        )

    def arguments(self) -> dict[str, torch.Tensor]:
        """Arguments of `mla_decode_fwd`."""
        return {
            "work_meta_data": self.metadata,
            "work_indptr": self.indptr,
            "work_info_set": self.info,
            "reduce_indptr": self.reduce_indptr,
            "reduce_final_map": self.reduce_final_map,
            "reduce_partial_map": self.reduce_partial_map,
        }
