"""The contract, served by flashinfer's wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported
from attnmux.nvidia.flashinfer.caches import Cache, layer_cache
from attnmux.nvidia.flashinfer.compiling import compile_kernels
from attnmux.nvidia.flashinfer.graphs import GraphPlans
from attnmux.nvidia.flashinfer.groups import PlanGroup, plan_groups
from attnmux.nvidia.flashinfer.kernels import Kernels
from attnmux.nvidia.flashinfer.planning import EagerPlans, Role, pool_role
from attnmux.nvidia.flashinfer.settings import graph_workspace_bytes, read_settings
from attnmux.nvidia.flashinfer.sinks import check_sinks
from attnmux.nvidia.flashinfer.staging import Staging
from attnmux.nvidia.flashinfer.states import merge, store_natural, try_merge, writable_lse
from attnmux.nvidia.flashinfer.step import Step
from attnmux.nvidia.rows import aligned, is_writable
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.layer import LayerSpec

ADDRESS = "nvidia/flashinfer"


class FlashInferBackend(AttentionBackend):
    """MHA and GQA through flashinfer, eager and in graphs.

    Extend attends to the call's own K and V, and merges that with attention over the cached prefix
    where there is one. Where layers have windows, sinks or cross attention, with a quantised pool,
    for drafts, for many items and in graphs it reads all keys from the pool.
    """

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Compiles the kernels of every phase that the request asks for.

        Raises InvalidInput for options that no kernel serves, BackendFailed where a kernel does not
        compile.
        """
        super().__init__(context, options)
        self._kernels = kernels
        self._groups = plan_groups(context.layers, context.token_to_kv_pool)
        self._distinct = tuple(dict.fromkeys(self._groups.values()))
        self._settings = read_settings(context, options, self._distinct)
        check_sinks(kernels, self._distinct)
        self._is_encoder = not any(layer.is_causal for layer in context.layers)
        self._reads_calls = self._settings.kv_dtype == self._settings.dtype and not any(
            group.window >= 0 or group.view.cross or group.has_sinks for group in self._distinct
        )
        self._eager = self._eager_plans(self._settings.workspace_bytes)
        self._graphs: list[GraphPlans] = []
        self._caches: dict[int, Cache] = {}
        self._staging = Staging(context.device)
        self._step: Step | None = None
        self._roles: tuple[Role, ...] = ()
        self._planned: dict[tuple[Role, PlanGroup], Any] = {}
        compile_kernels(ADDRESS, context, self._try_step)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan the step for every group of layers."""
        self._planned = {}
        self._step = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        step = self._step = Step(batch, self.context, self._settings.page_size)
        if step.num_rows == 0:
            return
        role = pool_role(batch)
        self._staging.wait()
        wrappers = self._graph_wrappers(batch, step, role, in_capture)
        if wrappers is not None:
            self._roles = (role,)
            self._planned = {(role, group): wrapper for group, wrapper in wrappers.items()}
        else:
            self._roles = self._eager_roles(step, role)
            for group in self._distinct:
                for each in self._roles:
                    self._planned[each, group] = self._eager.plan(each, group, step)
        self._staging.mark()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._settings.deterministic:
            raise GraphUnsupported(
                "flashinfer captures no decode that keeps keys whole, as deterministic does: run "
                "without graphs, or choose another backend"
            )
        if any(graphs.has_room(max_bs, max_num_tokens) for graphs in self._graphs):
            return
        nbytes = self._settings.workspace_bytes
        if not self.options["workspace_bytes"]:
            nbytes = max(nbytes, graph_workspace_bytes(self._distinct, max_bs, max_num_tokens))
        if nbytes > self._settings.workspace_bytes:
            self._staging.wait()
            self._eager = self._eager_plans(nbytes)
        # Graphs that were captured before go on with their own buffers.
        self._graphs.append(
            GraphPlans(
                self._kernels,
                self._settings,
                self.context,
                self._distinct,
                workspace=self._workspace(nbytes),
                max_batch_size=max_bs,
                max_num_tokens=max_num_tokens,
            )
        )

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        prepared(self._step)
        out = call.out
        if out is None or not is_writable(out):
            out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        if not len(call.q):
            return out
        base_2 = writable_lse(call.lse)
        self._attend(Role.DECODE, call.layer, aligned(call.q), None, None, out, base_2)
        store_natural(base_2, call.lse)
        return out

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        step, q, k, v, out = prepared(self._step), call.q, call.k, call.v, call.out
        if out is None or not is_writable(out):
            out = q.new_empty((*q.shape[:2], call.layer.v_head_dim))
        if step.num_rows == 0:
            if call.lse is not None:
                call.lse.fill_(-torch.inf)
            return out.zero_()
        roles = self._call_roles(k, call.layer, batch, call.save_kv_cache)
        base_2 = writable_lse(call.lse)
        of_rows, into = base_2, out
        if step.num_rows < len(q):
            rows = slice(step.num_rows)
            q, into, of_rows = q[rows], out[rows], None if base_2 is None else base_2[rows]
            out[step.num_rows :].zero_()
            if k is not None and v is not None and not call.layer.is_cross_attention:
                k, v = k[rows], v[rows]
        if len(roles) > 1 and of_rows is None:
            of_rows = q.new_empty(q.shape[:2], dtype=torch.float32)
        q = aligned(q)
        self._attend(roles[0], call.layer, q, k, v, into, of_rows)
        for role in roles[1:]:
            self._merge_part(role, call.layer, q, into, of_rows)
        store_natural(base_2, call.lse)
        return out

    def _call_roles(
        self, k: torch.Tensor | None, layer: LayerSpec, batch: ForwardBatch, save_kv_cache: bool
    ) -> tuple[Role, ...]:
        """The parts of the keys that a call attends to."""
        if k is None:
            return (pool_role(batch),)
        return self._roles if save_kv_cache else (Role.RAGGED,)

    def _merge_part(
        self,
        role: Role,
        layer: LayerSpec,
        q: torch.Tensor,
        out: torch.Tensor,
        base_2: torch.Tensor | None,
    ) -> None:
        """Attend to a part of the pool's keys too: out and LSE become those over both parts."""
        assert base_2 is not None  # which several roles need
        part = torch.empty_like(out), torch.empty_like(base_2)
        self._attend(role, layer, q, None, None, *part)
        merge(self._kernels, (out, base_2), part)

    def _attend(
        self,
        role: Role,
        layer: LayerSpec,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attention over one part of the keys; `lse` in base 2."""
        wrapper = self._wrapper(role, self._groups[layer.layer_id])
        if k is not None and v is not None and role is Role.RAGGED:
            # As the pool would have cast them.
            k, v = aligned(k.to(q.dtype)), aligned(v.to(q.dtype))
            wrapper.run(q, k, v, out=out, lse=lse, return_lse=lse is not None)
            return
        cache = self._cache(layer)
        wrapper.run(
            cache.queries(q),
            cache.kv,
            *cache.of_sinks,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out=out,
            lse=lse,
            return_lse=lse is not None,
        )

    def _wrapper(self, role: Role, group: PlanGroup) -> Any:  # noqa: ANN401  # the library's class
        """Planned for this step, now where a call wants what most calls do not."""
        wrapper = self._planned.get((role, group))
        if wrapper is None:
            wrapper = self._eager.plan(role, group, prepared(self._step))
            self._planned[role, group] = wrapper
            self._staging.mark()
        return wrapper

    def _cache(self, layer: LayerSpec) -> Cache:
        cache = self._caches.get(layer.layer_id)
        if cache is None:
            cache = layer_cache(layer, self.context.token_to_kv_pool, self._settings.page_size)
            self._caches[layer.layer_id] = cache
        return cache

    def _graph_wrappers(
        self, batch: ForwardBatch, step: Step, role: Role, in_capture: bool
    ) -> Mapping[PlanGroup, Any] | None:
        """Planned wrappers of a batch that is captured now or was before."""
        if in_capture:
            size = (batch.batch_size, batch.num_tokens)
            for graphs in self._graphs:
                if graphs.has_room(*size):
                    return graphs.prepare(batch, step, role)
            raise GraphUnsupported(
                f"no buffers for a captured batch of {size[0]} requests with {size[1]} tokens: "
                "call init_cuda_graph_state with the largest first"
            )
        replanned = (graphs.replan(batch, step) for graphs in self._graphs)
        return next((wrappers for wrappers in replanned if wrappers is not None), None)

    def _eager_roles(self, step: Step, from_pool: Role) -> tuple[Role, ...]:
        """The parts of the keys that most calls of the step attend to."""
        if self._is_encoder:
            return (Role.RAGGED,)
        if from_pool is not Role.PAGED or not self._reads_calls:
            return (from_pool,)
        return (Role.RAGGED, Role.PREFIX) if step.has_prefix else (Role.RAGGED,)

    def _eager_plans(self, workspace_bytes: int) -> EagerPlans:
        return EagerPlans(self._kernels, self._settings, self._workspace(workspace_bytes))

    def _workspace(self, nbytes: int) -> torch.Tensor:
        """Scratch of the kernels. They run one after another, so all wrappers share it."""
        return self.context.workspace.get("flashinfer", nbytes)

    def _try_step(self, batch: ForwardBatch) -> None:
        self.init_forward_metadata_out_graph(batch)
        if len(self._roles) > 1:
            group = self._distinct[0]
            shape = (1, group.num_q_heads, group.v_head_dim)
            try_merge(self._kernels, shape, self._settings.dtype, self.context.device)
