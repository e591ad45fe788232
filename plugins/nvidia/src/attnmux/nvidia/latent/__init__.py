"""Backends on latent rows (MLA): dense decode, and DeepSeek's sparse attention."""
