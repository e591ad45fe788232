"""Choosing a backend: plain data in, a Decision out. Nothing below here imports torch."""
