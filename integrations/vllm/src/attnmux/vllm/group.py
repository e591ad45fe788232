"""One attnmux backend for the layers of one KV cache group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    BackendFailed,
    BlockTable,
    Chooser,
    Decision,
    ForeignKVPool,
    ForeignMLAPool,
    ForwardBatch,
    KVPool,
    LayerSpec,
    Workspace,
    build,
    make_first,
)
from attnmux.vllm.layers import dense_spec, latent_spec, request_of, slots_of
from attnmux.vllm.steps import StepBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

logger = init_logger("vllm." + __name__)  # vLLM shows the loggers below its own


@dataclass(slots=True, eq=False)
class Step:
    """vLLM's metadata of a step, for the layers of a group.

    vLLM reads the counts in its MLA layer. All tokens count as decoding there, so that prompts run
    absorbed, on the same backend.
    """

    group: Group
    batch: ForwardBatch
    num_actual_tokens: int
    prepared: bool = False
    """Whether the half of the metadata that a graph holds was prepared. The first layer does it,
    since a captured graph begins with the model."""
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    decode: bool = True
    prefill: None = None

    def __post_init__(self) -> None:
        self.num_decodes = self.batch.batch_size
        self.num_decode_tokens = self.num_actual_tokens

    def forward(self, layer_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401  # as the backend's
        """`AttentionBackend.forward` of a layer, by vLLM's name."""
        group, batch = self.group, self.batch
        if not self.prepared:
            group.backend.init_forward_metadata_in_graph(batch)
            self.prepared = True
        q, k, v = args
        return group.backend.forward(q, k, v, group.spec(layer_name), batch, **kwargs)


class Group:
    """Layers whose heads, dims and pages are alike, and the backend that was chosen for them."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        config: VllmConfig,
        *,
        max_num_reqs: int,
        width: int,
        graphs: bool,
        device: torch.device,
    ) -> None:
        """layers: vLLM's, by name, with their caches bound. max_num_reqs: requests of a step.
        width: columns of the block table. graphs: whether decode steps are captured.

        Raises NoBackend where no backend serves the layers.
        """
        first = next(iter(layers.values()))
        is_latent = hasattr(first, "kv_lora_rank")
        spec_of = latent_spec if is_latent else dense_spec
        self._specs = {name: spec_of(i, layer) for i, (name, layer) in enumerate(layers.items())}
        page_size = first.kv_cache.shape[1 if is_latent else 2]
        self.pool = _pool(layers, self._specs, page_size)
        chooser = Chooser.here(device.type)
        request = request_of(
            list(layers.values()),
            list(self._specs.values()),
            dtype=config.model_config.dtype,
            page_size=page_size,
        ).replace(origin="model", strided_kv=self.pool.is_strided)
        decide = chooser.decide_with_graphs if graphs else chooser.decide
        scheduler = config.scheduler_config
        table = BlockTable(max_num_reqs, width, page_size=page_size, device=device)

        def make(decision: Decision) -> AttentionBackend:
            self.decision = decision
            return build(
                decision,
                BackendContext(
                    request=decision.request,
                    platform=chooser.platform,
                    device=device,
                    layers=tuple(self._specs.values()),
                    req_to_token_pool=table,
                    token_to_kv_pool=self.pool,
                    workspace=Workspace(device),
                    max_batch_size=table.size,
                    max_context_len=table.max_context_len,
                    launches=chooser.launches,
                    debug=chooser.debug,
                ),
            )

        self.backend = make_first(lambda failed: decide(request, failed), make, _tell)
        logger.info("%d layers, %s", len(layers), self.decision.summary())
        if self.decision.request.graph:
            self.backend.init_cuda_graph_state(table.size, scheduler.max_num_batched_tokens)
        self._steps = StepBuilder(
            table,
            max_num_tokens=scheduler.max_num_batched_tokens,
            seq_len_fill=self.backend.get_cuda_graph_seq_len_fill_value(),
        )

    def spec(self, layer_name: str) -> LayerSpec:
        return self._specs[layer_name]

    def step(self, common: CommonAttentionMetadata, *, in_capture: bool = False) -> Step:
        """Prepare a step, as far as the host does it."""
        batch = self._steps.step(common)
        debug = self.backend.context.debug
        if debug:
            self.backend.init_forward_metadata(batch)
        else:
            self.backend.init_forward_metadata_out_graph(batch, in_capture)
        return Step(self, batch, common.num_actual_tokens, prepared=debug)


def _pool(layers: Mapping[str, Any], specs: Mapping[str, LayerSpec], page_size: int) -> KVPool:
    """vLLM's caches of the layers: nothing is copied."""
    first = next(iter(specs.values()))
    if first.kind == "mla":
        rows = {
            specs[name].layer_id: slots_of(layer.kv_cache.unsqueeze(2), layer)
            for name, layer in layers.items()
        }
        return ForeignMLAPool(rows, page_size=page_size, kv_lora_rank=first.v_head_dim)
    buffers = {}
    for name, layer in layers.items():
        # [blocks, Hkv, block, D + Dv]: K and V of a slot lie side by side
        slots = slots_of(layer.kv_cache.transpose(1, 2), layer)
        buffers[specs[name].layer_id] = (
            slots[..., : first.qk_head_dim],
            slots[..., first.qk_head_dim :],
        )
    return ForeignKVPool(buffers, page_size=page_size)


def _tell(failure: BackendFailed, decision: Decision) -> None:
    logger.warning("%s; instead %s", failure, decision.summary())
