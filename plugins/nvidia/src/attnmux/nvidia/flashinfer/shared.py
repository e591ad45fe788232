"""Common code of the backends over flashinfer: `flashinfer` and `flashinfer_mla`."""

from __future__ import annotations

import torch

from attnmux.core import BackendContext, ForwardBatch, ForwardMode, InvalidInput
from attnmux.core.plugin import kv_indices

MIB = 1 << 20

HINT = (
    "flashinfer compiles its kernels when they are first used: it needs ninja and, in CUDA_HOME or "
    "on PATH, the nvcc of a CUDA toolkit that fits the driver; pip install "
    "'attnmux-nvidia[flashinfer]' ninja"
)


class Staging:
    """Guards the pinned memory that plans are copied to the device from.

    The library's planner writes a plan to pinned memory of the wrapper and queues a copy to the
    device (`cudaMemcpyAsync` in scheduler.cuh). Given lengths on the host, `plan` does not
    synchronise. If the host is two steps ahead of the device, as in a long prompt's chunks, it
    would overwrite plans that are not copied yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own

    def wait(self) -> None:
        """Call it before planning a step: waits until the last step's plans are copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """Call it after planning."""
        if self._copied is not None:
            self._copied.record()


def workspace(context: BackendContext, nbytes: int) -> torch.Tensor:
    """Scratch memory of the kernels. They run one after another, so all wrappers share it."""
    return context.workspace.get("flashinfer", nbytes)


def host_lens(batch: ForwardBatch, field: str) -> torch.Tensor:
    """The batch's lengths of that name. Raises InvalidInput if there are none."""
    lens: torch.Tensor | None = getattr(batch, field)
    if lens is None:
        raise InvalidInput(
            field, got=None, expected="lengths on the host, which flashinfer plans with"
        )
    return lens


def check_tokens(batch: ForwardBatch, num_rows: int) -> None:
    """Raises InvalidInput for fewer tokens than the requests' `num_rows`, and in decode for more.

    Extra rows are padding. Decode is padded with requests instead.
    """
    is_short = batch.num_tokens < num_rows
    if is_short or (batch.forward_mode.is_decode() and batch.num_tokens > num_rows):
        raise InvalidInput(
            "out_cache_loc",
            got=f"{batch.num_tokens} tokens",
            expected=f"the requests' {num_rows}",
        )


def page_indices(
    batch: ForwardBatch,
    indptr: torch.Tensor,
    layer_id: int,
    context: BackendContext,
    *,
    page_size: int,
    kv_start: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[indptr[-1]] int32: the pages of all requests end to end, as the layer's buffers number them.

    indptr: [B + 1] int32, host. page_size: of the view that kernels have of the pool. kv_start: [B]
    int32, the column where each request's keys begin. out: int32, whose front the pages go to.
    """
    pool, table = context.token_to_kv_pool, context.req_to_token_pool
    indices = kv_indices(
        table,
        batch.req_pool_indices,
        indptr.to(table.device, non_blocking=True),
        page_size=page_size,
        kv_start=None if kv_start is None else kv_start.to(table.device, non_blocking=True),
        total=int(indptr[-1]),
        out=out,
    )
    translate = pool.translate_pages if page_size == pool.page_size else pool.translate
    translated = translate(indices, layer_id)
    return translated if out is None or translated is indices else indices.copy_(translated)


CaptureKey = tuple[ForwardMode, int, int]


def capture_key(batch: ForwardBatch) -> CaptureKey:
    """Identifies a captured batch: its tensors stay at their addresses."""
    return batch.forward_mode, batch.batch_size, batch.req_pool_indices.data_ptr()


def writable_lse(lse: torch.Tensor | None) -> torch.Tensor | None:
    """If kernels can write LSE for the caller's `lse` [T, H]: they assume contiguous memory."""
    if lse is None or lse.is_contiguous():
        return lse
    return torch.empty_like(lse, memory_format=torch.contiguous_format)
