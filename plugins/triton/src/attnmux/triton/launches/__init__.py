"""How a kernel is launched: its shape, its configurations, and the choice among kernels."""
