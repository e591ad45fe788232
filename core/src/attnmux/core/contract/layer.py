"""The description of one attention layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch

from attnmux.core.contract.sinks import SinkCopies
from attnmux.core.facts.checks import is_whole
from attnmux.core.facts.errors import AttnmuxError, InvalidInput
from attnmux.core.facts.layer_fields import layer_fields
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import canonical_dtype


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerSpec:
    """One attention layer on this rank. Ids are unique among the layers of a context.

    Raises InvalidInput for values out of range, and for those that contradict each other.
    """

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    tp_v_head_num: int
    qk_head_dim: int
    """Dim of Q and K; in MLA the latent rank and the rotary part together."""
    v_head_dim: int
    """Dim of V and of the output; in MLA the latent rank."""
    scaling: float
    kind: Literal["mha", "mla", "dual_chunk"] = "mha"
    """"dual_chunk": K and V as in "mha", and three queries a token; see `dual_chunk_len`."""
    logit_cap: float = 0.0
    """c of `c * tanh(logit / c)`, applied after scaling; 0 is off."""
    sliding_window_size: int = -1
    """w: token i sees keys j with i - w <= j <= i; -1 is off."""
    attention_chunk_size: int = 0
    """c: token i sees keys j of its own chunk, j // c == i // c; 0 is off."""
    dual_chunk_len: int = 0
    """c of kind "dual_chunk": a token of chunk n = i // c meets the keys of chunk n with its first
    query, those of chunk n - 1 with its second and all before with its third, in one softmax. It is
    `chunk_size - local_size` of the model's config; 0 for other kinds."""
    index_block_size: int = 0
    """b: token i sees the keys j <= i of the blocks j // b in `ForwardBatch.topk_indices`, which an
    indexer picks for each layer; 0 is off. Only plain causal layers of kind "mha" have it."""
    is_causal: bool = True
    """False for a layer of an encoder: each token sees its whole sequence, which is the call's own
    k and v (`save_kv_cache=False`)."""
    is_cross_attention: bool = False
    sinks: torch.Tensor | None = None
    """[Hq] fp32: one logit a head that takes part in the softmax and has no value. They may change
    in place between steps: see `sinks_in`."""
    alibi_slopes: torch.Tensor | None = None
    """[Hq] fp32: attention with linear biases (ALiBi, arXiv:2108.12409). The scaled logit of token
    i and key j grows by slope * (j - i); i and j are places in the sequence. Only causal self
    attention of kind "mha" without a cap has it."""
    relative_bias: torch.Tensor | None = None
    """[Hq, R + 1] fp32, or [Hq, 2 * R + 1] if `is_causal` is False: relative position biases by
    head and distance (T5, arXiv:1910.10683). The scaled logit of token i and key j grows by the
    value for j - i clipped to [-R, R]; the first column is that of -R, and the last that of R, or
    of 0 in a causal layer. i and j are places in the sequence. Only self attention of kind "mha"
    without a cap has it."""
    kv_dtype: str | None = None
    """Dtype of its K and V in the pool, as requests name it, if it is not the decision's: see
    `LayerGroup`. None: the decision's."""
    k_scale: float | None = None
    v_scale: float | None = None
    """Factors for quantised K and V when they are read: see `KVPool.read_scales`. K and V that a
    pool stores unquantised, or that come with the call, have no scale."""
    sink_copies: SinkCopies = field(default_factory=SinkCopies, repr=False)
    """Shared with copies of the layer that `dataclasses.replace` makes."""

    @classmethod
    def of(cls, request: Request, layer_id: int, **fields: Any) -> LayerSpec:  # noqa: ANN401  # of any type
        """A layer with the request's heads, dims, window, chunks and cap, scaled by
        head_dim ** -0.5.

        fields: those that differ, such as `scaling`, `sinks` or `is_cross_attention`.
        Raises InvalidInput for a request without heads or dims, of kind "dual_chunk" or of linear
        layers, and if the request has sinks or biases and `fields` do not.
        """
        return cls(**{"layer_id": layer_id, **layer_fields(request, fields), **fields})

    def __post_init__(self) -> None:
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", canonical_dtype(self.kv_dtype, "kv_dtype"))
        q_heads, kv_heads = self.tp_q_head_num, self.tp_k_head_num
        if kv_heads < 1 or q_heads % kv_heads:
            got = f"{q_heads} query heads over {kv_heads} KV heads"
            raise InvalidInput("tp_q_head_num", got=got, expected="a multiple of the KV heads")
        if self.tp_v_head_num != kv_heads:
            expected = f"{kv_heads}, as in K"
            raise InvalidInput("tp_v_head_num", got=self.tp_v_head_num, expected=expected)
        self._check_ranges()
        for name, of_heads in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            _check_per_head(name, of_heads, q_heads)
        self._check_relative_bias()
        self._check_features()
        if not self.is_causal and self.sliding_window_size >= 0:
            raise InvalidInput(
                "sliding_window_size",
                got=self.sliding_window_size,
                expected="-1 without causality: the window does not limit keys after a token",
            )
        if self.kind == "mla" and (kv_heads != 1 or self.v_head_dim >= self.qk_head_dim):
            raise InvalidInput(
                "layer",
                got=f"{kv_heads} heads, {self.qk_head_dim}/{self.v_head_dim} dims",
                expected="one latent head, with qk_head_dim = v_head_dim + rotary dim",
            )
        chunked = self.kind == "dual_chunk"
        if self.dual_chunk_len < chunked or (self.dual_chunk_len and not chunked):
            got = f"{self.dual_chunk_len} in a layer of kind {self.kind!r}"
            expected = "at least 1" if chunked else "0, since only dual chunk layers have chunks"
            raise InvalidInput("dual_chunk_len", got=got, expected=expected)

    def _check_ranges(self) -> None:
        """Raises InvalidInput for a number that is not finite or that no layer has."""
        for name in ("scaling", "k_scale", "v_scale"):
            factor = getattr(self, name)
            if not _is_finite(factor, above=0.0) and (name == "scaling" or factor is not None):
                raise InvalidInput(name, got=factor, expected="a finite number above 0")
        if not (self.logit_cap == 0 or _is_finite(self.logit_cap, above=0.0)):
            expected = "a finite number above 0, or 0 without a cap"
            raise InvalidInput("logit_cap", got=self.logit_cap, expected=expected)
        for name, least, off in (
            ("sliding_window_size", -1, "-1 without a window"),
            ("attention_chunk_size", 0, "0 without chunks"),
        ):
            size = getattr(self, name)
            if not is_whole(size, least):
                expected = f"a whole number of tokens, or {off}"
                raise InvalidInput(name, got=repr(size), expected=expected)

    def _check_relative_bias(self) -> None:
        """Raises InvalidInput for a table that is not float32 with a row for each query head."""
        table, heads = self.relative_bias, self.tp_q_head_num
        if table is None:
            return
        has_rows = table.dim() == 2 and table.shape[0] == heads and table.shape[1] > 0
        has_middle = has_rows and (self.is_causal or table.shape[1] % 2 == 1)
        if not has_middle or table.dtype != torch.float32:
            got = f"{table.dtype} of shape {tuple(table.shape)}"
            columns = "R + 1" if self.is_causal else "2 * R + 1"
            expected = f"float32 of shape ({heads}, {columns})"
            raise InvalidInput("relative_bias", got=got, expected=expected)

    def _check_features(self) -> None:
        """Raises InvalidInput if ALiBi, relative bias or picked blocks are combined with a feature
        they do not support."""
        limits = {"sliding_window", "attention_chunk", "sinks"}
        for name, feature, allowed in (
            ("relative_bias", "relative_bias", {*limits, "bidirectional"}),
            ("alibi_slopes", "alibi", limits),
            ("index_block_size", "index_block_size", set()),
        ):
            if feature in self.features:
                self.check_features(feature, *sorted(allowed), argument=name)
        if self.index_block_size < 0:
            got, expected = self.index_block_size, "0, or keys of a block"
            raise InvalidInput("index_block_size", got=got, expected=expected)

    def sinks_in(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The sinks in the dtype that a kernel reads, at an address that stays: `refresh_sinks`
        keeps them up. None without sinks."""
        return None if self.sinks is None else self.sink_copies.in_dtype(self.sinks, dtype)

    @property
    def features(self) -> frozenset[str]:
        """Features beyond scaled, causal self attention: fields of a request, such as
        "sliding_window" and "sinks", and "bidirectional" if `is_causal` is False."""
        flags = {
            "sliding_window": self.sliding_window_size >= 0,
            "attention_chunk": self.attention_chunk_size > 0,
            "cross_attention": self.is_cross_attention,
            "bidirectional": not self.is_causal,
            "sinks": self.sinks is not None,
            "alibi": self.alibi_slopes is not None,
            "relative_bias": self.relative_bias is not None,
            "logit_cap": self.logit_cap > 0,
            "index_block_size": self.index_block_size > 0,
        }
        return frozenset(name for name, is_set in flags.items() if is_set)

    def check_features(self, *served: str, kind: str = "mha", argument: str | None = None) -> None:
        """Raises InvalidInput for a layer of another kind, or with a feature that is not `served`.

        argument: named by the error; None names the layer.
        """
        unserved = sorted(self.features.difference(served))
        unserved += [f"kind {self.kind}"] * (self.kind != kind)
        if unserved:
            name = f"layer {self.layer_id}" if argument is None else argument
            most = f"no feature but {', '.join(served)}" if served else "no further feature"
            expected = f"causal self attention of kind {kind} with {most}"
            raise InvalidInput(
                name, got=f"a layer with {' and '.join(unserved)}", expected=expected
            )

    def not_in_pool(self) -> AttnmuxError:
        """The error of a call that reads keys of a layer that the pool does not store."""
        return AttnmuxError(
            f"layer {self.layer_id} is not in the KV pool: call it with its own keys and "
            "save_kv_cache=False"
        )

    @property
    def is_mergeable(self) -> bool:
        """Whether a new token sees all of some earlier keys, so that parts of them can be merged by
        LSE. Windows and attention chunks end within a part. Biases by distance need the distance of
        keys from tokens, which a part does not have."""
        limiting = {"sliding_window", "attention_chunk", "alibi", "relative_bias"}
        return self.kind in ("mha", "mla") and self.features.isdisjoint(limiting)

    @property
    def relative_reach(self) -> int:
        """R of `relative_bias`: the distance from which on its value is the same; 0 without it."""
        if self.relative_bias is None:
            return 0
        return (self.relative_bias.shape[1] - 1) // (1 if self.is_causal else 2)

    @property
    def qk_rope_head_dim(self) -> int:
        """Dim of the rotary part that MLA passes separately; 0 in other kinds."""
        return self.qk_head_dim - self.v_head_dim if self.kind == "mla" else 0

    @property
    def query_dim(self) -> int:
        """Last dim of a call's `q`: without the rotary part in MLA, three queries in dual chunk."""
        if self.kind == "dual_chunk":
            return 3 * self.qk_head_dim
        return self.qk_head_dim - self.qk_rope_head_dim


def _is_finite(value: object, *, above: float) -> bool:
    """Whether `value` is a finite number above another. NaN and values that are no numbers are
    not."""
    return isinstance(value, Real) and math.isfinite(value) and float(value) > above


def _check_per_head(name: str, of_heads: torch.Tensor | None, q_heads: int) -> None:
    """Raises InvalidInput for values that are not one float32 for each query head."""
    if of_heads is None or (of_heads.shape == (q_heads,) and of_heads.dtype == torch.float32):
        return
    got = f"{of_heads.dtype} of shape {tuple(of_heads.shape)}"
    raise InvalidInput(name, got=got, expected=f"float32 of shape ({q_heads},)")
