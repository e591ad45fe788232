"""Kernels of linear layers: recurrences by token and by chunk, and short convolutions."""
