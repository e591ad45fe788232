"""Indexers in steps: what a token sees, and the pools of the keys that decide it."""
