"""Ranks of a group that run one model: tensor parallel, and with KV interleaved over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    CapturingRanks,
    Choice,
    Decision,
    GraphRunner,
    InvalidInput,
    KVPool,
    LayerSpec,
    Measurement,
    Offer,
    Platform,
    Policy,
    Request,
    TunedLaunch,
)
from attnmux.distributed import (
    HeadSplit,
    InterleavedDecision,
    InterleavedKVPool,
    Interleaving,
    RankGroup,
    build_interleaved,
    capture_on_all_ranks,
    check_same_libraries,
    decide_interleaved,
    shared_launches,
)
from attnmux.transformers.parallel.agreement import (
    Companions,
    check_step,
    decided,
    together,
)
from attnmux.transformers.parallel.split import Joints, heads_are_split, split_model
from attnmux.transformers.ranks import Builds, Deals, Ranks, Synchronises
from attnmux.transformers.requests.prompt_images import PromptImages
from attnmux.transformers.requests.slots import PagedAllocator

LIBRARIES = ("torch", "transformers", "attnmux-distributed", "attnmux-transformers")
"""Distributions that ranks have in common, in addition to those of plugins."""

T = TypeVar("T")


class GroupDeals(Deals):
    """Every rank of a group runs all requests."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def read_images(self, read: Callable[[], PromptImages]) -> PromptImages:
        """Raises RanksDiffer for other images on one rank."""
        images = together(self.group, read)
        check_step(self.group, "images", [images.keys])
        # Towers may round otherwise, and ranks would go on with other states
        self.group.broadcast(images.embeds.view(torch.uint8))
        return images


class GroupBuilds(Builds):
    """The ranks of a group decide and load together, each the whole model."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def check_libraries(self, offers: Sequence[Offer]) -> None:
        check_same_libraries(self.group, offers, LIBRARIES)

    def decided(
        self, decide: Callable[[], Decision], platform: Platform, offers: Sequence[Offer]
    ) -> Decision:
        (decision,) = decided(self.group, lambda: (decide(),), platform, offers)
        return decision

    def launches(self, own: tuple[TunedLaunch, ...]) -> tuple[TunedLaunch, ...]:
        return shared_launches(self.group, own)

    def together(self, make: Callable[[], T]) -> T:
        return together(self.group, make)

    def smallest(self, number: int) -> int:
        return min(count for (count,) in self.group.exchange_numbers([number]))


class GroupSteps(Synchronises):
    """The ranks of a group run the same steps."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def capture(self, make: Callable[[CapturingRanks], GraphRunner]) -> GraphRunner:
        return capture_on_all_ranks(self.group, make)

    def check_step(self, kind: str, requests: Callable[[], Sequence[Sequence[int]]]) -> None:
        check_step(self.group, kind, requests())

    def wait(self, event: torch.Event) -> None:
        self.group.wait_for(event)


class GroupRanks(Ranks):
    """The ranks of a group."""

    def __init__(
        self,
        group: RankGroup,
        *,
        requests: GroupDeals | None = None,
        building: GroupBuilds | None = None,
        steps: GroupSteps | None = None,
    ) -> None:
        super().__init__(
            rank=group.rank,
            size=group.size,
            requests=requests or GroupDeals(group),
            building=building or GroupBuilds(group),
            steps=steps or GroupSteps(group),
        )


class TensorParallelRanks(GroupRanks):
    """Each rank has a part of every layer's heads and weights."""

    def __init__(self, group: RankGroup, config: PreTrainedConfig) -> None:
        super().__init__(group, building=SplitBuilds(group, config))


class SplitBuilds(GroupBuilds):
    """Each rank loads its part of the weights."""

    def __init__(self, group: RankGroup, config: PreTrainedConfig) -> None:
        super().__init__(group)
        self._splits_heads = heads_are_split(config)

    @property
    def head_ranks(self) -> int:
        return self.group.size if self._splits_heads else 1

    def split(self, model: PreTrainedModel) -> None:
        self.together(lambda: split_model(model, Joints(self.group)))


class InterleavedRanks(GroupRanks):
    """Each rank also keeps a part of every request's tokens, and all KV heads of these."""

    def __init__(self, group: RankGroup, config: PreTrainedConfig, *, interleave: int = 1) -> None:
        """interleave: successive tokens on one rank.

        Raises InvalidInput for a model whose heads each rank keeps.
        """
        super().__init__(group, building=InterleavedBuilds(group, config, interleave))


class InterleavedBuilds(SplitBuilds):
    """Backends and pools of a rank that keeps a part of every request's tokens."""

    run_images = False
    run_indexers = False

    def __init__(self, group: RankGroup, config: PreTrainedConfig, interleave: int) -> None:
        """Raises as `InterleavedRanks` does."""
        super().__init__(group, config)
        if not self._splits_heads:
            got = f"a {config.model_type} model, whose tp_plan keeps all heads on each rank"
            raise InvalidInput("dcp", got=got, expected="a model whose heads are split")
        self._interleave = interleave
        self._kv_copies = _kv_copies(config, group.size)
        self._prompts = Companions(group)
        """Decisions for prompts, by the decision for decoding."""

    def solve(
        self,
        request: Request,
        platform: Platform,
        offers: Sequence[Offer],
        policy: Policy,
        measurements: Sequence[Measurement],
    ) -> Decision:
        check_whole_keys(request, "dcp")
        both = decide_interleaved(
            request,
            platform,
            offers,
            policy,
            size=self.group.size,
            kv_copies=self._heads(request.latent).kv_copies,
            interleave=self._interleave,
            measurements=measurements,
        )
        self._prompts.add(both.decode, both.prompts)
        return both.decode

    def decided(
        self, decide: Callable[[], Decision], platform: Platform, offers: Sequence[Offer]
    ) -> Decision:
        return self._prompts.decided(decide, platform, offers)

    def stored(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        heads = self._heads(layers[0].kind == "mla")
        return tuple(heads.whole(layer) for layer in layers)

    def tokens_each(self, tokens: int) -> int:
        return -(-tokens // self.group.size)

    def shared_pool(self, own: KVPool, allocator: PagedAllocator) -> tuple[KVPool, PagedAllocator]:
        pool = InterleavedKVPool(
            own,
            Interleaving(
                rank=self.group.rank,
                size=self.group.size,
                page_size=own.page_size,
                interleave=self._interleave,
            ),
        )
        return pool, PagedAllocator(pool.size, pool.page_size, pool.device)

    def build(self, decision: Decision, context: BackendContext) -> AttentionBackend:
        both = InterleavedDecision(decode=decision, prompts=self._prompts.of(decision))
        return build_interleaved(both, context, self._heads(decision.request.latent))

    def served(self, decision: Decision) -> Mapping[str, Choice]:
        return {**self._prompts.of(decision).phases, **decision.phases}

    def summary(self, decision: Decision) -> str:
        both = InterleavedDecision(decode=decision, prompts=self._prompts.of(decision))
        return both.summary()

    def _heads(self, latent: bool) -> HeadSplit:
        """All ranks hold the same latent; K and V of heads are split, expanded ones too."""
        copies = self.group.size if latent else self._kv_copies
        return HeadSplit(group=self.group, kv_copies=copies)


def check_whole_keys(request: Request, ranks: str) -> None:
    """Raise InvalidInput for decoding over chosen pages. ranks: their name in the message."""
    if request.sparse is not None or request.sparse_budget is not None:
        expected = f"None with {ranks}: pages are chosen on one device, of all keys of a head"
        raise InvalidInput("sparse", got=request.sparse, expected=expected)


def _kv_copies(config: PreTrainedConfig, size: int) -> int:
    """How many ranks in succession hold the same KV heads."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return max(size // int(heads), 1)
