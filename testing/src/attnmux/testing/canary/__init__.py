"""Checks of a backend while it serves, and the failed steps that are kept and replayed."""
