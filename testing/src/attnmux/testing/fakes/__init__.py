"""Correct, slow backends with their cards, and a platform of a made-up vendor."""
