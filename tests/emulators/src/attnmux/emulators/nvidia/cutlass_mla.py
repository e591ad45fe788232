"""`cutlass_mla_decode` of sglang-kernel 0.4.5 and of vLLM 0.33, in plain torch.

What the real functions do with their arguments, as far as an adapter can notice:

- Q is [B, H, 512] and [B, H, 64], at most 128 heads; the cache is [pages, page, 576], of whose rows
  the first 512 are V. There is no LSE.
- Fewer heads than 128 are copied to the front of rows of 128, whose rest is what the allocator
  gave. Rows of 128 heads are loaded where they are.
- Rows of the page table are read end to end, whatever its strides; the kernel counts as many keys a
  request as the table has room for.
- Keys are loaded in tiles of 128. What a tile holds after a request's end gets weight 0, so that V
  there has to be finite.
- A request without keys: its output is what the allocator gave.
- The workspace is not looked at: too small a one is written beyond its end. What it holds before
  does not matter.

Shapes are static and nothing is read on the host.
"""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import attend

SM_COUNT = 148
"""SMs of the emulated device, a B200."""
TILE, RANK, ROPE, MAX_HEADS = 128, 512, 64, 128


def cutlass_mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int = 1,
) -> torch.Tensor:
    """[B, H, 512] of one query a request.

    Raises AssertionError for what the library refuses, and RuntimeError where it would read or
    write elsewhere than it should.
    """
    cache = kv_c_and_k_pe_cache
    assert q_nope.ndim == 3, f"q_nope must be a 3D tensor, but got {q_nope.ndim}"
    assert q_pe.ndim == 3, f"q_pe must be a 3D tensor, but got {q_pe.ndim}"
    assert cache.ndim == 3, f"kv_c_and_k_pe_cache must be a 3D tensor, but got {cache.ndim}"
    batch_size, num_heads, _ = q_nope.shape
    _, page_size, _ = cache.shape
    assert q_pe.shape[:2] == q_nope.shape[:2]
    assert (q_nope.shape[2], q_pe.shape[2], cache.shape[2]) == (RANK, ROPE, RANK + ROPE)
    assert num_heads <= MAX_HEADS, f"H must be <= {MAX_HEADS}, but got {num_heads}"
    assert page_table.ndim == 2
    assert len(page_table) == batch_size
    width = page_table.shape[1]
    assert width > 0, f"block num must be greater than 0, got {width}"
    assert width % (TILE / page_size) == 0
    assert q_nope.dtype in (torch.float16, torch.bfloat16), "q_nope.dtype needs to be fp16 or bf16"
    assert q_nope.dtype == q_pe.dtype == cache.dtype
    assert seq_lens.dtype == torch.int32, f"seq_lens.dtype needs to be int32, got {seq_lens.dtype}"
    assert page_table.dtype == torch.int32, "page_table.dtype needs to be int32"
    if num_heads == MAX_HEADS:
        _check(all(map(_is_loadable, (q_nope, q_pe))), "misaligned address")
    _check(page_table.is_contiguous(), "the table was read at other places")
    needed = cutlass_mla_get_workspace_size(
        width * page_size, batch_size, num_kv_splits=num_kv_splits
    )
    _check(workspace.numel() * workspace.element_size() >= needed, "illegal memory access")
    workspace.view(torch.uint8).fill_(255)

    rows = cache[page_table.long()].flatten(1, 2).unsqueeze(2)
    key = torch.arange(rows.shape[1], device=rows.device)
    tiles = (seq_lens + TILE - 1) // TILE
    unread = (key >= (tiles * TILE).unsqueeze(1))[..., None, None]
    rows = rows.masked_fill(unread, 0)
    keep = key < seq_lens.unsqueeze(1)
    result, _ = attend(
        torch.cat([q_nope, q_pe], dim=-1).unsqueeze(1),
        rows,
        rows[..., :RANK],
        keep.unsqueeze(1),
        scale=sm_scale,
    )
    result = result.squeeze(1).masked_fill((seq_lens == 0).view(-1, 1, 1), torch.nan)
    return result.to(q_nope.dtype)


def cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1
) -> int:
    """Bytes: a partial output and its LSE for each head, request and part, in float32.

    Raises AssertionError for what the library refuses.
    """
    assert max_seq_len > 0, f"max_seq_len must be greater than 0, got {max_seq_len}"
    assert num_batches > 0, f"num_batches must be greater than 0, got {num_batches}"
    splits = num_kv_splits
    if splits < 1:
        most = -(-max_seq_len // TILE)
        rough = min(most, max(1, (sm_count or SM_COUNT) // num_batches))
        splits = -(-most // -(-most // rough))
    return (RANK + 1) * 4 * MAX_HEADS * splits * num_batches


class VllmOperators:
    """`torch.ops._C`: the kernel alone, which writes all 128 heads."""

    @staticmethod
    def sm100_cutlass_mla_decode(
        out: torch.Tensor,
        lse: torch.Tensor,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        workspace: torch.Tensor,
        scale: float,
        num_kv_splits: int,
    ) -> None:
        """lse: empty for none."""
        if lse.numel():
            raise NotImplementedError("the emulator gives no LSE")
        _check(q_nope.shape[1] == MAX_HEADS, "heads of other requests were read")
        _check(out.shape == q_nope.shape and out.is_contiguous(), "out must be [B, 128, 512]")
        operands = (q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace)
        out.copy_(cutlass_mla_decode(*operands, scale, num_kv_splits))

    @staticmethod
    def sm100_cutlass_mla_get_workspace_size(
        max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int
    ) -> int:
        return cutlass_mla_get_workspace_size(max_seq_len, num_batches, sm_count, num_kv_splits)


def _is_loadable(rows: torch.Tensor) -> bool:
    size = rows.element_size()
    return rows.data_ptr() % 16 == 0 and all(step * size % 16 == 0 for step in rows.stride()[:-1])


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
