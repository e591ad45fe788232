"""Readers of a config.json: what a model asks of attention."""
