"""Prompts of MLA layers that begin in a step: attention over their expanded K and V.

Over the latent, a key has rank + rope columns and a value rank, 576 and 512 of DeepSeek's. Expanded
by `kv_b_proj` they have 192 and 128, and expanding costs what absorbing costs. A prompt without a
prefix needs nothing from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from attnmux.core import (
    AttnmuxError,
    BackendContext,
    Chooser,
    Decision,
    ForwardBatch,
    LayerSpec,
    Request,
    Workspace,
    build,
    foreign_pool,
    make_first,
    torch_dtype,
)
from attnmux.vllm.block_table import BlockTable

if TYPE_CHECKING:
    from attnmux.core import AttentionBackend

logger = init_logger("vllm." + __name__)  # vLLM shows the loggers below its own


class PromptBackend:
    """The backend that was chosen for expanded layers, which are alike."""

    def __init__(
        self,
        layer: Any,  # noqa: ANN401  # vLLM's MLAAttention
        chooser: Chooser,
        *,
        dtype: torch.dtype,
        max_num_reqs: int,
        max_num_tokens: int,
        device: torch.device,
        watched: Callable[[AttentionBackend, Decision, dict[int, str]], AttentionBackend],
    ) -> None:
        """max_num_reqs, max_num_tokens: of a step. watched: `Chooser.canary`'s.

        Raises AttnmuxError if no backend serves the layer: its prompts are absorbed then.
        """
        self.spec = LayerSpec(
            layer_id=0,
            tp_q_head_num=layer.num_heads,
            tp_k_head_num=layer.num_heads,
            tp_v_head_num=layer.num_heads,
            qk_head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            scaling=layer.scale,
        )
        name = Request.canonical_dtype(dtype)
        request = Request().replace(
            origin="model",
            num_q_heads=layer.num_heads,
            num_kv_heads=layer.num_heads,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=name,
            kv_dtype=name,
            phases=("extend",),
        )
        self._chooser, self._device = chooser, device
        self._room = max_num_reqs, max_num_tokens
        decided: list[Decision] = []

        def made(decision: Decision) -> AttentionBackend:
            decided.append(decision)
            return build(decision, self._context(decision))

        backend = make_first(lambda failed: chooser.decide(request, failed), made, _tell)
        logger.info("prompts that begin: %s", decided[-1].summary())
        self._backend = watched(backend, decided[-1], {0: f"prompts of {layer.layer_name}"})

    def _context(self, decision: Decision) -> BackendContext:
        """Over the reserved page and another, which the table names for all tokens: K and V come
        with each call, and are not kept."""
        spec, device = self.spec, self._device
        max_num_reqs, max_num_tokens = self._room
        dtype, page_size = torch_dtype(decision.kv_dtype), decision.page_size
        rows = [
            torch.zeros((2 * page_size, spec.tp_k_head_num, dim), dtype=dtype, device=device)
            for dim in (spec.qk_head_dim, spec.v_head_dim)
        ]
        width = -(-max_num_tokens // page_size)
        table = BlockTable(max_num_reqs, width, page_size=page_size, device=device)
        table.block_table[1:] = 1
        return BackendContext(
            request=decision.request,
            platform=self._chooser.platform,
            device=device,
            layers=(spec,),
            req_to_token_pool=table,
            token_to_kv_pool=foreign_pool({0: (rows[0], rows[1])}, page_size=page_size),
            workspace=Workspace(device),
            max_batch_size=table.size,
            max_context_len=table.max_context_len,
            launches=self._chooser.launches,
            debug=self._chooser.debug,
        )

    def prepare(self, prompts: ForwardBatch) -> ForwardBatch:
        """Prepare a step of prompts. Returns its batch, whose K and V are not kept."""
        page_size = self._backend.context.token_to_kv_pool.page_size
        batch = replace(prompts, out_cache_loc=prompts.positions % page_size + page_size)
        self._backend.init_forward_metadata(batch)
        return batch

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """q, k [T, H, nope + rope] and v, out [T, H, Dv] of a prepared step."""
        self._backend.forward(q, k, v, self.spec, batch, save_kv_cache=False, out=out)


def prompt_backend(layer: Any, chooser: Chooser, **room: Any) -> PromptBackend | None:  # noqa: ANN401
    """Of an MLA layer; None if no backend serves it."""
    try:
        return PromptBackend(layer, chooser, **room)
    except AttnmuxError as refusal:
        logger.warning("prompts that begin are absorbed: %s", AttnmuxError.in_brief(refusal))
        return None


def _tell(failure: AttnmuxError, decision: Decision) -> None:
    logger.warning("%s; instead %s", failure, decision.summary())
