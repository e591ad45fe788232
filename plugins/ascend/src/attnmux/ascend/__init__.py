"""Ascend devices, and backends around CANN's kernels. `plugin.py` advertises them."""
