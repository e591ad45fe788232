"""Backends of linear layers: the gated delta rule and short causal convolutions."""
