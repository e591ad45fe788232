"""Indexers and compressors: what a token sees, and the pools of the keys that decide it."""
