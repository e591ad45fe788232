"""A loaded model on its backend: capacity, one step, graphs and compilation."""
