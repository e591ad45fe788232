"""Every kind of indexer: how one is found in a model, and tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

TRIED_TOKENS = 24
TRIED_BLOCK, TRIED_TOPK = 3, 4
"""While an indexer of blocks is compared with ours: few tokens have many blocks then."""
TOLERANCE = 0.02
"""By how much scores may differ, as a share of the largest score: above rounding in any dtype, and
far below the effect of another rotary function or scale."""
ROTARY = "apply_rotary_pos_emb"
"""How the names of transformers' rotary functions begin."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class IndexShape:
    """The shape of picks, the same for all indexers of a model."""

    topk: int
    """Keys of each token, or blocks of each token and head."""
    head_dim: int
    """Stored values of each token: its key, and other parts of a block's key."""
    block_size: int = 0
    """Keys of a block; 0 if single keys are picked."""
    heads: int = 0
    """Heads with blocks of their own."""
    begun_block: bool = False
    """Whether a token also sees the block that it is in while that is not whole. Keys are made of
    whole blocks then, of values in the model's dtype."""

    @property
    def places(self) -> int:
        """Places of each token, and head, in `ForwardBatch.topk_indices`."""
        return self.topk + self.begun_block

    @property
    def reach(self) -> int:
        """The longest context in which they pick every key."""
        return self.topk * (self.block_size or 1)


class Tokens(NamedTuple):
    """Random tokens in one row, by which an indexer is tried."""

    hidden: torch.Tensor
    """[1, T, hidden]"""
    turns: tuple[torch.Tensor, torch.Tensor]
    """cos and sin, [1, T, rotary dim]"""
    places: torch.Tensor
    """[T] int64"""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelIndexer(ABC):
    """One module that picks the keys or blocks of its layer."""

    PARTS: ClassVar[frozenset[str]]
    """Submodules by which it is known."""
    NUMBERS: ClassVar[tuple[str, ...]]
    """Attributes that are whole numbers."""
    PROJECTION: ClassVar[str]
    """The submodule that makes keys."""
    TRIED: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Numbers of the module while it is compared with ours."""

    module: Any
    owner: Any
    """The attention module that calls it."""
    rotary: Callable[..., Any]
    """The rotary function that the module's forward calls."""

    @classmethod
    def is_built(cls, module: Any) -> bool:  # noqa: ANN401  # a torch module
        """Whether a module has the submodules and the numbers of this kind."""
        children = {name for name, _ in module.named_children()}
        numbers = (getattr(module, name, None) for name in cls.NUMBERS)
        return children >= cls.PARTS and all(isinstance(number, int) for number in numbers)

    @classmethod
    @torch.no_grad()
    def find(cls, module: torch.nn.Module, owner: torch.nn.Module) -> Self | None:
        """The module as an indexer whose picks are its own; None if it is none of ours."""
        rotary = rotary_of(module)
        ways = [] if rotary is None else cls.ways(module=module, owner=owner, rotary=rotary)
        return next((indexer for indexer in ways if indexer.agrees()), None)

    @classmethod
    def ways(cls, **fields: Any) -> list[Self]:  # noqa: ANN401  # of this class
        """How a module of this kind may work, of which one may agree."""
        return [cls(**fields)]

    @property
    @abstractmethod
    def shape(self) -> IndexShape: ...

    @property
    def answer(self) -> bool | torch.Tensor:
        """The module's result: its picks are on the batch. It is not None, which layers that share
        the picks of an earlier one read as missing. Nor is it a value for attention, which an
        unknown indexer would pass on."""
        return False

    @abstractmethod
    def agrees(self) -> bool:
        """Whether the module's own forward picks for random tokens by our scores."""

    def drawn(self, *shape: int, draw: torch.Generator) -> torch.Tensor:
        """Random numbers on the module's device, in its dtype."""
        return torch.randn(shape, generator=draw).to(getattr(self.module, self.PROJECTION).weight)

    def tokens(self, rotary_dim: int, draw: torch.Generator) -> Tokens:
        """rotary_dim: dims of cos and sin."""
        width = getattr(self.module, self.PROJECTION).weight.shape[1]
        hidden = self.drawn(1, TRIED_TOKENS, width, draw=draw)
        angles = self.drawn(1, TRIED_TOKENS, rotary_dim // 2, draw=draw).repeat(1, 1, 2)
        places = torch.arange(TRIED_TOKENS, device=hidden.device)
        return Tokens(hidden, (angles.cos(), angles.sin()), places)

    def own_result(self, *args: object) -> Any:  # noqa: ANN401  # a tensor
        """The first row of the module's own result; None if its forward takes something else:
        another version of the model."""
        with self._tried():
            try:
                return forward_of(self.module)(self.module, *args)[0]
            except Exception:  # the model's code may raise anything
                return None

    @contextmanager
    def _tried(self) -> Iterator[None]:
        kept = {name: getattr(self.module, name) for name in self.TRIED}
        vars(self.module).update(self.TRIED)
        try:
            yield
        finally:
            vars(self.module).update(kept)


def forward_of(module: object) -> Any:  # noqa: ANN401  # a function, which transformers may wrap
    """The function of a module's class that its calls run."""
    return unwrap(type(module).forward)  # type: ignore[attr-defined]  # a torch module has it


def rotary_of(module: object) -> Callable[..., Any] | None:
    """The rotary function that a module's forward calls; None unless it calls one."""
    forward = forward_of(module)
    names = [name for name in forward.__code__.co_names if name.startswith(ROTARY)]
    if len(names) != 1:
        return None
    rotary: Callable[..., Any] | None = forward.__globals__.get(names[0])
    return rotary
