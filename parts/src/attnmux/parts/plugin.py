"""The parts of this package, each as the solver sees it. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attnmux.core import Choice, Request
from attnmux.core.plugin import Ask, Part, Served
from attnmux.parts.requests import (
    has_separable_trees,
    linear_request,
    parts_request,
    prefixes_request,
    undrafted_request,
)


class DraftTrees(Part):
    """Draft trees on backends without masks: one reads the prefixes, and LSE merges attention among
    the drafts (`TreeAttnBackend`)."""

    factory = "attnmux.parts.draft_trees:make_trees"
    after_refusal = True
    level = 1
    phases = MappingProxyType({"verify": ("prefixes", "decode"), "draft": ("", "extend")})

    def wants(self, request: Request) -> bool:
        return not request.other_layers and has_separable_trees(request)

    def left(self, request: Request) -> Request:
        return undrafted_request(request)

    def asks(self, request: Request) -> Mapping[str, Ask]:
        prefixes = Ask(
            request=prefixes_request(request),
            named_for=request.verify_lead if "verify" in request.phases else "",
            otherwise="has no draft trees, and does not read their prefixes with LSE",
        )
        return {"prefixes": prefixes}

    def lines(self, request: Request, served: Served) -> Sequence[str]:
        reader = served["prefixes"]["decode"]
        return [
            "draft trees are verified in two parts, merged by LSE: "
            f"{reader} reads the prefixes, and attnmux-parts the drafts"
        ]


class ExpandedPrompts(Part):
    """Long MLA prompts with expanded heads, the cached prefix in chunks (`ChunkedPrefixBackend`).

    Only plain MLA has them: a part of the keys can be merged by LSE, but not a part of a window.
    Chunks depend on the other requests of a step, so that a deterministic request has none.
    """

    factory = "attnmux.parts.chunked_prefix:make_expanded"

    def wants(self, request: Request) -> bool:
        unmerged = (request.sliding_window, request.attention_chunk, request.custom_mask)
        unfit = request.kind != "mla" or any(unmerged) or request.deterministic
        return not unfit and bool(request.dtype and request.head_dim)

    def asks(self, request: Request) -> Mapping[str, Ask]:
        parts = parts_request(request)
        return {"prompts": Ask(request=parts, is_optional=True, rivals="extend")}

    def lines(self, request: Request, served: Served) -> Sequence[str]:
        if not served:
            return ()
        reader = served["prompts"]["extend"]
        return [f"{reader} serves prompts with expanded heads, if that takes fewer operations"]


class LinearLayers(Part):
    """Layers without softmax attention, each kind by backends of its own
    (`HybridLinearAttnBackend`)."""

    factory = "attnmux.parts.linear_hybrid:make_linear_layers"
    around = "model"
    level = 1

    def asks(self, request: Request) -> Mapping[str, Ask]:
        return {
            kind: Ask(request=linear_request(request, kind), is_optional=True, named_for="linear")
            for kind, _ in request.linear_layers
            if kind in Request.LINEAR_KINDS
        }

    def lines(self, request: Request, served: Served) -> Sequence[str]:
        return [
            f"{_by_phase(served[kind])} serves {count} {kind} layers"
            if kind in served
            else f"no backend serves {count} {kind} layers"
            for kind, count in request.linear_layers
        ]


def _by_phase(served: Mapping[str, Choice]) -> str:
    """One name, or that of each phase."""
    names = {choice.backend: phase for phase, choice in served.items()}
    if len(names) == 1:
        return str(next(iter(served.values())))
    return " and ".join(f"{name} ({phase})" for name, phase in names.items())


class ChosenPages(Part):
    """Decode steps over the pages that Quest chooses (`SparseAttnBackend`)."""

    factory = "attnmux.parts.sparse_pages:make_chosen_pages"
    level = 1

    def lines(self, request: Request, served: Served) -> Sequence[str]:
        return [
            f"an approximation: decode reads {request.sparse_budget} tokens of a request, in the "
            f"pages that {request.sparse} chooses for each KV head; prompts are read whole"
        ]


class IndexedBlocks(Part):
    """Layers whose tokens see the blocks that an indexer picks (`PickedBlocksBackend`)."""

    factory = "attnmux.parts.picked_blocks:make_picked_blocks"
    level = 1

    def lines(self, request: Request, served: Served) -> Sequence[str]:
        return [
            "attnmux-parts, or a kernel that a plugin offers, serves the layers with an indexer: "
            f"each token sees {request.index_topk} blocks of {request.index_block_size} keys"
        ]


class TwoBatches(Part):
    """Steps in two halves, each with a backend of its own (`TboAttnBackend`)."""

    factory = "attnmux.parts.two_batches:make_two_batches"
    around = "model"


CHOSEN_PAGES = ChosenPages()
DRAFT_TREES = DraftTrees()
EXPANDED_PROMPTS = ExpandedPrompts()
LINEAR_LAYERS = LinearLayers()
PICKED_BLOCKS = IndexedBlocks()
TWO_BATCHES = TwoBatches()
