"""Choosing a backend: plain data in, a Decision out. No module below here imports torch.

The rooms, in reading order:

common      read-only containers, checks of given values, and the words of a verdict
ask         a request, also as read from a model's config.json, and the asker's policy
machine     a platform, the table of vendors, the CPU
offer       cards: clauses of conditions, priors, options, and the libraries that they require
find        what is here: installed plugins, and the devices that their probes report
judge       one card, one phase: the axes of choosing, and why a card does not serve
search      all cards: the best backends with one page size and one KV dtype
tell        the answer: decision or refusal, and a verdict on every candidate
solver      `solve`, which puts these together
measured    what this machine has measured, and how that changes the choice

A room imports only those above it; import-linter checks this (`lint-imports`).
"""
