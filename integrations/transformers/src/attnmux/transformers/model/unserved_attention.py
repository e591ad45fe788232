"""Models whose own attention no adapter can serve, with the reasons."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch
from transformers import PreTrainedConfig

from attnmux.core import InvalidInput

SEES_LATER = "a model in which each token sees later ones too"
UNSERVED: Mapping[str, str] = MappingProxyType(
    {
        "CpmAntAttention": SEES_LATER,
        "Glm5NextTextIndexer": "keys of a latent that an indexer picks in pools",
        "MistralLarge4TextIndexer": "keys that an indexer picks by scores scaled by position",
        "ProphetNetNgramSelfAttention": "a bias by distance that depends on the query, and streams "
        "that each see keys of their own",
        "ReformerAttention": "attention among the keys that are hashed to a query's bucket",
        "XLNetRelativeAttention": SEES_LATER,
    }
)
"""Obstacles in models that compute attention in their own code, by the class of a module."""


def check_own_attention(model_class: type[torch.nn.Module], config: PreTrainedConfig) -> None:
    """Raise InvalidInput, with the reason, for a model whose own attention no layer expresses."""
    beside = vars(sys.modules[model_class.__module__])
    reasons = [reason for name, reason in UNSERVED.items() if name in beside]
    # A module that imports everything from transformers has the name too
    if "XLMModel" in beside and not getattr(config, "causal", True):
        reasons = [f"{SEES_LATER}, by its config's causal=False"]
    if reasons:
        expected = "causal attention, with a fixed bias by distance at most"
        raise InvalidInput(model_class.__name__, got=reasons[0], expected=expected)
