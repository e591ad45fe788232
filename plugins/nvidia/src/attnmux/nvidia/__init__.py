"""NVIDIA devices, and backends around NVIDIA's kernel libraries. `plugin.py` advertises them."""
