"""The softmax backend: layers, steps, plans and launches of its two kernels."""
