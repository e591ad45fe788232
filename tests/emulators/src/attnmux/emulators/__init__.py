"""Kernel libraries of vendors in plain torch, for tests on machines without the hardware."""
