"""Backends on offer: their cards, conditions, names, options and proof."""
