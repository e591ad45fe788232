"""Backends on FlashAttention 3 for Hopper: attention with heads, MLA, and dual chunks."""
