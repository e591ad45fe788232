"""Layers without softmax attention: their backends, states and short convolutions."""
