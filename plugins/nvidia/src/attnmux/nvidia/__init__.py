"""NVIDIA devices, and backends on NVIDIA's kernel libraries; `plugin.py` is the entry point."""
