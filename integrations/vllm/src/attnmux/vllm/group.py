"""One attnmux backend for the layers of one KV cache group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from attnmux.core import (
    BackendContext,
    BackendFailed,
    Chooser,
    Decision,
    ForwardBatch,
    InvalidInput,
    KVPool,
    LayerSpec,
    Workspace,
    build,
    make_first,
)
from attnmux.vllm.block_table import BlockTable
from attnmux.vllm.caches import pool_of, rehearsal_caches
from attnmux.vllm.layers import request_of, specs_of, up_projection
from attnmux.vllm.steps import StepBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from attnmux.core import AttentionBackend

logger = init_logger("vllm." + __name__)  # vLLM shows the loggers below its own

EXPANDED = "expanded_prompts", "prompts", "extend"
"""Names a decision's backend for prompts of MLA with expanded heads."""


@dataclass(eq=False)
class Step:
    """vLLM's metadata of a step, for the layers of a group.

    vLLM adds an attribute for layers with attention chunks, and reads the counts in its MLA layer.
    There all tokens but those of `prompts` count as decoding: they come absorbed.
    """

    group: Group
    batch: ForwardBatch
    num_actual_tokens: int
    prompts: ForwardBatch | None = None
    """The prompts after the requests of `batch`, for `forward_latent`."""
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
        if self.prompts is not None:
            self.num_prefills = self.prompts.batch_size
            self.num_decode_tokens -= self.prompts.num_tokens

    def forward(self, layer_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401  # as the backend's
        """`AttentionBackend.forward` of a layer, by vLLM's name."""
        group, batch = self.group, self.batch
        if not self.prepared:
            group.prepare_in_graph(batch)
            self.prepared = True
        q, k, v = args
        return group.backend.forward(q, k, v, group.spec(layer_name), batch, **kwargs)

    def forward_latent(
        self,
        impl: Any,  # noqa: ANN401  # the layer's
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
    ) -> torch.Tensor:
        """`AttentionBackend.forward_latent` of `prompts`."""
        group, batch = self.group, self.prompts
        if batch is None or group.prompts is None:
            raise InvalidInput("step", got="no prompts", expected="a step that has prompts")
        spec, layer = group.of_impl(impl)
        return group.prompts.forward_latent(q, latent, k_rope, spec, batch, up_projection(layer))


class Group:
    """Layers whose heads, dims and pages are alike, and the backend that was chosen for them.

    It is chosen and rehearsed when the group is made, over a cache of two pages: vLLM has loaded
    the layers then, and allocates their caches later. `bind` makes it over these.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        config: VllmConfig,
        *,
        max_num_reqs: int,
        page_size: int,
        graphs: bool,
        device: torch.device,
    ) -> None:
        """layers: vLLM's, by name. max_num_reqs: requests of a step. graphs: whether decode steps
        are captured.

        Raises NoBackend if no backend serves the layers, and InvalidInput for layers that are
        refused.
        """
        self.layers = dict(layers)
        self._max_num_reqs, self._page_size, self._device = max_num_reqs, page_size, device
        self._specs = self._described()
        self._chooser = chooser = Chooser.here(device)
        self._watched = Chooser.canary("attnmux-vllm", logger)
        self._max_num_tokens = config.scheduler_config.max_num_batched_tokens
        dtype = config.model_config.dtype
        request = request_of(
            list(layers.values()), list(self._specs.values()), dtype=dtype, page_size=page_size
        )
        decide = chooser.decide_with_graphs if graphs else chooser.decide
        caches = rehearsal_caches(self.layers, self._specs, page_size, dtype, device)
        pool = pool_of(self.layers, self._specs, caches, page_size)
        width = -(-config.model_config.max_model_len // page_size)

        def rehearsed(decision: Decision) -> Decision:
            build(decision, self._context(decision, pool, self._table(width)))
            return decision

        self.decision = make_first(lambda failed: decide(request, failed), rehearsed, _tell)
        logger.info("%d layers: %s", len(layers), self.decision.summary())
        # Some of vLLM's products, as of 4 bits on ROCm, have other weights
        has_weights = all(hasattr(layer, "W_UK_T") for layer in layers.values())
        self.expands = has_weights and self.decision.answer(*EXPANDED) is not None
        """Whether prompts come with the heads' own queries, and may run with expanded heads."""

    def bind(self, width: int) -> None:
        """Make the backend over vLLM's caches, which are bound to the layers.

        width: columns of the block table.
        """
        self._specs = self._described()  # those of the rehearsal keep its copies of sinks
        self._of_impls = {
            id(layer.impl): (self._specs[name], layer) for name, layer in self.layers.items()
        }
        caches = {name: layer.kv_cache for name, layer in self.layers.items()}
        pool = pool_of(self.layers, self._specs, caches, self._page_size)
        table = self._table(width)
        self.prompts: AttentionBackend | None = None
        if self.expands:
            # With a workspace of its own: both are prepared before either runs
            context = self._context(self.decision, pool, table)
            self.prompts = build(self.decision, context)
        # What it serves comes absorbed
        parts = {name: part for name, part in self.decision.parts.items() if name != EXPANDED[0]}
        absorbed = replace(self.decision, parts=parts)
        backend = build(absorbed, self._context(absorbed, pool, table))
        names = {spec.layer_id: name for name, spec in self._specs.items()}
        self.backend = self._watched(backend, self.decision, names)
        self._sinks = [
            sinks if (weights := self.layers[name].impl.sinks).dtype == sinks.dtype else weights
            for name, spec in self._specs.items()
            if (sinks := spec.sinks) is not None
        ]
        if self.decision.request.graph:
            self.backend.init_cuda_graph_state(table.size, self._max_num_tokens)
        self._steps = StepBuilder(
            table,
            max_num_tokens=self._max_num_tokens,
            seq_len_fill=self.backend.get_cuda_graph_seq_len_fill_value(),
        )

    def _described(self) -> dict[str, LayerSpec]:
        layers = list(self.layers.values())
        return dict(zip(self.layers, specs_of(layers, self._device), strict=True))

    def _table(self, width: int) -> BlockTable:
        return BlockTable(self._max_num_reqs, width, page_size=self._page_size, device=self._device)

    def _context(self, decision: Decision, pool: KVPool, table: BlockTable) -> BackendContext:
        return BackendContext(
            request=decision.request,
            platform=self._chooser.platform,
            device=self._device,
            layers=tuple(self._specs.values()),
            req_to_token_pool=table,
            token_to_kv_pool=pool,
            workspace=Workspace(self._device),
            max_batch_size=table.size,
            max_context_len=table.max_context_len,
            launches=self._chooser.launches,
            debug=self._chooser.debug,
        )

    def spec(self, layer_name: str) -> LayerSpec:
        return self._specs[layer_name]

    def of_impl(self, impl: Any) -> tuple[LayerSpec, Any]:  # noqa: ANN401  # a layer's
        """Its layer, in our words and in vLLM's."""
        return self._of_impls[id(impl)]

    def step(self, common: CommonAttentionMetadata, *, in_capture: bool = False) -> Step:
        """Prepare a step, as far as the host does it."""
        num_prompts = 0 if self.prompts is None else self._steps.num_prompts(common)
        prompts: ForwardBatch | None = None
        if num_prompts:
            batch, prompts = self._steps.in_two_parts(common, num_prompts)
        else:
            batch = self._steps.step(common)
        debug = self.backend.context.debug
        self.backend.init_forward_metadata_out_graph(batch, in_capture)
        if debug:
            self.prepare_in_graph(batch)
        if self.prompts is not None and prompts is not None:
            self.prompts.init_forward_metadata(prompts)
        return Step(self, batch, common.num_actual_tokens, prompts, prepared=debug)

    def prepare_in_graph(self, batch: ForwardBatch) -> None:
        """Prepare the part of the step that a graph holds."""
        # Weights may have been updated in place
        if self._sinks:
            self.backend.refresh_sinks(self._sinks)
        self.backend.init_forward_metadata_in_graph(batch)


def _tell(failure: BackendFailed, decision: Decision) -> None:
    logger.warning("%s; instead %s", failure, decision.summary())
