"""Choosing a backend: plain data in, a Decision out. No module below here imports torch.

The rooms in reading order are ask, machine, offer, find, judge, search, tell, solver and measured.
Each says what it holds, and imports only those before it (`lint-imports` checks this). All stand on
`facts`.
"""
