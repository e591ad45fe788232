"""What choosing by measurements costs; `python -m benchmarks.choice` measures it."""
