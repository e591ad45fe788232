"""The error of rounding K and V to a pool's dtype, whatever backend reads them."""

from __future__ import annotations

import torch

from attnmux.core import KVPool, Request, torch_dtype

KEYS, QUERIES = 4096, 64


def rounding_error(request: Request, dtype: str) -> float:
    """How far rounding K and V to `dtype` moves a result: the norm of the difference over the norm.

    Of normally distributed Q, K and V, each query over 4096 keys in float64, with the request's
    dims and without scales. The seed is fixed.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator)

    width, v_width = request.head_dim or 128, request.v_head_dim or request.head_dim or 128
    if request.latent:
        v_width = request.kv_lora_rank or 512
        width = v_width + (request.qk_rope_head_dim or 0)
    q, k = draw(QUERIES, width).double(), draw(KEYS, width)
    v = k[:, :v_width] if request.latent else draw(KEYS, v_width)
    exact = _attention(q, k.double(), v.double())
    rounded = _attention(q, _read_back(k, dtype), _read_back(v, dtype))
    return float((rounded - exact).norm() / exact.norm())


def _read_back(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    stored, *scales = KVPool.stored_parts(rows, torch_dtype(dtype), None)
    return KVPool.unpack_rows(stored, *scales).double() if scales else stored.double()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(q @ k.T * q.shape[1] ** -0.5, dim=1)
    return weights @ v
