"""Layers that mix tokens without softmax attention, in the contract's terms."""
