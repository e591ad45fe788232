"""Decoders that count positions in ways of their own, given the positions of packed tokens.

Most take `position_ids` that begin at 0. Some hand their own count to a table of positions, and
some begin theirs above 0: RoBERTa's tables begin after the row of the padding token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from attnmux.core import InvalidInput

Kwargs = dict[str, Any]

LIKELY_STARTS = (0, 1, 2)
"""First positions that are tried, besides the one after the padding token's."""


class PositionTable:
    """A module of a model that looks positions up, and gets others than the model counted."""

    def __init__(self, name: str, table: torch.nn.Module) -> None:
        """name: of the model, for errors."""
        self.name = name
        self.length: int | None = None
        """Positions that requests have, for a table that counts tokens by itself: its answer for
        one row of so many is kept, and looked up in its place. None refuses such a table."""
        self._table, self._own = table, table.forward
        self._given: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        table.forward = self._look_up

    @contextmanager
    def given(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Calls in the block look up these positions [1, T]; None leaves the model's own count.

        They raise InvalidInput for a table that counts by itself, if `length` is None.
        """
        self._given = positions
        try:
            yield
        finally:
            self._given = None

    def _look_up(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401  # the table's
        if self._given is None:
            return self._embedded(*args, **kwargs)
        signature = inspect.signature(self._own)
        bound = signature.bind(*args, **kwargs)
        counted = bound.arguments.get("position_ids")
        if counted is not None:
            bound.arguments["position_ids"] = self._given.view(counted.shape)
            return self._embedded(*bound.args, **bound.kwargs)
        if self.length is None:
            if "position_ids" in signature.parameters:
                # BART's family has those of one row here, without its batch
                bound.arguments["position_ids"] = self._given.view(-1)
                return self._embedded(*bound.args, **bound.kwargs)
            raise InvalidInput(
                self.name,
                got="positions that its embedding counts by itself",
                expected="an embedding that takes position_ids",
            )
        if self._rows is None:
            # Kept for later steps, whose graphs cannot hold tensors of inference mode
            with torch.inference_mode(False), torch.no_grad():
                row = tuple(self._stretched(arg, self.length) for arg in args)
                rows = self._embedded(*row, **kwargs)
                self._rows = rows.reshape(-1, rows.shape[-1])
        return self._rows[self._given]

    def _embedded(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401  # the table's
        rows: torch.Tensor = self._own(*args, **kwargs)
        return rows

    def _stretched(self, given: object, length: int) -> object:
        """A row's tokens, their embeddings or its shape, for a row of another length."""
        if isinstance(given, torch.Size):
            return torch.Size((1, length, *given[2:]))
        if not isinstance(given, torch.Tensor) or given.dim() < 2:
            return given
        # A table may place padding tokens apart
        token = int(getattr(self._table, "padding_idx", None) == 0)
        return given.new_full((1, length, *given.shape[2:]), token)


def take_positions(model: PreTrainedModel) -> None:
    """Let the model take `position_ids` if its table of positions does and its forward does not.

    A model without such a table is left as it is.
    """
    if takes(model, "position_ids"):
        return
    embeddings = (each for each in model.modules() if isinstance(each, torch.nn.Embedding))
    tables = [table for table in embeddings if takes(table, "position_ids")]
    if len(tables) != 1:
        return
    table, own = PositionTable(type(model).__name__, tables[0]), model.forward

    def forward(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:  # noqa: ANN401  # the model's
        with table.given(position_ids):
            return own(*args, **kwargs)

    # The signature tells callers which arguments the model's own forward takes.
    parameters = inspect.signature(own).parameters.values()
    mine = inspect.signature(forward).parameters["position_ids"]
    named = [
        parameter for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    rest = [
        parameter for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD
    ]
    forward.__signature__ = inspect.Signature([*named, mine, *rest])  # type: ignore[attr-defined]  # inspect's
    model.forward = forward


def scale_by_positions(model: PreTrainedModel) -> None:
    """Let layers that scale queries by a token's place in the row take its position (Llama 4:
    log1p(floor((place + 1) / floor_scale)) * attn_scale + 1, in layers without rotary embeddings).
    """
    for layer in list(model.modules()):
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False
            if not attention.use_rope:
                scaling = QueryScaling(attention.floor_scale, attention.attn_scale)
                layer.register_forward_pre_hook(scaling.take, with_kwargs=True)
                attention.q_proj.register_forward_hook(scaling.scale)


class QueryScaling:
    """The scaling of one layer's queries by their positions."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        self.floor_scale, self.attn_scale = floor_scale, attn_scale
        self.positions: torch.Tensor | None = None
        """[1, T], of the call that runs."""

    def take(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> None:
        self.positions = kwargs["position_ids"]

    def scale(
        self, projection: torch.nn.Module, args: tuple[Any, ...], queries: torch.Tensor
    ) -> torch.Tensor:
        assert self.positions is not None
        steps = torch.floor((self.positions.float() + 1) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1
        return (queries * scales.unsqueeze(-1)).to(queries.dtype)


def takes(module: torch.nn.Module, argument: str) -> bool:
    """Whether the module's forward has an argument of that name."""
    return argument in inspect.signature(module.forward).parameters


def count_from_own_start(model: PreTrainedModel, agrees: Callable[[int], bool]) -> int:
    """Let positions that begin at 0 mean the model's own, and return where its own begin.

    agrees: whether positions that begin at this number are those that the model counts. Nothing
    changes if no likely start agrees.
    """
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    after_padding = () if padding is None else (padding + 1,)
    starts = dict.fromkeys((*LIKELY_STARTS, *after_padding))
    start = next(filter(agrees, starts), 0)
    if start:
        model.register_forward_pre_hook(_adding(start), with_kwargs=True)
    return start


def _adding(start: int) -> Callable[..., tuple[tuple[Any, ...], Kwargs]]:
    def add(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], Kwargs]:
        positions = kwargs.get("position_ids")
        return args, kwargs if positions is None else {**kwargs, "position_ids": positions + start}

    return add
