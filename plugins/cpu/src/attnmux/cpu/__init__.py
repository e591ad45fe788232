"""Attention backends that need no accelerator. `plugin.py` advertises them."""
