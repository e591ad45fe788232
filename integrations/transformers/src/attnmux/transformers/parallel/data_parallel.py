"""Data parallel attention: each rank has requests of its own, with all heads and a KV pool of its
own, around layers whose weights are split over the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from attnmux.core import ForwardBatch, GraphRunner, InvalidInput
from attnmux.distributed import AgreedStep, RankGroup, TokensOfRanks, agree_on_step, idle_batch
from attnmux.transformers.parallel.agreement import check_step
from attnmux.transformers.parallel.ranks import GroupBuilds, GroupDeals, GroupRanks, GroupSteps
from attnmux.transformers.parallel.split import EXPERTS, WHOLE, Joints, split_model

T = TypeVar("T")


class DataParallelRanks(GroupRanks):
    """Each rank has a part of the requests, and of the weights outside of attention.

    A rank without requests runs one token of padding, or a graph's padding, while another has some.
    """

    def __init__(self, group: RankGroup) -> None:
        """Raises InvalidInput for a single rank."""
        if group.size == 1:
            raise InvalidInput("dp_attention", got="1 rank", expected="2 ranks or more")
        joints = TokenJoints(group)
        super().__init__(
            group,
            requests=PartDeals(group),
            building=WholeHeads(group, joints),
            steps=AgreedSteps(group, joints),
        )


class PartDeals(GroupDeals):
    """Each rank has a part of the requests."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.num_parts, self.part = group.size, group.rank

    def gather(self, said: T) -> list[T]:
        return self.group.exchange(said)

    def check_prompts(self, prompts: Callable[[], Sequence[Sequence[int]]]) -> None:
        check_step(self.group, "prompts", prompts())


class WholeHeads(GroupBuilds):
    """Each rank loads all heads, and its part of the other weights."""

    run_images = False

    def __init__(self, group: RankGroup, joints: TokenJoints) -> None:
        super().__init__(group)
        self._joints = joints

    def split(self, model: PreTrainedModel) -> None:
        self.together(lambda: split_model(model, self._joints))
        self._joints.follow(model)


class AgreedSteps(GroupSteps):
    """Steps that differ; the ranks agree on their sizes."""

    def __init__(self, group: RankGroup, joints: TokenJoints) -> None:
        super().__init__(group)
        self._joints = joints

    def check_step(self, kind: str, requests: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Do nothing: `graph_size` agrees on the steps' common size."""

    def graph_size(self, batch: ForwardBatch, graphs: GraphRunner | None) -> int | None:
        return self._agreed(batch, graphs).size

    def idle(self, graphs: GraphRunner | None, run_padding: Callable[[], object]) -> bool:
        batch = idle_batch(self.group.device)
        agreed = self._agreed(batch, graphs)
        if agreed.runner is not None:
            agreed.runner.replay(batch, size=agreed.size)
            return True
        has_work = any(agreed.tokens.num_tokens)
        if has_work:
            run_padding()
        return has_work

    def _agreed(self, batch: ForwardBatch, graphs: GraphRunner | None) -> AgreedStep:
        agreed = agree_on_step(self.group, batch, [] if graphs is None else [graphs])
        counts = agreed.tokens.num_tokens
        if agreed.runner is None and any(counts):
            self._joints.expect([max(count, 1) for count in counts])
        return agreed


class TokenJoints(Joints):
    """Where ranks with tokens of their own meet: split layers get the tokens of all ranks, and each
    rank keeps the results of its own."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self._expected: TokensOfRanks | None = None
        """Tokens of the ranks in the next call of the model."""
        self._tokens = TokensOfRanks.even(group, 0)
        self._gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Inputs of layers, such as the gate and the up-projection of an MLP that share one, with
        those of all ranks. Empty after the layer in which the ranks meet again."""

    def chosen(
        self, model: PreTrainedModel, names: Sequence[tuple[str, str]]
    ) -> Sequence[tuple[str, str]]:
        """Layers that work token by token: experts, and the column-wise and row-wise layers of a
        module that has both and is no attention. Others stay whole, such as the head.

        Raises InvalidInput for a model without such layers.
        """
        sides: dict[str, set[str]] = defaultdict(set)
        for name, style in names:
            if style not in WHOLE:
                sides[_parent(name)] |= {side for side in ("col", "row") if side in style}
        split = {layer for layer, side in sides.items() if len(side) == 2}
        # Modules of attention find their part of a cache by this attribute
        split = {layer for layer in split if not hasattr(model.get_submodule(layer), "layer_idx")}
        if not split:
            got = f"{type(model).__name__}, whose tp_plan splits only attention"
            expected = "a model whose other layers can be split"
            raise InvalidInput("dp_attention", got=got, expected=expected)
        return [
            (name, style)
            for name, style in names
            if (name if style == EXPERTS else _parent(name)) in split
            or not (style in WHOLE or style == EXPERTS or "col" in style or "row" in style)
        ]

    def expect(self, num_tokens: Sequence[int]) -> None:
        """In the next call of the model each rank has so many tokens. Otherwise all have as many as
        this one: while graphs are captured and layers are recorded."""
        self._expected = TokensOfRanks.of(self.group, num_tokens)

    def follow(self, model: torch.nn.Module) -> None:
        """Take the tokens of each call of the model."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def before(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(self._gather, with_kwargs=True)

    def after(self, module: torch.nn.Module) -> None:
        module.register_forward_hook(self._scatter)

    def _begin(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        ids: torch.Tensor = kwargs["input_ids"]
        expected, self._expected = self._expected, None
        self._tokens = expected or TokensOfRanks.even(self.group, ids.numel())
        self._gathered.clear()

    def _gather(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        gathered = {name: self._of_all(module, value) for name, value in kwargs.items()}
        return tuple(self._of_all(module, value) for value in args), gathered

    def _of_all(self, module: torch.nn.Module, value: Any) -> Any:  # noqa: ANN401  # any argument
        if not isinstance(value, torch.Tensor):
            return value
        for known, gathered in self._gathered:
            if known is value:
                return gathered
        rows = _rows(value)
        if rows.shape[0] != self._tokens.own:
            got = f"{type(module).__name__} with {rows.shape[0]} rows for {self._tokens.own} tokens"
            expected = "layers that get one row for each token"
            raise InvalidInput("dp_attention", got=got, expected=expected)
        gathered = _shaped(self._tokens.gather(rows), value)
        self._gathered.append((value, gathered))
        return gathered

    def _scatter(
        self, module: torch.nn.Module, args: tuple[Any, ...], out: torch.Tensor
    ) -> torch.Tensor:
        self._gathered.clear()
        return _shaped(self._tokens.reduce_scatter(_rows(out).contiguous()), out)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[T, ...]: without the leading dims of one row of tokens."""
    return values.flatten(0, -2) if values.dim() > 2 else values


def _shaped(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """With as many dims as another tensor."""
    return rows if rows.dim() == like.dim() else rows.view(*[1] * (like.dim() - 2), *rows.shape)
