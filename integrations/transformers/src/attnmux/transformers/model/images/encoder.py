"""The vision tower's attention, on the backend of the phase "encoder".

Images need no KV cache: each call of a layer brings all its keys, and each token sees its whole
image, or its window of the image. Images and windows are packed into one row with `cu_seqlens`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from attnmux.core import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    LayerSpec,
    ReqToTokenPool,
    Workspace,
    build,
)
from attnmux.transformers.model.layer_call import read_rows
from attnmux.transformers.model.stage import Room
from attnmux.transformers.model.visible import Lens
from attnmux.transformers.requests.pools import make_pool

if TYPE_CHECKING:
    from attnmux.core import AttentionBackend, Decision

VISION = "attnmux_flash_vision"
"""The attention implementation of vision towers. If it has "flash" in its name, towers that pack
images hand all of them to one call, with their bounds; else they call it for each."""

TOWER = "_attnmux_tower"
"""The attribute of a tower's attention module: its `VisionTower`."""

PACKING = ("cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that say no more than `cu_seq_lens_q`."""

START = Room(8, 1024)
"""Images or windows of a call for which there is room from the start. More double it."""


def tower_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The vision tower of a model; None if it reads text alone."""
    tower: Any = model.get_encoder(modality="image")
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
    if tower is model or tower is decoder or tower in set(decoder.modules()):
        return None
    return tower  # type: ignore[no-any-return]  # a module


class VisionTower:
    """A model's vision tower. `build` makes the backend, which then serves all its layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InvalidInput for a model without a vision tower, and for one whose layers differ
        or compute attention by themselves."""
        name, tower = type(model).__name__, tower_of(model)
        if tower is None:
            raise InvalidInput("images", got=f"{name}, which reads only text", expected="none")
        self._tower = tower
        self._layers: list[Any] = [module for module in tower.modules() if _is_attention(module)]
        specs = {_shape_of(layer) for layer in self._layers}
        if len(specs) != 1:
            raise InvalidInput(
                "images",
                got=f"{len(specs)} shapes of attention in the vision tower of {name}",
                expected="one, in layers that call transformers' AttentionInterface",
            )
        ((num_heads, head_dim, scaling),) = specs
        self.layer = LayerSpec(
            layer_id=0,
            tp_q_head_num=num_heads,
            tp_k_head_num=num_heads,
            tp_v_head_num=num_heads,
            qk_head_dim=head_dim,
            v_head_dim=head_dim,
            scaling=scaling,
            is_causal=False,
        )
        self.num_calls = 0
        """Calls of attention, so far."""
        self._backend: AttentionBackend | None = None

    def build(self, decision: Decision, device: torch.device) -> None:
        """Make the backend, and have the tower's layers call it.

        Raises BackendFailed as `attnmux.core.build` does.
        """
        self._decision, self._device = decision, device
        self._make_room(START)
        for layer in self._layers:
            setattr(layer, TOWER, self)
        for module in self._tower.modules():
            config: Any = getattr(module, "config", None)
            if isinstance(config, type(self._layers[0].config)):
                config._attn_implementation = VISION

    def _make_room(self, room: Room) -> None:
        self._backend = None
        self._lens: Lens | None = None
        pool = make_pool(
            [self.layer], self._decision, size=self._decision.page_size, device=self._device
        )
        context = BackendContext(
            request=self._decision.request,
            platform=self._decision.platform,
            device=self._device,
            layers=(self.layer,),
            req_to_token_pool=ReqToTokenPool(room.batch_size, room.context_len, self._device),
            token_to_kv_pool=pool,
            workspace=Workspace(self._device),
            max_batch_size=room.batch_size,
            max_context_len=room.context_len,
        )
        self._room, self._backend = room, build(self._decision, context)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: Lens, **kwargs: object
    ) -> torch.Tensor:
        """[T, H, D] of q, k, v [T, H, D]: one sequence after another, each sees itself.

        Raises InvalidInput for a layer that is not as `layer` says.
        """
        call = read_rows(q, k, v, None, layer_id=0, **kwargs)  # type: ignore[arg-type]  # checked there
        seen = (*q.shape[1:], call.scaling, call.logit_cap, call.sinks, call.sliding_window_size)
        layer = self.layer
        wanted = (layer.tp_q_head_num, layer.qk_head_dim, layer.scaling, 0.0, None, -1)
        if seen != wanted or k.shape != q.shape:
            raise InvalidInput("images", got=f"a layer of {seen}", expected=f"{wanted}, as decided")
        if not self._room.holds(lens):
            self._make_room(self._room.union(Room.for_lens(lens)))
        assert self._backend is not None  # built
        if lens != self._lens:
            self._lens = None
            self._batch = _batch_of(lens, self._device)
            self._backend.init_forward_metadata(self._batch)
            self._lens = lens
        self.num_calls += 1
        return self._backend.forward(q, k, v, layer, self._batch, save_kv_cache=False)


def _is_attention(module: torch.nn.Module) -> bool:
    return getattr(module, "is_causal", None) is False and hasattr(module, "config")


def _shape_of(module: Any) -> tuple[int, int, float]:  # noqa: ANN401  # a tower's own
    """(heads, dims of a head, scaling), by the names that transformers' towers have for them."""
    scaling = getattr(module, "scaling", getattr(module, "scale", None))
    head_dim = int(module.head_dim)
    return int(module.num_heads), head_dim, float(head_dim**-0.5 if scaling is None else scaling)


def _batch_of(lens: Lens, device: torch.device) -> ForwardBatch:
    """Whole sequences without a cache. Their rows name the reserved slot alone."""
    new = torch.tensor(lens.queries, dtype=torch.int32)
    total = sum(lens.queries)
    zeros = torch.zeros_like(new)
    on_device = new.to(device)
    places = torch.arange(total, device=device)
    starts = on_device.long().cumsum(0) - on_device
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lens.queries),
        req_pool_indices=torch.arange(1, len(lens.queries) + 1, device=device),
        seq_lens=on_device,
        seq_lens_cpu=new,
        seq_lens_sum=total,
        out_cache_loc=torch.zeros(total, dtype=torch.int64, device=device),
        positions=places - starts.repeat_interleave(on_device, output_size=total),
        extend_seq_lens=on_device,
        extend_seq_lens_cpu=new,
        extend_prefix_lens=zeros.to(device),
        extend_prefix_lens_cpu=zeros,
        extend_num_tokens=total,
    )


def vision_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of a vision tower: [B, S, H, D] of query, key, value [B, H, S, D].

    cu_seq_lens_q: where images or windows begin in one row, B = 1; without it each of the B rows is
    an image. Raises InvalidInput for a mask, and for a layer that is causal.
    """
    tower: VisionTower | None = getattr(module, TOWER, None)
    if tower is None or attention_mask is not None or is_causal:
        raise InvalidInput(
            "images",
            got="a layer with a mask, or one that is not of the vision tower",
            expected="layers in which each token sees its whole image or window",
        )
    batch_size, num_heads, length, dim = query.shape
    lens = (length,) * batch_size
    if cu_seq_lens_q is not None:
        lens = tuple(cu_seq_lens_q.diff().tolist())
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (query, key, value))
    kept = {name: option for name, option in kwargs.items() if name not in PACKING}
    out = tower.attend(q, k, v, Lens(lens, lens), **kept)
    return out.view(batch_size, length, num_heads, dim), None


AttentionInterface.register(VISION, vision_forward)
