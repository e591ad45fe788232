"""The packages that FlashMLA comes in. They carry the same kernels and differ in what they call
them: all of that is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from attnmux.nvidia.flashmla.kernels import Kernels


def from_sgl_kernel(library: Any) -> Kernels:  # noqa: ANN401  # a module
    """`sgl_kernel.flash_mla`, of sglang-kernel."""

    def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = library.get_mla_metadata(
            lens, num_rows, 1, is_fp8_kvcache=is_fp8
        )
        return tensors

    def arguments(tiles: torch.Tensor, splits: torch.Tensor) -> dict[str, Any]:
        return {"tile_scheduler_metadata": tiles, "num_splits": splits}

    return Kernels(
        flash_mla_with_kvcache=library.flash_mla_with_kvcache,
        schedule=schedule,
        schedule_arguments=arguments,
        constants=MappingProxyType({}),
    )


def from_flash_mla(library: Any) -> Kernels:  # noqa: ANN401  # a module
    """`flash_mla`, of sgl-flash-mla: what decodes densely is in its legacy half.

    Its first call would make a schedule by itself. Made ahead and put on the object that the
    function asks for, it is one launch a step, apart from the layers.
    """

    def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = library.get_mla_decoding_metadata(
            lens, num_rows, 1, is_fp8_kvcache=is_fp8, use_legacy=True
        )
        return tensors

    def arguments(tiles: torch.Tensor, splits: torch.Tensor) -> dict[str, Any]:
        metadata, _ = library.get_mla_metadata()
        metadata.tile_scheduler_metadata = tiles
        metadata.num_splits = splits
        return {"tile_scheduler_metadata": metadata}

    return Kernels(
        flash_mla_with_kvcache=library.flash_mla_with_kvcache,
        schedule=schedule,
        schedule_arguments=arguments,
        constants=MappingProxyType({"use_legacy": True}),
    )


PROVIDERS: Mapping[str, Callable[[Any], Kernels]] = MappingProxyType(
    {"flash_mla": from_flash_mla, "sgl_kernel.flash_mla": from_sgl_kernel}
)
"""By module, in the order in which they are tried."""
