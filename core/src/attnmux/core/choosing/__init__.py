"""Choosing a backend: plain data in, a Decision out. No module here imports torch.

`solver.py` has the whole story; judging one card, the search over all cards and the answer follow.
"""
