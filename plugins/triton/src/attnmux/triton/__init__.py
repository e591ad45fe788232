"""Portable Triton kernels: they belong to no vendor. `plugin.py` advertises them."""
