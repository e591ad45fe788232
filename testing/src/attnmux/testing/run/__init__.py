"""Runs a backend on a case and compares results, writes and side effects with the reference."""
