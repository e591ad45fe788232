"""An engine's needs of attention: the question that the solver answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import read_fields, readers_of
from attnmux.core.facts.frozen import FrozenMapping, Plain, defaults, plain_fields
from attnmux.core.facts.sparse import check_picked_blocks, check_sparse
from attnmux.core.facts.values import (
    DTYPES,
    KINDS,
    LINEAR_KINDS,
    PHASES,
    Count,
    Dtype,
    Flag,
    Groups,
    Kind,
    Layers,
    Measure,
    Mode,
    Phases,
    Sparse,
    Window,
    canonical_dtype,
)

ORIGINS = ("user", "env", "config", "model", "platform", "default")
"""Sources of a value; the earlier ones override the later ones."""


def _origins(name: str, value: Any) -> Any:  # noqa: ANN401  # reads any value
    if not isinstance(value, Mapping):
        expected = f"a mapping of fields to {', '.join(ORIGINS)}"
        raise InvalidInput(name, got=repr(value), expected=expected)
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Plain):
    """The demands on a backend. A field that is None, False or 0 demands nothing.

    Head counts are per rank. For MLA (kinds "mla" and "nsa"), `head_dim` and `v_head_dim` are those
    of the expanded heads (192 and 128 in DeepSeek-V3), `num_kv_heads` is 1, the latent, and the
    dimensions of absorbed kernels follow from `kv_lora_rank` and `qk_rope_head_dim`.

    Aliases are replaced ("bf16"). Raises InvalidInput for a value that its field cannot hold, and
    for query heads that are not a multiple of the KV heads.
    """

    KINDS = KINDS
    LINEAR_KINDS = LINEAR_KINDS
    """Kinds of layers without softmax attention, and the kinds of their requests."""
    PHASES = PHASES
    DTYPES = DTYPES
    """Canonical names; a request takes their aliases too."""
    canonical_dtype = staticmethod(canonical_dtype)

    kind: Kind = "mha"
    """"mha", "mla", "nsa" (sparse MLA), or "dual_chunk" (Qwen2.5-1M: its weights expect positions
    remapped by chunk, so that other attention gives wrong answers); or a kind of linear layers:
    "gdn", "kda", "mamba1", "mamba2", "lightning" and "conv" (see `LinearLayerSpec`)."""
    num_q_heads: Count = None
    num_kv_heads: Count = None
    head_dim: Count = None
    """Dim of Q and K."""
    v_head_dim: Count = None
    """None: as `head_dim`."""
    kv_lora_rank: Count = None
    qk_rope_head_dim: Count = None
    index_topk: Count = None
    """Keys of each token that the indexer of a model of kind "nsa" picks. It demands nothing: a
    context of no more tokens has plain MLA."""
    index_block_size: Count = None
    """Keys of a block, if the indexer of a model of kind "mha" picks `index_topk` blocks. It
    demands nothing of backends; see `PickedBlocksBackend`."""
    encoder_head_dim: Count = None
    """Dim of the heads of a multimodal model's encoder."""
    dtype: Dtype = None
    kv_dtype: Dtype = None
    """None: as `dtype`."""
    page_size: Count = None
    """Tokens a page; None leaves it to the solver."""
    phases: Phases = ()
    """Empty: extend and decode, with verify and draft when speculating, encoder if multimodal.
    Kinds of linear layers have no draft, as no draft model has such layers."""
    spec_topk: Count = None
    """Branches a draft step; 1 drafts a chain, more a tree."""
    spec_draft_tokens: Count = None
    """Tokens of a request that one verify step checks."""
    speculative_attention_mode: Mode = "prefill"
    """Which of the two backends serves verify and draft: "prefill" or "decode"."""
    sparse: Sparse = None
    """"quest": decode steps read the pages of each request whose keys may score highest, an
    approximation of attention over all. It demands nothing of backends; see `SparseAttnBackend`."""
    sparse_budget: Count = None
    """Keys of a request that each head then reads: a multiple of the page size, from 4 pages."""
    sliding_window: Window = None
    """The contract's w: a query sees itself and w keys before it (transformers' n is w + 1)."""
    attention_chunk: Count = None
    cross_attention: Flag = False
    sinks: Flag = False
    alibi: Flag = False
    """A bias of the logits by distance, one slope a head: `LayerSpec.alibi_slopes`."""
    relative_bias: Flag = False
    """A bias of the logits by distance, from a table of each head: `LayerSpec.relative_bias`. An
    encoder's self attention has it too."""
    logit_cap: Measure = None
    custom_mask: Flag = False
    multi_item: Flag = False
    multimodal: Flag = False
    chunked_prefix: Flag = False
    """The engine calls MLA layers by `forward_latent`, so that another backend may run long prompts
    with expanded heads. It demands nothing of backends."""
    two_batches: Flag = False
    """Steps come as two halves, `ForwardBatch.tbo_children`, whose layers the engine runs in turn.
    It demands nothing: each half has a backend of its own."""
    deterministic: Flag = False
    graph: Flag = False
    lse: Flag = False
    strided_kv: Flag = False
    """The slots or heads of the KV cache have gaps between them, as in an engine that keeps K and V
    of a slot side by side."""
    other_layers: Groups = ()
    """Attention layers whose heads, dims, features or KV dtype are not those of the fields above,
    for example window layers with more KV heads. Each group has a backend of its own, see
    `Decision.others`."""
    compressed_layers: Layers = ()
    """(kind, how many) of the attention layers that also see keys of blocks of tokens, which are
    merged with the backend's by LSE. They demand only `lse`; see `CompressedKeys`."""
    linear_layers: Layers = ()
    """(kind, how many) of the model's layers that have no softmax attention: recurrent ones and
    convolutions. Each kind has a backend of its own, see `Decision.parts`; they ask nothing of the
    one for attention. No backend serves a kind that is not one of `kind`'s words."""
    linear_head_dim: Count = None
    """K dim of their recurrent states."""
    linear_v_head_dim: Count = None
    """V dim of their recurrent states; None: as `linear_head_dim`."""
    parts: Layers = ()
    """(part, number) for parts of other packages, see `Part`. The number is the part's to read; 1
    if it needs none."""
    max_error: Measure = None
    """The largest error of one query and head, in roundings of the output's format (eps / 2)."""
    origins: Annotated[Mapping[str, str], _origins] = field(default_factory=FrozenMapping)
    """Source of each value that is set: one of ORIGINS. Values without an origin are the user's."""

    def __post_init__(self) -> None:
        names = read_fields(self)
        names.remove("origins")  # it has no default
        origins = self._noted_origins(names)
        q_heads, kv_heads = self.num_q_heads, self.num_kv_heads
        if q_heads and kv_heads and q_heads % kv_heads:
            got, expected = f"{q_heads} over {kv_heads} KV heads", "a multiple of num_kv_heads"
            raise InvalidInput("num_q_heads", got=got, expected=expected)
        if self.other_layers and self.kind != "mha":
            got = f"{len(self.other_layers)} groups with kind {self.kind}"
            raise InvalidInput("other_layers", got=got, expected="none: only layers of mha differ")
        check_sparse(self)
        check_picked_blocks(self)
        if not self.phases or origins["phases"] == "default":
            object.__setattr__(self, "phases", self._derived_phases())
            origins["phases"] = "default"
        for name, origin in origins.items():
            if name not in READERS or origin not in ORIGINS:
                expected = f"field names, each with one of {', '.join(ORIGINS)}"
                raise InvalidInput("origins", got=f"{name}={origin}", expected=expected)
        object.__setattr__(self, "origins", FrozenMapping(origins))

    def _noted_origins(self, given: Iterable[str]) -> dict[str, str]:
        """An origin for each value that is set, and none for the others."""
        origins = dict(self.origins)
        changed = [name for name in given if getattr(self, name) != DEFAULTS[name]]
        for name in changed:
            origins.setdefault(name, "user")
        for name in STATED:
            origins.setdefault(name, "default")
        for name in self.origins:
            if name in OPEN and name not in changed:
                del origins[name]
        return origins

    def _derived_phases(self) -> tuple[str, ...]:
        wanted = {
            "extend": True,
            "decode": True,
            "verify": bool(self.spec_topk),
            "draft": bool(self.spec_topk) and self.kind not in LINEAR_KINDS,
            "encoder": self.multimodal,
        }
        return tuple(phase for phase in PHASES if wanted[phase])

    @property
    def latent(self) -> bool:
        """Whether K and V are one latent vector a token (MLA and its sparse form)."""
        return self.kind in ("mla", "nsa")

    @property
    def is_linear(self) -> bool:
        """Whether it is about layers without softmax attention."""
        return self.kind in LINEAR_KINDS

    @property
    def index_reach(self) -> int | None:
        """The longest context in which an indexer picks every key; None without one."""
        return None if self.index_topk is None else self.index_topk * (self.index_block_size or 1)

    def replace(self, *, origin: str = "user", **changes: object) -> Request:
        """A copy with `changes`, each recorded as set by `origin`."""
        _check_names(changes)
        origins = {**self.origins, **dict.fromkeys(changes, origin)}
        # Each value that is set has an origin
        values: dict[str, Any] = {name: getattr(self, name) for name in self.origins}
        return Request(**{**values, **changes}, origins=origins)

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees with branches, whose verification needs a mask."""
        return (self.spec_topk or 1) > 1

    @property
    def verify_lead(self) -> str:
        """The phase whose backend verifies drafts: "decode" or "extend"."""
        return "decode" if self.speculative_attention_mode == "decode" else "extend"

    def groups(self) -> tuple[Request, ...]:
        """A request for each group of layers that are alike, that of the fields first."""
        if not self.other_layers:
            return (self,)
        first = self.replace(origin="model", other_layers=())
        plain = first.replace(
            origin="model",
            linear_layers=(),
            linear_head_dim=None,
            linear_v_head_dim=None,
            multimodal=False,
            encoder_head_dim=None,
            phases=tuple(phase for phase in self.phases if phase != "encoder"),
        )
        others = (plain.replace(origin="model", **group.needs()) for group in self.other_layers)
        return (first, *others)

    def to_dict(self) -> dict[str, Any]:
        layers = {
            "compressed_layers": dict(self.compressed_layers),
            "linear_layers": dict(self.linear_layers),
            "parts": dict(self.parts),
        }
        return {**plain_fields(self), **layers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of `to_dict`; absent fields keep their defaults.

        Raises InvalidInput for an unknown key: a request from a later version may have demands that
        this version cannot check.
        """
        values = {key: value for key, value in data.items() if key != "origins"}
        _check_names(values)
        return cls(**values, origins=data.get("origins", {}))

    @classmethod
    def parse(cls, *texts: str, origin: str = "user") -> Request:
        """From texts such as "kind=mha,page_size=1,phases=extend+decode"; "none" unsets a field.

        Raises InvalidInput for an unknown field or a value that it cannot hold.
        """
        return cls().replace(origin=origin, **parse_fields(*texts))


DEFAULTS = defaults(Request)
STATED = tuple(name for name, default in DEFAULTS.items() if default)
OPEN = DEFAULTS.keys() - set(STATED)
"""Fields whose default sets nothing."""
READERS = readers_of(Request)
del READERS["origins"]
"""By field."""


def parse_fields(*texts: str) -> dict[str, str]:
    """The fields that texts such as "a=1,b=2" set, as text."""
    values: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in ",".join(texts).split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in READERS:
            expected = f"FIELD=VALUE with {_names(name)}"
            raise InvalidInput("request", got=repr(pair), expected=expected)
        if name in values:
            raise InvalidInput("request", got=f"{name!r} twice", expected="each field once")
        values[name] = value
    return values


def _check_names(given: Iterable[str]) -> None:
    for name in given:
        if name not in READERS:
            raise InvalidInput("request", got=f"a field {name!r}", expected=_names(name))


def _names(wrong: str) -> str:
    """For errors: the field most like `wrong`, or all fields."""
    near = nearest(wrong, READERS)
    return f"a field such as {near!r}" if near else f"a field of {', '.join(READERS)}"
