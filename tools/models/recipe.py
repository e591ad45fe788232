"""How the random models of a run are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DimsKind = Literal["small", "real"]
"""Dims that no deployed model has, which find what is taken for granted, or those that kernels
written for a few of them serve: heads of 64 and 128, latents of 512 and 64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Makes the same models again. It imports no torch, which the parent of a run does without."""

    seed: int = 0
    """Seed of dims, weights and prompts."""
    dtype: str = "float32"
    """Dtype of weights and activations."""
    dims: DimsKind = "small"
