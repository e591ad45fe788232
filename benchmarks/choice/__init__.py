"""The cost of choosing by measurements; `python -m benchmarks.choice` measures it."""
