"""AMD devices, and backends around AMD's kernel libraries. `plugin.py` advertises them."""
