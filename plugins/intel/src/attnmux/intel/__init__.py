"""Intel devices, and backends around Intel's kernel libraries. `plugin.py` advertises them."""
