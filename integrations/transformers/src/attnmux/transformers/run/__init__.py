"""A loaded model on its backend: capacity, one step, and what makes steps faster."""
