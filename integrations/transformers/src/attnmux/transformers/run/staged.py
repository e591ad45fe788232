"""Attention over K and V that transformers holds, for its own `generate` and `generate_batch`.

transformers' caches hand K and V of all tokens to each layer, in tensors that move from step to
step, and a backend reads a pool that stays. So each call's K and V are copied to a pool of one
layer, which all layers use in turn.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from attnmux.core import (
    BackendContext,
    Chooser,
    Decision,
    ForwardBatch,
    ForwardMode,
    LayerSpec,
    Workspace,
    build,
    make_first,
)
from attnmux.transformers.model.asked import request_of
from attnmux.transformers.model.layer_call import LayerCall
from attnmux.transformers.model.layers import layer_of
from attnmux.transformers.model.reach import Reach
from attnmux.transformers.model.stage import Room, Stage
from attnmux.transformers.model.visible import Lens

LOG = logging.getLogger(__name__)


Kind = tuple[object, ...]
"""Everything that two layers of one backend have in common."""


class StagedLayer:
    """A backend for layers of one kind."""

    def __init__(
        self,
        layer: LayerSpec,
        kind: Kind,
        sinks: torch.Tensor | None,
        decision: Decision,
        stage: Stage,
        chooser: Chooser,
    ) -> None:
        """sinks: as the model passes them; `layer` has a copy."""
        self.layer, self.stage, self.decision = layer, stage, decision
        self.kind, self.sinks = kind, sinks
        device = stage.pool.device
        self.context = BackendContext(
            request=decision.request,
            platform=decision.platform,
            device=device,
            layers=(layer,),
            req_to_token_pool=stage.table,
            token_to_kv_pool=stage.pool,
            workspace=Workspace(device),
            max_batch_size=stage.room.batch_size,
            max_context_len=stage.room.context_len,
            launches=chooser.launches,
            debug=chooser.debug,
        )
        self.backend = build(decision, self.context)
        self._lens: Lens | None = None
        self._batch: ForwardBatch | None = None
        self._loc = torch.empty(0, dtype=torch.int64)

    def attend(self, call: LayerCall, lens: Lens) -> torch.Tensor:
        """[T, Hq, Dv]: q [T, Hq, D] over k [S, Hkv, D] and v [S, Hkv, Dv], the sequences one after
        another."""
        if self._batch is None or lens != self._lens:
            self._prepare(lens)
        assert self._batch is not None  # prepared
        self.stage.pool.set_kv_buffer(self.layer, self._loc, call.k, call.v)
        return self.backend.forward(call.q, None, None, self.layer, self._batch)

    def _prepare(self, lens: Lens) -> None:
        """Plan a step. Layers of one kind share it, and so does the next step of the same lens."""
        self._lens = None
        self._loc = self.stage.slots([0] * len(lens.keys), lens.keys, self.context.device)
        self._batch = self._batch_of(lens)
        self.backend.init_forward_metadata(self._batch)
        self._lens = lens

    def _batch_of(self, lens: Lens) -> ForwardBatch:
        device, batch_size = self.context.device, len(lens.keys)
        prefixes = [keys - queries for keys, queries in zip(lens.keys, lens.queries, strict=True)]
        rows = torch.arange(batch_size, device=device)
        loc = self.stage.slots(prefixes, lens.queries, device)
        counts = torch.tensor(lens.queries, device=device)
        starts = rows * self.stage.row_slots + self.stage.first_slot
        seq_lens = torch.tensor(lens.keys, dtype=torch.int32)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=batch_size,
            req_pool_indices=rows + 1,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu=seq_lens,
            seq_lens_sum=sum(lens.keys),
            out_cache_loc=loc,
            positions=loc - starts.repeat_interleave(counts, output_size=loc.numel()),
        )
        if set(lens.queries) == {1}:
            return batch
        new = torch.tensor(lens.queries, dtype=torch.int32)
        cached = torch.tensor(prefixes, dtype=torch.int32)
        return replace(
            batch,
            forward_mode=ForwardMode.EXTEND,
            extend_seq_lens=new.to(device),
            extend_seq_lens_cpu=new,
            extend_prefix_lens=cached.to(device),
            extend_prefix_lens_cpu=cached,
            extend_num_tokens=loc.numel(),
        )


class StagedAttention:
    """Backends for the layers of all models that run with transformers' own caches.

    They are made when a layer is first called, and freed with the last of its models.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_module: WeakKeyDictionary[torch.nn.Module, StagedLayer] = WeakKeyDictionary()
        self._by_kind: WeakValueDictionary[Kind, StagedLayer] = WeakValueDictionary()
        self._stages: WeakValueDictionary[tuple[object, ...], Stage] = WeakValueDictionary()
        self._choosers: dict[torch.device, Chooser] = {}

    def attend(
        self, module: torch.nn.Module, call: LayerCall, reach: Reach, lens: Lens
    ) -> torch.Tensor:
        """[T, Hq, Dv]; see `StagedLayer.attend`.

        Raises NoBackend if no backend serves the layer.
        """
        if not call.q.shape[0]:
            return call.q.new_empty((0, call.q.shape[1], call.v.shape[2]))
        with self._lock:
            return self._layer(module, call, reach, lens).attend(call, lens)

    def decision(self, module: torch.nn.Module) -> Decision | None:
        """The decision for a layer; None before its first call."""
        staged = self._by_module.get(module)
        return None if staged is None else staged.decision

    def _layer(
        self, module: torch.nn.Module, call: LayerCall, reach: Reach, lens: Lens
    ) -> StagedLayer:
        kind = _kind(call, reach)
        made = self._by_module.get(module)
        is_same = made is not None and made.kind == kind and made.sinks is call.sinks
        if made is not None and is_same and made.stage.room.holds(lens):
            return made
        layer = replace(layer_of(call, reach), layer_id=0)
        # Sinks are each layer's own
        shared = self._by_kind.get(kind) if layer.sinks is None else None
        if shared is None or not shared.stage.room.holds(lens):
            room = Room.for_lens(lens)
            if shared is not None:
                room = room.union(shared.stage.room)
            shared = self._make(layer, call, kind, room)
            self._by_kind[kind] = shared
        self._by_module[module] = shared
        return shared

    def _make(self, layer: LayerSpec, call: LayerCall, kind: Kind, room: Room) -> StagedLayer:
        device = call.q.device
        chooser = self._choosers.get(device)
        if chooser is None:
            chooser = self._choosers[device] = Chooser.here(device)
        request = request_of([layer], call.q.dtype)
        request = request.replace(origin="model", phases=("extend", "decode"))

        def make(decision: Decision) -> StagedLayer:
            stage = self._stage(layer, decision, room, device)
            return StagedLayer(layer, kind, call.sinks, decision, stage, chooser)

        made = make_first(
            lambda failed: chooser.decide(request, failed),
            make,
            lambda failure, decision: LOG.warning("%s; instead %s", failure, decision.summary()),
        )
        LOG.info("%s", made.decision.summary())
        return made

    def _stage(
        self, layer: LayerSpec, decision: Decision, room: Room, device: torch.device
    ) -> Stage:
        """The stage of that layout, with at least that room."""
        layout = (layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        key = (*layout, decision.page_size, decision.kv_dtype, device)
        stage = self._stages.get(key)
        if stage is None or stage.room.union(room) != stage.room:
            wanted = room if stage is None else room.union(stage.room)
            stage = self._stages[key] = Stage(layer, decision, wanted, device)
        return stage


def _kind(call: LayerCall, reach: Reach) -> Kind:
    heads = (call.q.shape[1], *call.k.shape[1:], call.v.shape[2])
    return (*heads, call.scaling, call.logit_cap, reach, call.q.dtype, call.q.device)
