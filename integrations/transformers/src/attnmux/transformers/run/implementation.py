"""The attention implementation "attnmux", for models that transformers runs by itself.

Importing this module registers it. `model.generate()` keeps transformers' caches, and each layer
runs on a backend that is chosen for it. `model.generate_batch()` does so after
`allow_generate_batch(model)`. Inside `attnmux.core.ForwardContext.enter` a model runs packed on the
context's backend, as `attention.py` says.
"""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnmux.core import ForwardContext, InvalidInput
from attnmux.transformers.model.attention import attention_forward, no_mask
from attnmux.transformers.model.layer_call import layer_id_of, read_rows, window_of
from attnmux.transformers.model.reach import MaskFunction, Reach
from attnmux.transformers.model.visible import Lens, MaskWithKeys, VisibleKeys, visible_in
from attnmux.transformers.run.staged import StagedAttention

IMPLEMENTATION = "attnmux"
BATCHING = "attnmux_flash"
"""The same under a name that continuous batching admits: one with "flash" in it, whose layers get
lengths instead of a mask."""

FIRST_BATCHING = Version("5.20")
"""The first transformers whose continuous batching runs other implementations; tried up to 5.23."""

OF_BATCHING = frozenset(
    {"block_table", "cu_seq_lens_q", "logits_indices", "logits_processor_args", "max_length_q"}
)
"""Further arguments of `generate_batch`, which each layer gets and attention does not need."""

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Where packed sequences begin and end, [N + 1] each."""

OF_PACKING = frozenset({*BOUNDS, "max_length_q", "max_length_k"})
"""Arguments of packed sequences: the maxima say no more than the bounds."""


class Implementation:
    """The entries of transformers' registries: the attention function and the mask function."""

    def __init__(self) -> None:
        self.staged = StagedAttention()
        self._reaches: dict[object, Reach] = {}
        self._lens: tuple[object, object, Lens] | None = None

    def mask(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        attention_mask: torch.Tensor | None = None,
        use_vmap: bool = False,
        **_: object,
    ) -> MaskWithKeys | None:
        """Raises InvalidInput for a mask function of the model's own."""
        if ForwardContext.is_running():
            no_mask(attention_mask=attention_mask, use_vmap=use_vmap)
            return None
        no_mask(use_vmap=use_vmap)
        visible = VisibleKeys.of(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            reaches=self._reaches,
        )
        return MaskWithKeys.of(visible)

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """[B, T, Hq, Dv] of query [B, Hq, T, D], key [B, Hkv, S, D] and value [B, Hkv, S, Dv].

        Raises InvalidInput for arguments that attnmux cannot express, NoBackend if no backend
        serves the layer.
        """
        if kwargs.get("read_index") is not None:
            return self._batching(module, query, key, value, **kwargs), None
        if isinstance(attention_mask, MaskWithKeys):
            visible = visible_in(attention_mask)
            return self._padded(module, query, key, value, visible, **kwargs), None
        return attention_forward(module, query, key, value, attention_mask, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def _padded(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: VisibleKeys,
        *,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        _check_causal(module, is_causal)
        bounds = [kwargs.get(name) for name in BOUNDS]
        kwargs = {name: passed for name, passed in kwargs.items() if name not in OF_PACKING}
        if any(bound is not None for bound in bounds):
            queries, keys = (
                one if one is not None else other for one, other in (bounds, bounds[::-1])
            )
            visible = visible.packed(self._lens_of(queries, keys))
        stated = Reach(sliding_window_size=window_of(sliding_window))
        reach = visible.reach(stated)
        visible = visible.from_chunk(reach.attention_chunk_size)
        q = visible.pack_queries(query)
        k, v = visible.pack_keys(key), visible.pack_keys(value)
        call = read_rows(q, k, v, None, layer_id=layer_id_of(module), **kwargs)  # type: ignore[arg-type]  # checked there
        return visible.unpack(self.staged.attend(module, call, reach, visible.lens))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def _batching(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cache: object = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """[1, T, Hq, Dv]: the sequences one after another, K and V in transformers' paged cache."""
        _check_causal(module, is_causal)
        layer = layer_id_of(module)
        # Writes the new tokens, returns all of them, and selects the lengths of the layer's kind.
        # From transformers 5.24 on the layer has called it
        if cache is not None:
            key, value = cache.update(key, value, layer, kwargs)  # type: ignore[attr-defined]  # transformers' PagedAttentionCache
        lens = self._lens_of(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
        kept = {name: passed for name, passed in kwargs.items() if name not in OF_BATCHING}
        for name in ("cu_seq_lens_k", "max_length_k", "read_index", "write_index"):
            kept.pop(name, None)
        q, k, v = (
            rows[0].transpose(0, 1)[: sum(real)].contiguous()
            for rows, real in ((query, lens.queries), (key, lens.keys), (value, lens.keys))
        )
        call = read_rows(q, k, v, None, layer_id=layer, **kept)  # type: ignore[arg-type]  # checked there
        reach = Reach(sliding_window_size=window_of(sliding_window))
        rows = self.staged.attend(module, call, reach, lens)
        padding = query.shape[2] - rows.shape[0]
        return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, padding)).unsqueeze(0)

    def _lens_of(self, queries: object, keys: object) -> Lens:
        """Read from the device once a step: all layers of a kind get the same tensors."""
        if self._lens is None or self._lens[0] is not queries or self._lens[1] is not keys:
            self._lens = queries, keys, Lens(_lens(queries), _lens(keys))
        return self._lens[2]


def _lens(bounds: object) -> tuple[int, ...]:
    assert isinstance(bounds, torch.Tensor)
    return tuple(bounds.diff().tolist())


def _check_causal(module: torch.nn.Module, is_causal: bool | None) -> None:
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise InvalidInput("is_causal", got=False, expected="causal self-attention")


def allow_generate_batch(model: PreTrainedModel) -> None:
    """Run the model's `generate_batch` on attnmux, and its `generate` as well.

    Continuous batching admits implementations by name, and `set_attn_implementation` imports a
    flash-attention library for the admitted ones; this sets the name alone.
    Raises InvalidInput for a model that computes attention by itself, and for a transformers
    before 5.20, which admits its own implementations alone.
    """
    if Version(transformers.__version__) < FIRST_BATCHING:
        raise InvalidInput(
            "transformers", got=transformers.__version__, expected=f"{FIRST_BATCHING} or later"
        )
    if not model._supports_attention_backend:
        raise InvalidInput(
            type(model).__name__,
            got="a model that computes attention by itself",
            expected="one that calls transformers' AttentionInterface",
        )
    model.config._attn_implementation = BATCHING


_implementation = Implementation()
for _name in (IMPLEMENTATION, BATCHING):
    AttentionInterface.register(_name, _implementation.attention)
    AttentionMaskInterface.register(_name, _implementation.mask)
